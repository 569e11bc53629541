"""The table that every strategy is held to: strategy x method x split, each cell a real training of six steps.

Eight chats are all the data and every step learns from all eight, so a cell differs from its reference only in how the
work was cut. In float32, full and LoRA, the reference is the independent loop of reference.py, one document at a time;
elsewhere it is the method's own run over the whole batch in one process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from finetune.errors import EnvironmentMismatch
from finetune.recipe.strategy import read_strategy
from finetune.strategies.packages import engine_package, missing_of
from finetune.strategies.zero_requirements import compile_engine, engine_problems
from tests.support.runs.cells import ROOT, launch
from tests.support.runs.one_curve import LENGTHS, curve_of, reference, write_curve_recipe
from tests.support.runs.reference import Step

PAGE = ROOT / "docs" / "one_curve.md"
HEAD = """# One curve: strategy x method x split

`python benchmarks/one_curve.py` writes this page. Each cell is about four trainings of six steps, which split the same
rows in four ways:

- whole: each rank computes its rows at once;
- accumulated: each rank computes its rows one by one;
- packed: the documents are packed into three rows;
- checkpointed: the rows come one by one, and every layer is recomputed.

A cell has two figures: loss / gradient norm. Each is the largest relative difference from the reference, over all steps
of the four trainings. In float32, the reference of `full` and `lora` is an independent loop
(tests/support/runs/reference.py). It takes one document at a time and shares no code with the program. The other
columns have the same training as reference, over the whole batch in one process.

All ranks are gloo ranks on a CPU: one for `single`, four for `hsdp` and for two pipelines side by side (ddp2), two for
every other strategy. Pipelines train a model of four layers instead of two. Their `whole` split has micro-batches of
two rows, because 1F1B needs a micro-batch for each stage.

A cell counts only if the run's receipt proves that the recipe's engine ran. The proof is how weights and optimizer
state are stored.
"""
ZERO = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme")
FSDP = ("fsdp2", "fsdp2_grad_op", "fsdp2_offload", "hsdp")
RANKS = {"single": 1, "ddp": 2} | dict.fromkeys(FSDP, 2) | {"hsdp": 4} | dict.fromkeys(ZERO, 2)
BESIDE = ("gpipe_ddp2", "1f1b_ddp2")
PIPELINES = dict.fromkeys(("gpipe", "1f1b", "naive", "interleaved_1f1b"), 2) | dict.fromkeys(BESIDE, 4)
STAGED_LAYERS = 4  # of the model that pipelines train: two stages with two runs of layers each
ROWS = RANKS | PIPELINES  # of the table: strategy -> ranks
# Of the record of killed runs: of pipelines each way to hold a stage's weights once.
KILLED = RANKS | {name: PIPELINES[name] for name in ("1f1b", "interleaved_1f1b", "1f1b_ddp2")}
ALONE = {"per_device_batch_size": 1}
SPLITS: dict[str, dict[str, dict[str, Any]]] = {
    "whole": {"training": {"per_device_batch_size": len(LENGTHS)}},  # each rank all of its rows at once
    "accumulated": {"training": ALONE},
    "packed": {"data": {"packing": True, "max_length": 350}, "training": ALONE | {"global_batch_size": 3}},
    "checkpointed": {"training": ALONE | {"activation_checkpointing": True}},
}
STAGED_SPLITS = SPLITS | {"whole": {"training": {"per_device_batch_size": 2}}}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


class Method(NamedTuple):
    """How the weights are trained, and the largest relative difference that its cells may have."""

    kind: str  # full or lora
    dtype: str
    changes: dict[str, dict[str, Any]]
    loss: float
    norm: float

    @property
    def independent(self) -> bool:
        """Whether the independent loop computes this one too."""
        return self.dtype == "float32" and not self.changes


def _packed(dtype: str) -> dict[str, dict[str, Any]]:
    four_bits = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    return {"quantization": four_bits | {"bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": dtype}}


# Bounds of loss and gradient norm. Rounding is not associative, so in half precision splits differ: three times the
# worst that the table shows. The norm under pure bf16 is a bfloat16 number itself.
TOLERANCE = 2e-5  # float32: what the order of additions does to six steps of AdamW
METHODS = {
    "full": Method("full", "float32", {}, TOLERANCE, TOLERANCE),
    "lora": Method("lora", "float32", {}, TOLERANCE, TOLERANCE),
    "qlora": Method("lora", "float32", _packed("float32"), TOLERANCE, TOLERANCE),
    "full, bf16": Method("full", "bfloat16", {}, 6e-4, 8e-3),
    "full, pure bf16": Method("full", "bfloat16", {"training": {"pure_bf16": True}}, 1.5e-4, 2.2e-2),
    "lora, bf16": Method("lora", "bfloat16", {}, 7e-5, 6e-3),
    "qlora, bf16": Method("lora", "bfloat16", _packed("bfloat16"), 3e-5, 4e-3),
    "int8 lora, bf16": Method("lora", "bfloat16", {"quantization": {"load_in_8bit": True}}, 2e-5, 1.6e-3),
    "full, fp16": Method("full", "float16", {}, 3e-5, 7e-4),
    "lora, fp16": Method("lora", "float16", {}, 1.4e-5, 1.9e-3),
    "qlora, fp16": Method("lora", "float16", _packed("float16"), 4e-6, 2e-4),
}


@dataclass(frozen=True)
class Cell:
    """One training of the table: how far it was from its reference, or the program's own words for refusing it."""

    strategy: str
    method: str
    split: str
    loss: float | None = None
    norm: float | None = None
    reason: str | None = None

    @property
    def holds(self) -> bool:
        """Whether it was refused with a reason, or is within its method's bounds."""
        if self.loss is None or self.norm is None:
            return bool(self.reason)
        method = METHODS[self.method]
        return self.loss <= method.loss and self.norm <= method.norm


def require_deepspeed(strategy: str) -> None:
    """Raise EnvironmentMismatch where DeepSpeed cannot run the strategy on this machine's CPU."""
    zero = read_strategy(strategy)
    for problem in filter(None, [missing_of([engine_package(zero)]), *engine_problems(zero, on_cpu=True)]):
        raise EnvironmentMismatch(problem)
    compile_engine(zero, on_cpu=True)


def skip_where_missing(strategy: str) -> None:
    """Skip a test where an engine's packages are not installed, with the line that installs them."""
    if strategy in ZERO:
        try:
            require_deepspeed(strategy)
        except EnvironmentMismatch as missing:
            pytest.skip(str(missing))


def references(folder: Path, model: Path, chats: Path, methods: Sequence[str]) -> dict[str, list[Step]]:
    """The curve that each method's cells are compared with."""
    independent = [name for name in methods if METHODS[name].independent]
    curves = {name: reference(model, chats, METHODS[name].kind) for name in independent}
    others = [name for name in methods if name not in curves]
    recipes = {name: _written(folder / f"reference of {name}", model, chats, name, SPLITS["whole"]) for name in others}
    if recipes:
        assert launch(list(recipes.values()), ranks=1) == [0] * len(recipes)
    return curves | {name: curve_of(recipe) for name, recipe in recipes.items()}


def trained_cells(
    folder: Path,
    strategy: str,
    curves: Mapping[str, list[Step]],
    model: Path,
    chats: Path,
    splits: Sequence[str] = tuple(SPLITS),
) -> Iterator[Cell]:
    """A strategy's cells, in one launch; the run of a cell lies in `folder / METHOD-SPLIT / run`.

    Raises AssertionError for a cell that failed, or whose receipt does not show the engine that was asked for.
    """
    pairs = [(method, split) for method in curves for split in splits]
    ways = STAGED_SPLITS if strategy in PIPELINES else SPLITS
    recipes = [_written(folder / f"{method}-{split}", model, chats, method, ways[split]) for method, split in pairs]
    words = [f"accelerate_config={config_of(strategy, folder)}"]
    codes = launch(recipes, ranks=ROWS[strategy], words=words, timeout=60 + 30 * len(recipes))
    for (method, split), recipe, code in zip(pairs, recipes, codes, strict=True):
        said = Path(f"{recipe}.rank0.said").read_text("utf-8")
        assert code in (0, 2, 4), f"{strategy} {method} {split}: {said}"
        if code:  # what the recipe alone decides has a place: recipe.yaml:1:757
            placed = re.search(r"recipe\.yaml:\d+:\d+: (.*)", said)
            yield Cell(strategy, method, split, reason=placed[1] if placed else said.strip())
            continue
        assert_it_ran(strategy, METHODS[method], receipt_of(recipe))
        found, wanted = curve_of(recipe), curves[method]
        loss, norm = (apart([step[which] for step in found], [step[which] for step in wanted]) for which in (0, 1))
        yield Cell(strategy, method, split, loss, norm)


def _written(folder: Path, model: Path, chats: Path, method: str, split: Mapping[str, Any]) -> Path:
    kind, dtype, changes, *_ = METHODS[method]
    in_dtype = {"model": {"dtype": dtype}, "training": {"mixed_precision": SHORT[dtype]}}
    return write_curve_recipe(folder, model, chats, kind, split, in_dtype, changes)


def config_of(strategy: str, folder: Path) -> str:
    """A strategy's name; HSDP repeats between nodes, which on one host is to be told."""
    if strategy != "hsdp":
        return strategy
    text = (ROOT / "accelerate_configs" / "hsdp.yaml").read_text("utf-8")
    mesh = "parallelism_config: {parallelism_config_dp_replicate_size: 2}"
    file = folder / "hsdp.yaml"
    file.write_text("\n".join(mesh if line.startswith("parallelism_config:") else line for line in text.splitlines()))
    return str(file)


def apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference of a step."""
    return max(abs(mine / theirs - 1) for mine, theirs in zip(found, wanted, strict=True))


def worst(curve: list[Step], expected: list[Step]) -> float:
    """Largest relative difference of loss and gradient norm over the steps."""
    pairs = [pair for mine, theirs in zip(curve, expected, strict=True) for pair in zip(mine, theirs, strict=True)]
    return max(abs(mine / theirs - 1) for mine, theirs in pairs)


def receipt_of(recipe: Path) -> Mapping[str, Any]:
    receipt: Mapping[str, Any] = json.loads((recipe.parent / "run" / "receipt.json").read_text("utf-8"))
    return receipt


def assert_it_ran(strategy: str, method: Method, receipt: Mapping[str, Any]) -> None:
    """The engine and the number formats asked for, seen in the storage of weights and optimizer state."""
    assert (receipt["strategy"], receipt["world_size"]) == (strategy, ROWS[strategy])
    if strategy in PIPELINES:
        _assert_in_stages(strategy, receipt)
    else:
        _assert_sharded(strategy, method, receipt)
    packed = 7 * (STAGED_LAYERS if strategy in PIPELINES else 2)
    dtypes, pure = receipt["dtypes"], bool(method.changes.get("training", {}).get("pure_bf16"))
    assert dtypes["compute"] == method.dtype
    assert dtypes["master"] == ("bfloat16" if pure else "float32")
    assert sum(receipt["quantized_layers"].values()) == (packed if "quantization" in method.changes else 0)


def _assert_in_stages(strategy: str, receipt: Mapping[str, Any]) -> None:
    """About half of the weights on rank 0, with embeddings that are tied, and of the optimizer's state."""
    pipeline, sharding = receipt["pipeline"], receipt["sharding"]
    copies = 2 if strategy in BESIDE else 1
    assert (pipeline["schedule"], pipeline["copies"]) == (strategy.removesuffix("_ddp2"), copies)
    assert (pipeline["stages"], receipt["batch"]["world_size"]) == (2, copies)
    runs = 4 if strategy == "interleaved_1f1b" else 2
    assert [last - first + 1 for first, last in pipeline["layers"]] == [STAGED_LAYERS // runs] * runs
    assert 0.4 < sharding["held_share"] < 0.65
    assert 0.4 < sharding["optimizer_share"] < 0.65


def _assert_sharded(strategy: str, method: Method, receipt: Mapping[str, Any]) -> None:
    sharding, held = receipt["sharding"], 0.5
    cut = strategy in FSDP or strategy.startswith("zero3")
    whole = receipt["parameters"]["trained"] + receipt["parameters"]["frozen"]
    if "quantization" in method.changes:  # packed weights are counted as they are stored
        assert (sharding["sharded_parameters"] > 0) == cut
    else:  # vectors stay whole under ZeRO-3; they are a five hundredth here
        assert abs(sharding["sharded_parameters"] - (whole if cut else 0)) <= 0.005 * whole
    assert abs(sharding["held_share"] - (held if cut else 1.0)) <= 0.02
    if strategy in FSDP:
        assert sharding["mesh"] == ({"copies": 2, "shards": 2} if strategy == "hsdp" else {"shards": 2})
    assert (receipt["wrapper"] == "DeepSpeedEngine") == (strategy in ZERO)
    assert abs(sharding["optimizer_share"] - (1.0 if strategy in ("single", "ddp") else held)) <= 0.02


def page_lines(cells: Sequence[Cell], strategies: Sequence[str], methods: Sequence[str]) -> Iterator[str]:
    """The page: a table with a column for each method, and below it what was refused, and why."""
    found: Mapping[tuple[str, str], list[Cell]] = {
        (strategy, method): [cell for cell in cells if (cell.strategy, cell.method) == (strategy, method)]
        for strategy in strategies
        for method in methods
    }
    reasons = list(dict.fromkeys(cell.reason for cell in cells if cell.reason))
    yield HEAD
    yield "| strategy | " + " | ".join(methods) + " |"
    yield "|---|" + "---|" * len(methods)
    for strategy in strategies:
        row = [_figure(found[strategy, method], reasons) for method in methods]
        yield f"| {strategy} | " + " | ".join(row) + " |"
    bounds = [f"{METHODS[name].loss:.1e} / {METHODS[name].norm:.1e}" for name in methods]
    yield "| *bound* | " + " | ".join(bounds) + " |"
    yield f"\n{len(cells)} cells, {sum(cell.reason is None for cell in cells)} trained, the others refused:\n"
    for number, reason in enumerate(reasons, 1):
        yield f"{number}. {reason}"


def _figure(cells: Sequence[Cell], reasons: Sequence[str]) -> str:
    assert len(cells) == len(SPLITS)
    refused = [cell.reason for cell in cells if cell.reason]
    if refused:
        assert refused == [refused[0]] * len(cells)
        return f"refused ({reasons.index(refused[0]) + 1})"
    loss, norm = (max(getattr(cell, key) for cell in cells) for key in ("loss", "norm"))
    return f"{loss:.1e} / {norm:.1e}"
