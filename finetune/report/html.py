"""Self-contained HTML pages from the templates of this folder (*.html.jinja)."""

from __future__ import annotations

from pathlib import Path

from finetune.report.pictures import Chart, Size, inline_svg

SHOWN_LETTERS = 1500  # of a prompt or an answer


def render_page(template: str, **values: object) -> str:
    """The document of a template. Values are text and never markup; a name that the template lacks raises."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"svg": _svg, "shortened": _shortened}
    page = environment.get_template(template).render(values)
    return page.encode("utf-8", "replace").decode("utf-8")  # half a letter, of a run's own samples


def _svg(chart: Chart, size: Size) -> object:
    from markupsafe import Markup

    return Markup(inline_svg(chart, size))  # matplotlib escapes what it writes


def _shortened(text: object) -> str:
    text = str(text)
    return text if len(text) <= SHOWN_LETTERS else text[:SHOWN_LETTERS] + " …"
