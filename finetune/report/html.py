"""Self-contained HTML pages from this folder's templates (*.html.jinja)."""

from __future__ import annotations

from pathlib import Path

from finetune.report.pictures import Chart, inline_svg

SHOWN_LETTERS = 1500  # of a prompt or an answer


def render_page(template: str, **values: object) -> str:
    """Render a template to a document. Values are text and never markup; a name that the template lacks raises."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def svg(chart: Chart) -> object:
        return Markup(inline_svg(chart))  # safe as markup: matplotlib escapes the texts that it draws

    def shortened(value: object) -> str:
        text = str(value)
        if len(text) <= SHOWN_LETTERS:
            return text
        return text[:SHOWN_LETTERS] + " …"

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"svg": svg, "shortened": shortened}
    page = environment.get_template(template).render(values)
    # A run's own samples may hold half a surrogate pair, which UTF-8 cannot write.
    return page.encode("utf-8", "replace").decode("utf-8")
