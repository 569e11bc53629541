"""A preview on the terminal and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from finetune.output_stream import without_controls
from finetune.report.html import render_page
from finetune.report.pictures import Chart, Series
from finetune.report.preview import Preview, ShownRow, TokenText
from finetune.wording import counted

HEAD, TAIL = 500, 150  # tokens of a long row shown on the terminal
BAR = 40  # characters of the longest bar
SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def print_preview(preview: Preview, console: Console) -> None:
    """Print it: learned tokens green, control tokens magenta; where there is no colour, ⟦learned⟧."""
    for row in preview.rows:
        console.print(Text(_heading(row), style="bold"))
        console.print(_row_text(row, marks=not console.color_system), soft_wrap=False)
        console.print()
    if preview.facts:
        console.print(Group(*(Text(line) for line in facts_lines(preview))))
        console.print(Text("\ntokens of a document", style="bold"))
        console.print(Text("\n".join(_bars(preview))))
    for finding in preview.findings:
        places = f" ({', '.join(finding.places)})" if finding.places else ""
        console.print(
            Text(without_controls(f"{finding.severity}: {finding.text}{places}"), SEVERITY_STYLES[finding.severity])
        )


def _heading(row: ShownRow) -> str:
    roles = ", ".join(f"{count} {role}" for role, count in row.roles.items())
    return f"{row.place}: {counted(row.tokens, 'token')}, {row.learned:,} learned" + (f"; {roles}" if roles else "")


def _row_text(row: ShownRow, *, marks: bool) -> Text:
    tokens = row.pieces
    text = Text()
    if len(tokens) > HEAD + TAIL:
        _add(text, tokens[:HEAD], marks=marks)
        text.append(f"\n… {len(tokens) - HEAD - TAIL:,} tokens …\n", style="dim italic")
        tokens = tokens[-TAIL:]
    _add(text, tokens, marks=marks)
    return text


def _add(text: Text, tokens: list[TokenText], *, marks: bool) -> None:
    learned = False
    for index, piece in enumerate(tokens):
        if marks and piece.learned != learned:
            text.append("⟦" if piece.learned else "⟧")
        learned = piece.learned
        colour = "magenta" if piece.special else "green" if learned else "default"
        # Neighbours differ, so that one sees where a token ends.
        text.append(
            without_controls(piece.text),
            style=f"{colour}{' underline' if index % 2 else ''}{' bold' if learned else ''}",
        )
    if marks and learned:
        text.append("⟧")


def facts_lines(preview: Preview) -> list[str]:
    """The data in sentences."""
    facts = preview.facts
    steps = counted(facts["steps_per_epoch"], "step")
    lines = [
        f"{counted(facts['documents'], 'document')}, {counted(facts['tokens'], 'token')} an epoch, "
        f"{facts['supervised_tokens']:,} learned ({facts['supervised_tokens'] / facts['tokens']:.0%})",
        f"{counted(facts['rows'], 'row')}, {facts['fill']:.0%} full; {steps} an epoch of "
        f"about {facts['tokens_per_step']:,} tokens",
        f"tokens of a document: median {facts['tokens_median']:,.0f}, 99 % up to {facts['tokens_99th']:,.0f}, longest "
        f"{facts['tokens_longest']:,} of {preview.max_length:,}",
    ]
    if len(facts["data_sets"]) > 1:
        lines += [_part_of_mixture(part) for part in facts["data_sets"]]
    lines += preview.batches.get("notes", [])[:1]
    if facts["eval_documents"]:
        lines.append(
            f"held out: {counted(facts['eval_documents'], 'document')}, {counted(facts['eval_tokens'], 'token')}"
        )
    if preview.roles:
        lines.append("messages: " + ", ".join(f"{count:,} {role}" for role, count in preview.roles.items()))
    lines.append("longest: " + ", ".join(f"{place} ({tokens:,})" for place, tokens in preview.longest))
    return lines


def _part_of_mixture(part: dict[str, Any]) -> str:
    weight = f", weight {part['weight']:g}" if part["weight"] != 1 else ""
    documents, tokens = counted(part["documents"], "document"), counted(part["tokens"], "token")
    return f"  {part['share']:.1%} {part['name']}: {documents}, {tokens}{weight}"


def _bars(preview: Preview) -> Iterator[str]:
    most = max((count for *_, count in preview.histogram), default=0) or 1
    for low, high, count in preview.histogram:
        yield f"{low:>7,} to {high - 1:>7,}  {'█' * round(BAR * count / most):<{BAR}} {count:,}"


def as_page(preview: Preview, recipe: str) -> str:
    """The same as one HTML page, with all tokens of each row."""
    lengths = Series("documents", [(index, count) for index, (*_, count) in enumerate(preview.histogram)])
    title = f"Tokens of a training document; max_length {preview.max_length:,}"
    return render_page(
        "preview.html.jinja",
        title=f"Preview of {recipe}",
        lead="What the model will be given, and which part of it is learned.",
        preview=preview,
        facts=facts_lines(preview) if preview.facts else [],
        lengths=Chart(title, [lengths], [f"{low:,}" for low, *_ in preview.histogram]),
        rows=[(_heading(row), row.pieces) for row in preview.rows],
    )
