"""README's picture shows the report as it is now."""

from __future__ import annotations

from PIL import Image

from benchmarks.readme_picture import PICTURE, digest


def test_the_picture_is_not_older_than_the_reports_templates() -> None:
    with Image.open(PICTURE) as image:
        assert image.info.get("templates") == digest(), (
            "the report's templates have changed: train quickstart, then python benchmarks/readme_picture.py RUN"
        )
        assert image.width == 900
