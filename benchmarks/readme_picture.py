"""README's picture: the first part of a finished run's report, as Chromium shows it.

python benchmarks/readme_picture.py runs/quickstart        (needs chromium; writes docs/pictures/quickstart.png)

The picture holds a digest of the report's templates: tests/benchmarks/test_readme_picture.py fails when it is older
than they are.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image, ImageChops, PngImagePlugin

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from finetune.report import run_page
from finetune.report.curves import read_runs

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "quickstart.png"
TEMPLATES = ("report.html.jinja", "page.html.jinja", "parts.html.jinja")
SECOND_PART = '<h2 class="part">'  # for the trainer
WIDTH, MARGIN = 900, 16  # pixels


def digest() -> str:
    """Return a digest of the templates that the picture shows."""
    folder = Path(run_page.__file__).parent
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in TEMPLATES)).hexdigest()


def draw(run: Path) -> None:
    """Write the picture: the report's first part, without the space around it."""
    page = run_page.report(read_runs([run])).partition(SECOND_PART)[0]
    with TemporaryDirectory() as folder:
        (Path(folder) / "page.html").write_text(page, "utf-8")
        shot = Path(folder) / "page.png"
        subprocess.run(
            [
                "chromium",
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                f"--window-size={WIDTH},3000",
                f"--screenshot={shot}",
                f"file://{folder}/page.html",
            ],
            check=True,
            capture_output=True,
        )
        image = Image.open(shot).convert("RGB")
    shown = ImageChops.difference(image, Image.new("RGB", image.size, image.getpixel((0, 0)))).getbbox()
    assert shown is not None, "the page is empty"
    facts = PngImagePlugin.PngInfo()
    facts.add_text("templates", digest())
    image.crop((0, 0, WIDTH, shown[3] + MARGIN)).save(PICTURE, pnginfo=facts, optimize=True)
    print(PICTURE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    draw(parser.parse_args().run)
