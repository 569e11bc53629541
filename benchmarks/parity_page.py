"""docs/parity.md and its picture, from the records of benchmarks/parity.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.report.pictures import COLOURS, new_figure
from finetune.scoring.intervals import interval

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURE = ROOT / "docs" / "parity.md", ROOT / "docs" / "pictures" / "parity.png"
TITLES = {
    "ours": "this kit",
    "trl": "TRL SFTTrainer",
    "trainer": "transformers Trainer + peft",
    "axolotl": "axolotl",
    "llamafactory": "LLaMA-Factory",
    "trl_dpo": "TRL DPOTrainer",
}
# Part one: 80 chats are 20 steps of 4 rows, in two micro-batches.
ROWS, AT_ONCE, ACCUMULATED, RATE = 80, 2, 2, 5e-3
SAME = 1e-5  # relative; what additions in another order do to 20 steps of AdamW is below this
# Part two.
TASK_ROWS, HELD_OUT, SEEDS = 64, 60, (1, 2, 3)
DRAWN = {
    "ours": "this kit",
    "trainer": "Trainer + peft",
    "axolotl": "axolotl",
    "trl": "TRL",
    "trl: line break not learned": "TRL, line break not learned",
    "llamafactory": "LLaMA-Factory",
    "llamafactory: line break not learned": "LLaMA-Factory, line break not learned",
}
# As it comes, and with one thing changed: (record, tool, what it is), the first of each group as the tool has it.
CAUSES = {
    "The line break after the end of the turn": (
        "ChatML ends a turn by `<|im_end|>` and a line break. This kit, axolotl and the Trainer's rows supervise the first; "
        "TRL (prompts and completions) and LLaMA-Factory supervise both. It costs nothing: inference stops at the end "
        "token. It adds an easy token to each row, so their loss is lower.",
        {
            "trl": "learned",
            "trl: line break not learned": "taken out of the labels",
            "llamafactory": "learned",
            "llamafactory: line break not learned": "taken out of the labels",
            "trl_dpo": "in DPO: learned in both answers",
            "trl_dpo: line break not learned": "in DPO: taken out",
        },
    ),
    "A mean per micro-batch": (
        "All five divide a step's summed loss by its supervised tokens. transformers before 4.46, and a model or trainer "
        "that does not take `num_items_in_batch`, averages each micro-batch and then the averages: tokens of short rows "
        "weigh more. The loss then depends on how a step is cut.",
        {"trainer: mean per micro-batch": "mean of means", "trainer": "one mean, as it comes"},
    ),
    "The end of the turn is not learned": (
        "The model then never stops. axolotl learns the end by default; `train_on_eos: none` is its own switch. "
        "DataCollatorForLanguageModeling takes every pad token out of the labels, and with it the end of each turn "
        "where both are one token, as in SmolLM2.",
        {
            "axolotl: end of turn not learned": "axolotl, `train_on_eos: none`",
            "axolotl: end put back": "the same, end put back into the labels",
            "trainer: every token, pad is the end": "whole chats, pad = end",
            "trainer: every token, pad of its own": "whole chats, a pad token of its own",
        },
    ),
    "A second begin-of-text token": (
        "As with Llama 3, template and tokenizer both write a BOS. Chats that the user renders to `text` begin with two "
        "under TRL's tokenisation. Chats given as messages begin with one in every tool.",
        {
            "trl: text with BOS": "text from the template",
            "trl: text, template's BOS removed": "the template's BOS removed",
        },
    ),
    "Documents that see each other": (
        "Eight chats in one packed row against the same eight side by side. TRL's packing isolates documents by "
        "FlashAttention alone, and says so; LLaMA-Factory's by `neat_packing`.",
        {
            "ours: eight rows packed": "this kit, packed",
            "axolotl: packed": "axolotl, `sample_packing`",
            "trl: packed": "TRL, `packing` without FlashAttention",
            "trl: not packed": "TRL, not packed",
            "llamafactory: packed": "LLaMA-Factory, `packing`",
            "llamafactory: neat packing": "LLaMA-Factory, `neat_packing`",
        },
    ),
}
THREADS = [
    (
        "axolotl#3154",
        "same settings, IFEval 0.52 against LLaMA-Factory's 0.70",
        "line break, packing and defaults below; at the same settings both take the same steps",
    ),
    (
        "trl#3432, LlamaFactory#8012",
        "AIME 14 by TRL, 76 by LLaMA-Factory",
        "the trainers agree to 1e-5 once the labels do; compare the rows first (`finetune preview`)",
    ),
    (
        "LlamaFactory#6577",
        "DPO differs between LLaMA-Factory and TRL",
        "TRL's DPO equals this kit's to 1e-5; the line break is the difference",
    ),
    (
        "axolotl#3196, #1100, #2262",
        "loss 2.4 or 4.75, 3.8 or 8, eight times, by batch size alone",
        "a mean per micro-batch, switched on and off; axolotl 0.21 does not do it",
    ),
    ("axolotl#2125, LlamaFactory#6254", "which of the two?", "the two tables of this page"),
    (
        "unsloth#3527",
        "a gap to TRL, and `does not accept num_items_in_batch`",
        "the mean per micro-batch; unsloth itself needs a GPU and is not on this page",
    ),
    (
        "unsloth#3482, #1178",
        "DPO's loss depends on accumulation",
        "DPO is a mean over pairs; two micro-batches here, equal",
    ),
    (
        "trl#1230, #805, alignment-handbook#204",
        "do packed documents see each other?",
        "switched on and off for three tools",
    ),
    ("trl#1400, OpenRLHF#393", "two BOS tokens", "switched on and off"),
    ("transformers#23530, #22794, trl#976", "the model never stops", "pad = end, switched on and off"),
    ("trl#5138", "`messages` learns the prompt too", "what each tool supervises, below"),
]
SETTINGS = {
    (
        "ours",
        "defaults",
    ): "`finetune init`: r 8, alpha 32, all linear layers, 2e-3, cosine, packed rows of 256 tokens, one a step",
    ("ours", "documented"): "[Results](results.md#learning-rate-and-rank): r 32, alpha 64, 5e-4, else the same",
    (
        "trl",
        "defaults",
    ): "SFTConfig: 2e-5, linear, 8 rows; ModelConfig: r 16, alpha 32, dropout 0.05, q and v; learns whole chats",
    (
        "trl",
        "documented",
    ): "`trl/scripts/sft.py`, LoRA: 2e-4, 2 x 8 rows, r 32, alpha 16; answers alone; not packed (see above)",
    (
        "trainer",
        "defaults",
    ): "TrainingArguments: 5e-5, linear, 8 rows; LoraConfig: r 8, alpha 8, q and v; learns whole chats",
    ("trainer", "documented"): "peft's quicktour: 1e-3, 32 rows, decay 0.01, r 8, alpha 32, dropout 0.1; answers alone",
    (
        "axolotl",
        "defaults",
    ): "r 8, alpha 16, all linear layers, 2e-4 (it has no default rate), its default schedule, one row",
    (
        "axolotl",
        "documented",
    ): "`examples/llama-3/lora-1b.yml`: r 16, alpha 32, dropout 0.05, 2e-4, cosine, 2 x 2 rows; not packed",
    ("llamafactory", "defaults"): "r 8, alpha 16, all linear layers, 5e-5, linear, 8 rows",
    ("llamafactory", "documented"): "`examples/train_lora/llama3_lora_sft.yaml`: r 8, 1e-4, cosine, 1 x 8 rows",
}


def draw(records: dict[str, Any]) -> None:
    """docs/pictures/parity.png: every tool's loss by step, and how far loss and norm are from this kit's."""
    figure = new_figure(figsize=(9, 3.4))
    left, right = figure.subplots(1, 2)
    shown = [name for name in DRAWN if "steps" in records.get(name, {})]
    if "ours" not in shown:
        return
    ours = records["ours"]["steps"]
    for index, name in enumerate(shown):
        steps, colour = records[name]["steps"], COLOURS[index % len(COLOURS)]
        numbers = range(1, len(steps) + 1)
        style = {"color": colour, "lw": 1.2, "label": DRAWN[name]}
        left.plot(numbers, [step["loss"] for step in steps], ls=(index, (len(shown), 2)), **style)
        if name != "ours":
            apart = [
                max(abs(one[key] - other[key]) / abs(other[key]) for key in ("loss", "grad_norm"))
                for one, other in zip(steps, ours, strict=True)
            ]
            right.plot(numbers, [max(value, 1e-9) for value in apart], **style)
    left.set_title("loss", fontsize=10)
    right.set_title("relative difference from this kit: loss or gradient norm", fontsize=10)
    right.set_yscale("log")
    right.axhline(SAME, color="#808080", lw=0.8, ls=":")
    for axes in (left, right):
        axes.set_xlabel("step", fontsize=9)
        axes.tick_params(labelsize=8)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(PICTURE, dpi=110)


def page(result: dict[str, Any]) -> list[str]:
    """docs/parity.md."""
    one, two = result["one"], result["two"]
    versions = {tool: version_words(tool, found) for tool, found in result["versions_of"].items()}
    lines = [
        "# Parity with other tools",
        "",
        "Does this kit train as well as the tool you use? Written by `python benchmarks/parity.py`, whose first lines say how",
        f"to repeat it. Float32, one CPU thread, {result['device']}, {result['date']}. "
        + "; ".join(versions[tool] for tool in TITLES if tool in versions and tool != "trl_dpo")
        + ".",
        "",
        "## The same start, rows and order",
        "",
        f"A tiny Llama, one LoRA adapter to start from, {ROWS} chats of 20 to 110 tokens, {AT_ONCE * ACCUMULATED} a step in "
        f"{ACCUMULATED} micro-batches, AdamW, {RATE:g} falling to 0, norm clipped at 1. Each figure is the largest relative",
        "difference from this kit over all steps; of the adapter, the distance between both ends over the way from the start.",
        "",
        "![Loss by step, and the difference from this kit](pictures/parity.png)",
        "",
        "| tool | steps | loss | gradient norm | final adapter | the same? |",
        "|---|---|---|---|---|---|",
    ]
    lines += [difference_row(one, name, tool_title(name)) for name in same_rows(one)]
    lines += missing_rows(result)
    lines += ["", "## Why they differ", "", "Each cause is switched off, or on, by itself. Nothing else changes.", ""]
    for title, (words, records) in CAUSES.items():
        rows = [
            difference_row(one, name, f"{tool_title(name)}: {what}") for name, what in records.items() if name in one
        ]
        if rows:
            lines += [f"### {title}", "", words, ""]
            lines += [
                "| training | steps | loss | gradient norm | final adapter | the same? |",
                "|---|---|---|---|---|---|",
            ]
            lines += [*rows, ""]
    lines += [*rows_seen(one), "", *as_it_comes_section(two), ""]
    lines += ["## Questions of others", "", "| thread | what was seen | what this page answers |", "|---|---|---|"]
    lines += [f"| {thread} | {seen} | {answer} |" for thread, seen, answer in THREADS]
    lines += [
        "",
        "What this page does not show: bf16 on a GPU, unsloth (it needs one), DPO of axolotl and LLaMA-Factory, and models at",
        "which a recipe of thousands of steps matters. [One curve](one_curve.md) has the strategies.",
    ]
    return lines


def version_words(tool: str, found: dict[str, str]) -> str:
    """ "axolotl 0.21.0 (torch 2.13.0, transformers 5.20.1)"."""
    own = {"trl": "trl", "axolotl": "axolotl", "llamafactory": "llamafactory"}.get(tool)
    with_libraries = ", ".join(f"{name} {found[name].partition('+')[0]}" for name in ("torch", "transformers", "peft"))
    return f"{TITLES[tool]} {found[own]} ({with_libraries})" if own else f"{TITLES[tool]} ({with_libraries})"


def tool_title(name: str) -> str:
    return TITLES[name.partition(":")[0].partition(",")[0]]


def same_rows(records: dict[str, Any]) -> list[str]:
    """The trainings that are compared as the tools come: the first table."""
    return [name for name in ("trainer", "trl", "axolotl", "llamafactory", "trl_dpo") if name in records]


def difference_row(records: dict[str, Any], name: str, title: str) -> str:
    record = records[name]
    if not record.get("difference"):
        return f"| {title} | failed: {record.get('error', 'its reference failed')[:120]} | | | | |"
    apart = record["difference"]
    verdict = "yes" if max(apart["loss"], apart["norm"]) <= SAME else "**no**"
    figures = " | ".join(f"{apart[key]:.1e}" for key in ("loss", "norm", "adapter"))
    return f"| {title} | {len(record['steps'])} | {figures} | {verdict} |"


def missing_rows(result: dict[str, Any]) -> list[str]:
    return [
        f"| {TITLES[tool]} | not recorded: its environment was missing | | | | |"
        for tool in TITLES
        if tool not in result["versions_of"]
    ]


def rows_seen(records: dict[str, Any]) -> list[str]:
    lines = [
        "### What each tool supervises",
        "",
        "Seen in the first eight rows that reach the model.",
        "",
        "| training | supervised tokens | prompt | end of the turn | line break after it |",
        "|---|---|---|---|---|",
    ]
    for name, record in records.items():
        seen = record.get("rows")
        if seen and "packed" not in name and "packing" not in name and "break" not in name:
            cells = [f"{seen[key]} of {seen['rows']}" for key in ("prompt_learned", "end_learned", "after_end_learned")]
            title = f"{tool_title(name)}{name.partition(':')[1]}{name.partition(':')[2]}"
            lines.append(f"| {title} | {seen['supervised']:.0%} | {' | '.join(cells)} |")
    return lines


def as_it_comes_section(two: dict[str, Any]) -> list[str]:
    """Part two: held-out loss, score, speed and memory, for each tool's defaults and documented settings."""
    if "base" not in two:
        return ["## Each tool as it comes", "", "Not recorded yet."]
    lines = [
        "## Each tool as it comes",
        "",
        f"SmolLM2-135M learns dates to ISO 8601 by LoRA: {TASK_ROWS} rows, each seen once, {HELD_OUT} held out. Its rows and model",
        "are the same for all; everything else is a tool's own. So this table compares settings, not arithmetic: at the same",
        "settings the tools agree, as above. Precision is the exception: several default to bf16, which this CPU would emulate,",
        "so all compute in float32. One function scores every adapter. A score is the share of right greedy answers with",
        "Wilson's interval over all seeds' answers. Tokens a second are documents' tokens by processor time, the first step left",
        "out; memory is the process's peak.",
        "",
        f"Before training: held-out loss {two['base']['loss']:.3f}, {percent(two['base']['right'])} right.",
        "",
        "| tool | settings | seeds | steps | held-out loss | right answers | tokens/s | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tool, kind in SETTINGS:
        names = [f"{tool}, {kind}, seed {seed}" for seed in SEEDS]
        failed = [two[name]["error"] for name in names if "error" in two.get(name, {})]
        found = [two[name] for name in names if "loss" in two.get(name, {})]
        if failed and not found:
            lines.append(f"| {TITLES[tool]} | {kind} | failed: {failed[0][:120]} | | | | | |")
        if found:
            losses = [each["loss"] for each in found]
            spread = f"{statistics.mean(losses):.3f}"
            if len(losses) > 1:
                spread += f" ({min(losses):.3f} to {max(losses):.3f})"
            right = percent([answer for each in found for answer in each["right"]])
            speed = statistics.median(each["tokens_per_second"] for each in found)
            peak = max(each["peak_mib"] for each in found)
            lines.append(
                f"| {TITLES[tool]} | {kind} | {len(found)} | {found[0]['steps']} | {spread} | {right} | {speed:.0f} | {peak:,.0f} |"
            )
    lines += ["", "| tool | settings | where they come from |", "|---|---|---|"]
    lines += [f"| {TITLES[tool]} | {kind} | {words} |" for (tool, kind), words in SETTINGS.items()]
    return lines


def percent(right: Sequence[bool]) -> str:
    found = interval([float(each) for each in right])
    return f"{found.mean:.0%} ({found.low:.0%} to {found.high:.0%})"
