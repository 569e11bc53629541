"""A preview on the terminal and as a page."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from finetune.output_stream import UNBROKEN, without_controls
from finetune.report.html import render_page
from finetune.report.pictures import Chart, Series
from finetune.report.preview import Preview, ShownRow, TokenText
from finetune.wording import counted

HEAD, TAIL = 500, 150  # tokens shown of a long row on the terminal: its first, and its last
SIDE_BY_SIDE = 100  # columns of a terminal on which a pair's answers stand beside each other
BAR = 40  # characters of the longest bar
SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def print_preview(preview: Preview, console: Console) -> None:
    """Print rows, figures and findings.

    Supervised tokens are green and control tokens magenta. Without colour, ⟦supervised⟧.
    """
    for row in preview.rows:
        console.print(Text(_heading(row), style="bold"))
        console.print(_row_text(row.pieces, marks=not console.color_system), soft_wrap=False)
        if row.answers:
            _print_answers(row, console)
        console.print()
    if preview.facts:
        console.print(Group(*(Text(line) for line in facts_lines(preview))))
        console.print(Text("\ntokens of a document", style="bold"))
        most = max((count for *_, count in preview.histogram), default=0) or 1
        bars = [
            f"{low:>7,} to {high - 1:>7,}  {'█' * round(BAR * count / most):<{BAR}} {count:,}"
            for low, high, count in preview.histogram
        ]
        console.print(Text("\n".join(bars)))
    for finding in preview.findings:
        line = f"{finding.severity}: {finding.text}"
        if finding.places:
            line += f" ({', '.join(finding.places)})"
        console.print(Text(without_controls(line), SEVERITY_STYLES[finding.severity]))


def _print_answers(row: ShownRow, console: Console) -> None:
    """A pair's answers, the chosen one on the left; one below the other on a narrow terminal, and where no line is
    broken."""
    marks = not console.color_system
    titles = [f"{answer.name}: {answer.learned:,} supervised" for answer in row.answers]
    texts = [_row_text(answer.pieces, marks=marks) for answer in row.answers]
    if not SIDE_BY_SIDE <= console.width < UNBROKEN:
        for title, text in zip(titles, texts, strict=True):
            console.print(Text(title, style="bold dim"))
            console.print(text, soft_wrap=False)
        return
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), header_style="bold dim")
    for title in titles:
        table.add_column(title, ratio=1)
    table.add_row(*texts)
    console.print(table)


def _heading(row: ShownRow) -> str:
    """`rows.jsonl:3: 40 tokens, 12 supervised; 1 user, 1 assistant`."""
    heading = f"{row.place}: {counted(row.tokens, 'token')}, {row.learned:,} supervised"
    if row.label:
        heading += f"; {row.label}"
    if row.answers:
        return f"{heading}; one prompt, two answers"
    if not row.roles:
        return heading
    return f"{heading}; {', '.join(f'{count} {role}' for role, count in row.roles.items())}"


def _row_text(tokens: list[TokenText], *, marks: bool) -> Text:
    """A row's tokens, or a long row's first and last. `marks`: put ⟦⟧ around supervised stretches."""
    text = Text()
    if len(tokens) > HEAD + TAIL:
        _append_tokens(text, tokens[:HEAD], marks=marks)
        text.append(f"\n… {len(tokens) - HEAD - TAIL:,} tokens …\n", style="dim italic")
        tokens = tokens[-TAIL:]
    _append_tokens(text, tokens, marks=marks)
    return text


def _append_tokens(text: Text, tokens: list[TokenText], *, marks: bool) -> None:
    inside = False  # of a supervised stretch
    for index, token in enumerate(tokens):
        if marks and token.learned != inside:
            text.append("⟦" if token.learned else "⟧")
        inside = token.learned
        styles = ["default"]
        if token.special:
            styles = ["magenta"]
        elif token.learned:
            styles = ["green"]
        if index % 2:  # neighbours differ, so that one sees where a token ends
            styles.append("underline")
        if token.learned:
            styles.append("bold")
        text.append(without_controls(token.text), style=" ".join(styles))
    if marks and inside:
        text.append("⟧")


def facts_lines(preview: Preview) -> list[str]:
    """The data in sentences."""
    facts = preview.facts
    steps = counted(facts["steps_per_epoch"], "step")
    rows = f"{counted(facts['rows'], 'row')}, {facts['fill']:.0%} full; "
    if preview.unit != "document":  # a row is one pair or one answer, and is never filled up
        rows = ""
    lines = [
        f"{counted(facts['documents'], preview.unit)}, {counted(facts['tokens'], 'token')} an epoch, "
        f"{facts['supervised_tokens']:,} supervised ({facts['supervised_tokens'] / facts['tokens']:.0%})",
        f"{rows}{steps} an epoch of about {facts['tokens_per_step']:,} tokens",
        f"tokens of a document: median {facts['tokens_median']:,.0f}, 99 % up to {facts['tokens_99th']:,.0f}, longest "
        f"{facts['tokens_longest']:,} of {preview.max_length:,}",
    ]
    if "chosen_tokens_mean" in facts:  # a model learns a difference in length first
        chosen, rejected = facts["chosen_tokens_mean"], facts["rejected_tokens_mean"]
        lines.append(f"supervised tokens of an answer, on average: chosen {chosen:,.0f}, rejected {rejected:,.0f}")
    if len(facts["data_sets"]) > 1:
        for part in facts["data_sets"]:
            documents, tokens = counted(part["documents"], preview.unit), counted(part["tokens"], "token")
            line = f"  {part['share']:.1%} {part['name']}: {documents}, {tokens}"
            if part["weight"] != 1:
                line += f", weight {part['weight']:g}"
            lines.append(line)
    lines += preview.batches.get("notes", [])[:1]
    if facts["eval_documents"]:
        lines.append(
            f"held out: {counted(facts['eval_documents'], preview.unit)}, {counted(facts['eval_tokens'], 'token')}"
        )
    if preview.roles:
        lines.append("messages: " + ", ".join(f"{count:,} {role}" for role, count in preview.roles.items()))
    lines.append("longest: " + ", ".join(f"{place} ({tokens:,})" for place, tokens in preview.longest))
    return lines


def as_page(preview: Preview, recipe: str) -> str:
    """The preview as one HTML page, with each row's tokens in full."""
    lengths = Series("documents", [(index, count) for index, (*_, count) in enumerate(preview.histogram)])
    title = f"Tokens of a training document; max_length {preview.max_length:,}"
    return render_page(
        "preview.html.jinja",
        title=f"Preview of {recipe}",
        lead="The tokens that the model will read. Supervised tokens are marked.",
        preview=preview,
        facts=facts_lines(preview) if preview.facts else [],
        lengths=Chart(title, [lengths], [f"{low:,}" for low, *_ in preview.histogram]),
        rows=[(_heading(row), row.pieces, row.answers) for row in preview.rows],
    )
