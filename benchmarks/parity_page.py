"""docs/parity.md and its picture, from the records of benchmarks/parity.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.report.pictures import COLOURS, new_figure
from finetune.scoring.intervals import paired_interval

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
# One cause of a difference, and the trainings that show it with and without that cause.
CAUSES = {
    "The line break after the end of the turn": (
        [
            "ChatML ends a turn by `<|im_end|>` and a line break. This kit and axolotl supervise the first alone. TRL",
            "(prompts and completions) and LLaMA-Factory supervise both. Inference stops at the end token, so no",
            "answer needs the line break. Each row then has one more token, so loss and gradient are others.",
        ],
        {
            "trl": "learned",
            "trl: line break not learned": "taken out of the labels",
            "llamafactory": "learned",
            "llamafactory: line break not learned": "taken out of the labels",
            "trl_dpo": "learned in both answers of a pair",
            "trl_dpo: line break not learned": "taken out of both",
        },
    ),
    "A mean per micro-batch": (
        [
            "All five divide a step's summed loss by its supervised tokens. transformers before 4.46 averaged each",
            "micro-batch, and then the averages, so tokens of short rows weighed more. A trainer or model that does",
            "not take `num_items_in_batch` still does. The loss then depends on how a step is cut.",
        ],
        {"trainer: mean per micro-batch": "mean of means", "trainer": "one mean, as it comes"},
    ),
    "Rounding in the final adapter": (
        [
            "If numbers are added in another order, loss and gradient change by 1e-7. AdamW divides each mean",
            "gradient by the root of its mean square. So a tiny gradient, which is mostly rounding, moves a weight as",
            "far as a large one does. The first line is this kit against itself. An epsilon of 1e-2 instead of 1e-8",
            "makes tiny gradients move weights little.",
        ],
        {
            "ours: four rows at once": "four rows at once instead of 2 x 2",
            "trainer": "epsilon 1e-8, as it comes",
            "trainer: large epsilon": "epsilon 1e-2",
            "axolotl": "epsilon 1e-8, as it comes",
            "axolotl: large epsilon": "epsilon 1e-2",
            "llamafactory: line break not learned": "epsilon 1e-8, line break not learned",
            "llamafactory: large epsilon": "epsilon 1e-2, line break not learned",
        },
    ),
    "The end of the turn is not learned": (
        [
            "Such a model does not stop. axolotl learns the end by default; `train_on_eos: none` is its switch.",
            "transformers' DataCollatorForLanguageModeling takes each pad token out of the labels. Where pad and end",
            "are one token, as in SmolLM2, it takes out every turn's end. The last two trainings learn whole chats,",
            "as this kit's `train_on: all`.",
        ],
        {
            "axolotl: end of turn not learned": "`train_on_eos: none`",
            "axolotl: end put back": "the same, the end put back into the labels",
            "trainer: every token, pad is the end": "whole chats, pad and end are one token",
            "trainer: every token, pad of its own": "whole chats, a pad token of its own",
        },
    ),
    "A second begin-of-text token, and a second end": (
        [
            "As with Llama 3, template and tokenizer both write a begin-of-text token. Chats that a script renders",
            "to `text` then begin with two under TRL. TRL also adds an end token to a text that does not end with one.",
            "This template ends with a line break. Against this kit's `train_on: all`, at a rate of 2e-3.",
        ],
        {
            "trl: text with BOS": "text as the template renders it",
            "trl: text, template's BOS removed": "the template's begin-of-text removed",
            "trl: text, and the added end not learned": "and the added end taken out of the labels",
        },
    ),
    "Documents that see each other": (
        [
            "Eight chats in one packed row, against the same eight side by side in this kit. TRL 1.16 isolates",
            "documents by position ids, without FlashAttention too. LLaMA-Factory isolates them by `neat_packing`, not",
            "by `packing`.",
        ],
        {
            "ours: eight rows packed": "`packing`",
            "axolotl: packed": "`sample_packing`",
            "trl: packed": "`packing`, without FlashAttention",
            "trl: not packed": "not packed",
            "llamafactory: packed": "`packing`",
            "llamafactory: neat packing": "`neat_packing`",
        },
    ),
}
THREADS = [
    (
        "axolotl#3154",
        "same settings, IFEval 0.52 against LLaMA-Factory's 0.70",
        "both take this kit's steps; labels and packing",
    ),
    (
        "trl#3432, LlamaFactory#8012",
        "AIME 14 by TRL, 76 by LLaMA-Factory",
        "the same steps once labels agree: compare rows",
    ),
    ("LlamaFactory#6577", "DPO differs between the two", "TRL's DPO against this kit's, and the line break"),
    ("axolotl#3196, #1100, #2262", "another loss by batch size alone", "a mean per micro-batch, switched on and off"),
    ("axolotl#2125, LlamaFactory#6254", "which of the two?", "the tables of steps and of settings"),
    (
        "unsloth#3527",
        "a gap to TRL; `num_items_in_batch` not accepted",
        "the mean per micro-batch (unsloth needs a GPU)",
    ),
    ("unsloth#3482, #1178", "DPO's loss depends on accumulation", "DPO over two micro-batches, against this kit's"),
    (
        "trl#1230, #805, alignment-handbook#204",
        "do packed documents see each other?",
        "switched on and off in three tools",
    ),
    ("trl#1400, OpenRLHF#393", "two begin-of-text tokens", "switched on and off"),
    ("transformers#23530, #22794, trl#976", "the model never stops", "pad and end as one token, switched on and off"),
    ("trl#5138", "`messages` learns the prompt too", "what each tool supervises"),
]
SETTINGS = {
    (
        "ours",
        "defaults",
    ): "what `finetune init` writes: r 8, alpha 32, all linear layers, 2e-3, rows packed to 256 tokens",
    ("ours", "documented"): "[Results](results.md#learning-rate-and-rank): r 32, alpha 64, 5e-4, else the same",
    ("trl", "this kit's"): "this kit's documented ones",
    ("trl", "defaults"): "SFTConfig and ModelConfig: 2e-5, 8 rows, r 16, alpha 32, dropout 0.05, q and v; whole chats",
    ("trl", "documented"): "its script sft.py, LoRA: 2e-4, 2 x 8 rows, packed, r 32, alpha 16, q and v; whole chats",
    ("trainer", "defaults"): "TrainingArguments and LoraConfig: 5e-5, 8 rows, r 8, alpha 8, q and v; whole chats",
    ("trainer", "documented"): "peft's quicktour: 1e-3, 32 rows, decay 0.01, r 8, alpha 32, dropout 0.1",
    ("axolotl", "this kit's"): "this kit's documented ones",
    ("axolotl", "defaults"): "1 row, cosine; rank, layers and rate have no default: r 8, alpha 16, all linear, 2e-4",
    ("axolotl", "documented"): "its example lora-1b: 2e-4, cosine, 2 x 2 rows, packed, r 16, alpha 32, dropout 0.05",
    ("llamafactory", "this kit's"): "this kit's documented ones",
    ("llamafactory", "defaults"): "5e-5, linear, 8 rows, r 8, alpha 16, all linear layers",
    ("llamafactory", "documented"): "its example llama3_lora_sft: 1e-4, cosine, 1 x 8 rows, r 8, all linear layers",
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
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize=8)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(PICTURE, dpi=110)


HEAD = """# Parity with other tools

Does this kit train as well as the tool you use? `python benchmarks/parity.py` wrote this page; its first lines say
how to repeat it. Everything is float32 on a CPU, with one thread."""
SAME_START = """## The same start, rows and order

A tiny Llama, one LoRA adapter to start from, 80 chats of 20 to 110 tokens, four a step in two micro-batches, AdamW,
5e-3 falling to 0, norms clipped at 1. The figures for loss and gradient norm are the largest relative difference from
this kit over all steps. The figure for the final adapter is its distance from this kit's final adapter, divided by the
distance that this kit's adapter moved in training.

The last column is about loss and gradient norm, at 1e-5. [Rounding](#rounding-in-the-final-adapter) reaches the adapter
enlarged.

![Loss by step, and the difference from this kit](pictures/parity.png)
"""
SETTINGS_HEAD = """## Settings as they come

With the same labels all five take the same steps, so what is left to differ is settings. These are far apart: learning
rates by a hundred times, layers from two kinds to all. "Documented" is what the tool's own example for LoRA sets."""
OWN_START = """## Each tool by its own settings

SmolLM2-135M learns dates to ISO 8601 by LoRA: 64 rows, each seen once, and 60 held out. Rows and model are the same
for all; the rest is each tool's own. So this table compares settings, not arithmetic.

**This kit's settings were chosen on this task.** "Documented" is the best cell of [a
grid](results.md#learning-rate-and-rank) over the same model and the same kind of rows, and the defaults come from the
same study. The others' come from their examples, mostly for Llama. So the distance to them is tuning. Only the rows
with "this kit's" settings compare tools, and with three seeds they show no difference: TRL's mean is low by one seed.

All compute in float32: several tools default to bf16, which this CPU emulates. One function scores every adapter:
held-out loss, and right greedy answers to the same 60 questions under each of three seeds. The paired column is the
share of right answers less that of this kit's documented settings, question by question, each question's mean over the
seeds; its 95 % interval is a bootstrap over the 60 questions. It says nothing of other seeds: see their spread.

Tokens are those of documents, by the processor's time without the first step, while its second core did other work;
memory is the process's peak. "Documented" settings of other tools run unpacked, because packed, 64 rows are one step;
they learn answers alone, by each tool's own means. With "this kit's" settings they pack rows as this kit does, so only
the drawn order differs, and a line break that TRL and LLaMA-Factory learn after each answer. These two also recompute
activations by default, which costs speed, so their tokens a second are no comparison; the other three do not here.
"""
TAIL = """This page does not show bf16 on a GPU, unsloth (it needs a GPU), DPO by axolotl or LLaMA-Factory, and runs of
thousands of steps. [One curve](one_curve.md) shows that this kit's strategies agree."""

NOT_RECORDED = """Held-out loss, scores, speed and memory by each tool's own settings are not recorded yet. The script
trains them too, in about half an hour of one processor."""


def page(result: dict[str, Any]) -> list[str]:
    """docs/parity.md."""
    one, two, found = result["one"], result["two"], result["versions_of"]
    columns = "steps | loss | gradient norm | final adapter | the same? |"
    lines = [HEAD, "", f"Measured on {result['device']}, {result['date']}.", "", "| tool | versions |", "|---|---|"]
    lines += [f"| {title} | {version_words(found[tool])} |" for tool, title in TITLES.items() if tool in found]
    lines += ["", SAME_START, f"| tool, as it comes | {columns}", "|---|---|---|---|---|---|"]
    lines += [difference_row(one, name, tool_title(name)) for name in AS_THEY_COME if name in one]
    lines += [f"| {title} | no environment for it | | | | |" for tool, title in TITLES.items() if tool not in found]
    lines += ["", "## Why they differ", "", "Each cause is switched by itself. Nothing else changes.", ""]
    for title, (words, records) in CAUSES.items():
        lines += [f"### {title}", "", *words, "", f"| training | {columns}", "|---|---|---|---|---|---|"]
        lines += [
            difference_row(one, name, f"{tool_title(name)}: {what}") for name, what in records.items() if name in one
        ]
        lines.append("")
    lines += [*rows_seen(one), ""]
    lines += [SETTINGS_HEAD, "", "| tool | settings | what they are |", "|---|---|---|"]
    lines += [f"| {TITLES[tool]} | {kind} | {words} |" for (tool, kind), words in SETTINGS.items()]
    lines.append("")
    if "base" in two:
        lines += [*own_start(two), ""]
    lines += ["## Questions of others", "", "| thread | what was seen | what answers it here |", "|---|---|---|"]
    lines += [f"| {thread} | {seen} | {answer} |" for thread, seen, answer in THREADS]
    lines += ["", TAIL]
    if "base" not in two:
        lines.append(NOT_RECORDED)
    return lines


AS_THEY_COME = ("trainer", "trl", "axolotl", "llamafactory", "trl_dpo")


def version_words(found: dict[str, str]) -> str:
    return ", ".join(f"{package} {version.partition('+')[0]}" for package, version in found.items())


def tool_title(name: str) -> str:
    return TITLES[name.partition(":")[0].partition(",")[0]]


def difference_row(records: dict[str, Any], name: str, title: str) -> str:
    record = records[name]
    if not record.get("difference"):
        return f"| {title} | failed: {record.get('error', 'its reference failed')[:120]} | | | | |"
    apart = record["difference"]
    same = "**no**"
    if max(apart["loss"], apart["norm"]) <= SAME:
        same = "yes"
    figures = " | ".join(f"{apart[key]:.1e}" for key in ("loss", "norm", "adapter"))
    return f"| {title} | {len(record['steps'])} | {figures} | {same} |"


SEEN = (
    "trainer",
    "trl",
    "axolotl",
    "llamafactory",
    "axolotl: end of turn not learned",
    "trainer: every token, pad is the end",
    "trainer: every token, pad of its own",
)


def rows_seen(records: dict[str, Any]) -> list[str]:
    lines = [
        "### What each tool supervises",
        "",
        "Seen in the first eight rows that reach the model.",
        "",
        "| training | supervised tokens | prompt | end of the turn | line break after it |",
        "|---|---|---|---|---|",
    ]
    for name in SEEN:
        if seen := records.get(name, {}).get("rows"):
            cells = [f"{seen[key]} of {seen['rows']}" for key in ("prompt_learned", "end_learned", "after_end_learned")]
            title = f"{tool_title(name)}{name.removeprefix(name.partition(':')[0])}"
            lines.append(f"| {title} | {seen['supervised']:.0%} | {' | '.join(cells)} |")
    return lines


def own_start(two: dict[str, Any]) -> list[str]:
    """Part two: held-out loss, score, speed and memory, for each tool's defaults and documented settings."""
    before = two["base"]
    lines = [OWN_START, f"Before training: held-out loss {before['loss']:.3f}, {sum(before['right'])} of 60 right.", ""]
    lines += [
        "| tool | settings | steps | held-out loss | right of 60, by seed | paired difference | tokens/s | peak MiB |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    ours = by_question([two[f"ours, documented, seed {seed}"] for seed in SEEDS])
    for tool, kind in SETTINGS:
        records = [two[name] for seed in SEEDS if (name := f"{tool}, {kind}, seed {seed}") in two]
        found = [each for each in records if "loss" in each]
        if not found:
            lines += [f"| {TITLES[tool]} | {kind} | failed: {each['error'][:120]} | | | | | |" for each in records[:1]]
            continue
        losses = [each["loss"] for each in found]
        cells = [
            str(found[0]["steps"]),
            f"{statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
            ", ".join(str(sum(each["right"])) for each in found),
            "-" if (tool, kind) == ("ours", "documented") else difference_in_words(ours, by_question(found)),
            f"{statistics.median(each['tokens_per_second'] for each in found):.0f}",
            f"{max(each['peak_mib'] for each in found):,.0f}",
        ]
        lines.append(f"| {TITLES[tool]} | {kind} | {' | '.join(cells)} |")
    return lines


def by_question(records: Sequence[dict[str, Any]]) -> list[float]:
    """Each question's share of right answers over the seeds."""
    return [statistics.mean(answers) for answers in zip(*(record["right"] for record in records), strict=True)]


def difference_in_words(before: Sequence[float], after: Sequence[float]) -> str:
    found = paired_interval(before, after)
    return f"{found.mean:+.0%} ({found.low:+.0%} to {found.high:+.0%})"
