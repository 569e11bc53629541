"""Writes docs/families.md from the record of `benchmarks/families.py`. Tests compare the record with new results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tests.support.models.architecture_columns import COLUMNS, Cell
from tests.support.models.architectures import WAYS, Outcome, Way
from tests.support.models.chat_families import FAMILIES
from tests.support.models.thinking_families import THINKING
from tests.support.runs.cells import ROOT

PAGE = ROOT / "docs" / "families.md"
RECORD = ROOT / "benchmarks" / "results" / "families.json"
HEAD = """# Architectures

`python benchmarks/families.py` writes this page. Its lines are the decoders in transformers {version}'s own list of causal
models. `tests/architecture/test_families.py` and `tests/planner/test_families_planned.py` repeat them. {right} of {count}
architectures train correctly in rows with several documents, {unpacked} more in rows with one; {refused} are refused.

An architecture is trained correctly or refused in one line, before its weights are read. *Right* means: a tiny model with
random weights has the loss and gradients of the library's own eager forward on one document at a time, to 1e-5 in float32.
A trial of the architecture itself decides (`finetune/architecture/trial.py`), so it works for unlisted architectures too.

| column | what was measured |
|---|---|
| packed, unpacked | *right* with each `model.attention`, or with those in brackets. *auto* is document-isolated attention, with sinks, soft caps, windows, chunks and dropout; layers with a state run on one document after another |
| adapters | the share of matrix weights that `lora.target_modules: all-linear` reaches, from the tiny model's receipt |
| 4-bit | their share in 4 bits under `quantization.load_in_4bit`; loss and adapter gradients equal those of a dequantised base, to 1e-5, on a CPU |
| experts | the share of experts' weights in 4 bits under the same setting; `-`: no parameter holds all experts of a layer |
| plan | `finetune plan` plans LoRA on one GPU for the tiny model, with its weights to the byte |
| rehearsal | `finetune rehearse`'s small model of the default configuration trains for a step |
| mask | families whose chat templates have hand-written masks in `tests/tokens`. The mask follows from the template, so every architecture can be trained on chats |

`-` in other columns: the architecture is refused, so nothing else was tried.

| architecture | packed | unpacked | adapters | 4-bit | experts | plan | rehearsal | mask | remarks |
|---|---|---|---|---|---|---|---|---|---|
"""  # noqa: E501  # a table's row is one line
# Architectures of the models whose templates are among those of the golden masks.
MASKS: dict[str, tuple[str, ...]] = {
    "llama": ("llama3", "llama31", "smollm"),
    "mistral": ("mistral",),
    "qwen2": ("qwen",),
    "gpt_oss": ("gpt_oss",),
    "smollm3": ("smollm3",),
    **dict.fromkeys(("qwen3", "qwen3_moe"), ("qwen3",)),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), ("qwen35",)),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), ("gemma",)),
    "deepseek_v3": ("deepseek", "r1"),
}
GOLDEN = {*FAMILIES, *THINKING}
OF_COLUMNS = {
    "adapters": "adapters leave out ",
    "4-bit": "4-bit leaves in 16 bits ",
    "experts": "experts: ",
    "plan": "plan: ",
    "rehearsal": "rehearsal: ",
}


def entry_of(found: Mapping[Way, Outcome], cells: Mapping[str, Cell]) -> dict[str, Any]:
    """An architecture's part of the record."""
    ways = {way.title: {"word": one.word, "worst": one.worst, "refusal": one.refusal} for way, one in found.items()}
    return {"ways": ways, "columns": {column: [cell.shown, cell.why] for column, cell in cells.items()}}


def recorded() -> dict[str, Any]:
    """The record: `transformers`, and an entry for each architecture."""
    found: dict[str, Any] = json.loads(RECORD.read_text("utf-8"))
    return found


def words_of(entry: Mapping[str, Any]) -> dict[str, tuple[str, str | None]]:
    """What was found in each way: a word, and the reason; without the differences, which are another machine's."""
    return {title: (way["word"], way["refusal"]) for title, way in entry["ways"].items()}


def page_of(record: Mapping[str, Any]) -> str:
    """docs/families.md."""
    entries = record["architectures"]
    packed = [name for name, entry in entries.items() if _words(entry, packing=True)]
    either = [name for name, entry in entries.items() if _words(entry, packing=True) or _words(entry, packing=False)]
    figures = {"right": len(packed), "unpacked": len(either) - len(packed), "refused": len(entries) - len(either)}
    head = HEAD.format(version=record["transformers"], count=len(entries), **figures)
    return head + "".join(line_of(name, entry) for name, entry in sorted(entries.items()))


def line_of(name: str, entry: Mapping[str, Any]) -> str:
    """The architecture's line of the table."""
    columns = entry["columns"]
    shown = {column: columns[column][0] if column in columns else "-" for column in COLUMNS}
    cells = [_right(_words(entry, packing=packing)) for packing in (True, False)]
    cells += [
        shown["adapters"],
        shown["4-bit"],
        shown["experts"],
        shown["plan"],
        shown["rehearsal"],
        ", ".join(MASKS.get(name, "-")),
    ]
    return f"| {name} | {' | '.join(cells)} | {_remarks(entry)} |\n"


def _words(entry: Mapping[str, Any], *, packing: bool) -> list[str]:
    """The attentions with which it is right."""
    ways = [way for way in WAYS if way.packing == packing]
    return [way.attention for way in ways if entry["ways"][way.title]["word"] == "right"]


def _right(attentions: list[str]) -> str:
    if not attentions:
        return "refused"
    return "right" if len(attentions) == len(WAYS) // 2 else f"right ({', '.join(attentions)})"


def _remarks(entry: Mapping[str, Any]) -> str:
    refusal = entry["ways"][WAYS[0].title]["refusal"] or ""
    remarks = [re.sub(r"^model\.name_or_path: \w+ ", "", refusal)]
    refusals: dict[str, list[str]] = {}
    for column, words in OF_COLUMNS.items():
        shown, why = entry["columns"].get(column, ("", ""))
        if shown in ("refused", "WRONG"):
            refusals.setdefault(why, []).append(column)
        elif why:
            remarks.append(f"{words}{why}")
    remarks += [f"{', '.join(columns)}: {why}" for why, columns in refusals.items()]
    return "; ".join(filter(None, remarks)).replace("|", "\\|")
