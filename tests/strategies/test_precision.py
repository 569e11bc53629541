"""bf16, fp16, 8 and 4 bits: however a step's rows are split, the loss is that of the whole batch in one process.

Rounding is not associative, so the splits differ; by how much was measured, and the bounds are three times that. Eight
chats are all the data, as in tests/support/runs/one_curve.py, and every step learns from all eight.

Two questions have a bound each. How far are micro-batches from the whole batch (`CASES`)? How far are two ranks from
one process with the same micro-batches (`ON_TWO_RANKS`)? The first is rounding, the second only the order of a sum. In
fp16 the first is 50 times as large. Step 1's gradients of the whole batch and of single rows are 4e-4 apart, and each
is 6e-4 from float32's. AdamW's first update makes a whole step of a gradient near zero, whatever its sign. So step 2's
norm shows it most: 4e-4 between the splits, 8e-4 between the whole batch in fp16 and in float32.

The base is stored in the format that computes, as models on the Hub are. ZeRO loads it in that format, so its masters
of a float32 base begin rounded (`test_zero_rounds_a_base_in_float32`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM

from finetune.files import read_lines
from finetune.model.build import build_model
from finetune.model.quantization import quantized_layers
from finetune.train import main
from finetune.training import run as training_run
from tests.support.models.quantised import dequantised, quantised_recipe
from tests.support.models.tiny import write_chats
from tests.support.runs.one_curve import (
    LENGTHS,
    MAX_GRAD_NORM,
    STEPS,
    TOLERANCE,
    WEIGHT_DECAY,
    base_model,
    checkpointed,
    documents,
    learning_rates,
    write_curve_recipe,
)
from tests.support.runs.reference import reference_run
from tests.support.runs.soak_resume import fork_ranks, wait_all

pytestmark = pytest.mark.usefixtures("forget_the_last_run")


class Case(NamedTuple):
    """A way to compute, and the worst relative differences that its splits were seen to have."""

    method: str
    changes: dict[str, dict[str, Any]]
    loss: float
    norm: float


def in_dtype(dtype: str, **training: Any) -> dict[str, dict[str, Any]]:
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}[dtype]
    return {"model": {"dtype": dtype}, "training": {"mixed_precision": short, **training}}


def four_bit(dtype: str) -> dict[str, dict[str, Any]]:
    packed = {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": dtype}
    return in_dtype(dtype) | {"quantization": packed}


def eight_bit(dtype: str) -> dict[str, dict[str, Any]]:
    return in_dtype(dtype) | {"quantization": {"load_in_8bit": True}}


# Measured on CPUs with AVX512-BF16, one thread: the worst of all splits, in the loss and in the gradient's norm, which
# under pure bf16 is a bfloat16 number itself.
CASES = {
    "bf16 full": Case("full", in_dtype("bfloat16"), 1.3e-4, 2.3e-3),
    "bf16 full, pure": Case("full", in_dtype("bfloat16", pure_bf16=True), 4.6e-5, 4.9e-3),
    "bf16 lora": Case("lora", in_dtype("bfloat16"), 1.4e-5, 6.9e-4),
    "fp16 full": Case("full", in_dtype("float16"), 1.1e-5, 4.2e-4),
    "fp16 lora": Case("lora", in_dtype("float16"), 2.9e-6, 2.1e-4),
    "nf4 in float32": Case("lora", four_bit("float32"), 1.8e-7, 1.3e-7),
    "nf4 in bf16": Case("lora", four_bit("bfloat16"), 9.2e-6, 1.5e-3),
    "nf4 in fp16": Case("lora", four_bit("float16"), 7.3e-7, 7.6e-5),
    "int8 in float32": Case("lora", eight_bit("float32"), 9.6e-8, 3.5e-7),
    "int8 in bf16": Case("lora", eight_bit("bfloat16"), 7.8e-6, 6.9e-4),
}
MARGIN = 3
FAST = ("nf4 in float32",)
RECEIPTS = {  # master, compute, state of the optimizer, quantised layers
    "bf16 full": ("float32", "bfloat16", "float32", {}),
    "bf16 full, pure": ("bfloat16", "bfloat16", "bfloat16", {}),
    "bf16 lora": ("float32", "bfloat16", "float32", {}),
    "fp16 full": ("float32", "float16", "float32", {}),
    "fp16 lora": ("float32", "float16", "float32", {}),
    "nf4 in float32": ("float32", "float32", "float32", {"Linear4bit": 14}),
    "nf4 in bf16": ("float32", "bfloat16", "float32", {"Linear4bit": 14}),
    "nf4 in fp16": ("float32", "float16", "float32", {"Linear4bit": 14}),
    "int8 in float32": ("float32", "float32", "float32", {"Linear8bitLt": 14}),
    "int8 in bf16": ("float32", "bfloat16", "float32", {"Linear8bitLt": 14}),
}
ONE_ROW: dict[str, dict[str, Any]] = {"training": {"per_device_batch_size": 1}}
SPLITS: dict[str, dict[str, dict[str, Any]]] = {
    "one row at a time": ONE_ROW,
    "accumulated 3+3+2": {"training": {"per_device_batch_size": 3}},
    "packed into three rows": {
        "data": {"packing": True, "max_length": 350},
        "training": {"global_batch_size": 3, "per_device_batch_size": 1},
    },
    "checkpointed": {"training": {"activation_checkpointing": True}},
    "packed, every second layer checkpointed": {
        "data": {"packing": True},
        "training": {"global_batch_size": 1, "activation_checkpointing": 2},
    },
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    skipped: int  # steps
    receipt: dict[str, Any]


@pytest.fixture(scope="module")
def bases(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Format -> the tiny Llama, stored in it."""
    folders = {"float32": tiny_llama}
    for dtype in ("bfloat16", "float16"):
        folders[dtype] = shutil.copytree(tiny_llama, tmp_path_factory.mktemp("bases") / dtype)
        AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=getattr(torch, dtype)).save_pretrained(folders[dtype])
    return folders


Runs = Callable[[str], Trained]
Train = Callable[..., Trained]


@pytest.fixture(scope="module")
def train(bases: dict[str, Path], chats: Path) -> Train:
    """`trained` over the case's base, by the case's name."""

    def of(name: str, folder: Path, split: dict[str, Any], strategy: str = "single") -> Trained:
        case = CASES[name]
        return trained(folder, bases[case.changes["model"]["dtype"]], chats, case, split, strategy)

    return of


@pytest.fixture(scope="module")
def wholes(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The run of a case over the whole batch in one process, trained once."""
    folder = tmp_path_factory.mktemp("wholes")
    return cache(lambda name: train(name, folder / name.replace(" ", "_"), {}))


@pytest.fixture(scope="module")
def row_by_row(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The run of a case in one process, one row at a time, trained once."""
    folder = tmp_path_factory.mktemp("row_by_row")
    return cache(lambda name: train(name, folder / name.replace(" ", "_"), ONE_ROW))


def trained(
    folder: Path, model: Path, chats: Path, case: Case, split: dict[str, Any], strategy: str = "single"
) -> Trained:
    path = write_curve_recipe(folder, model, chats, case.method, case.changes, split)
    AcceleratorState._reset_state(True)
    if strategy == "single":
        assert main([str(path)]) == 0
    else:
        codes = wait_all(fork_ranks(path, folder / "run", 2, strategy), 120)
        assert codes == [0, 0], (folder / "run.rank0.log").read_text()
    lines = [line for line in read_lines(folder / "run" / "metrics.jsonl") if line["kind"] == "train"]
    receipt = json.loads((folder / "run" / "receipt.json").read_text())
    losses, norms = ([line[key] for line in lines] for key in ("loss", "grad_norm"))
    return Trained(losses, norms, lines[-1].get("skipped_steps", 0), receipt)


def largest_difference(losses: list[float], expected: list[float]) -> float:
    """The worst relative difference of a step."""
    assert len(losses) == len(expected) == STEPS
    return max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))


def assert_near(actual: Trained, expected: Trained, loss: float, norm: float) -> None:
    assert largest_difference(actual.losses, expected.losses) <= MARGIN * loss
    assert largest_difference(actual.norms, expected.norms) <= MARGIN * norm
    assert actual.skipped == expected.skipped == 0


SLOW_OR_NOT = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES]


def test_the_number_of_cases() -> None:
    assert (len(CASES), len(SPLITS), len(RECEIPTS), len(FAST), len(ON_TWO_RANKS)) == (10, 5, 10, 1, 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_OR_NOT)
def test_splits_in_one_process(name: str, wholes: Runs, train: Train, tmp_path: Path) -> None:
    expected = wholes(name)
    for split, changes in SPLITS.items():
        actual = train(name, tmp_path / split.replace(" ", "_"), changes)
        assert_near(actual, expected, CASES[name].loss, CASES[name].norm)
        every = changes.get("training", {}).get("activation_checkpointing", 0)
        assert actual.receipt["checkpointed_layers"] == {0: 0, 1: 2, 2: 1}[int(every)]


# What tests/proofs/test_strategies.py does not train; all of them: benchmarks/one_curve.py. With the worst differences
# that were seen from one process with the same micro-batches. The two under DDP were equal to the last bit; one weight
# that bf16 rounds the other way would be as far as the splits are.
ON_TWO_RANKS = [
    ("bf16 full", "ddp", 1.3e-4, 2.3e-3),
    ("bf16 full, pure", "fsdp2", 4.3e-5, 4.9e-3),  # its norms are bfloat16: equal, or one rounding apart
    ("fp16 full", "fsdp2", 1.3e-6, 7.5e-6),
    ("fp16 full", "zero2", 1.3e-6, 7.5e-6),
    ("fp16 full", "zero3", 1.3e-6, 7.5e-6),
    ("nf4 in fp16", "fsdp2", 3.7e-7, 3.8e-5),
    ("int8 in bf16", "ddp", 7.8e-6, 6.9e-4),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # DeepSpeed compiles where it is imported
@pytest.mark.parametrize(("name", "strategy", "loss", "norm"), ON_TWO_RANKS)
def test_two_ranks(
    name: str, strategy: str, loss: float, norm: float, row_by_row: Runs, train: Train, tmp_path: Path
) -> None:
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    actual = train(name, tmp_path / "two", ONE_ROW, strategy)
    assert_near(actual, row_by_row(name), loss, norm)
    receipt = actual.receipt
    assert (receipt["strategy"], receipt["world_size"]) == (strategy, 2)
    held = 0.5 if strategy in ("fsdp2", "zero3") else 1.0
    assert receipt["sharding"]["held_share"] == pytest.approx(held, abs=0.01)  # ZeRO-3 keeps norms whole


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
def test_zero_rounds_a_base_in_float32(tiny_llama: Path, chats: Path, tmp_path: Path) -> None:
    """docs/precision.md says so. The masters of the other strategies begin as they are stored."""
    pytest.importorskip("deepspeed")
    stored = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).state_dict()
    rate = 1e-6  # float16 rounds weights of this model by up to 3e-5
    training = {"learning_rate": rate, "max_steps": 1, "weight_decay": 0.0, "per_device_batch_size": 1}
    rounded_by = {}
    for strategy, dtype in (("ddp", torch.float32), ("zero2", torch.float16)):
        trained(tmp_path / strategy, tiny_llama, chats, CASES["fp16 full"], {"training": training}, strategy)
        masters = checkpointed(tmp_path / strategy / "run")
        for name, master in masters.items():
            torch.testing.assert_close(master, stored[name].to(dtype).float(), rtol=1e-6, atol=1.01 * rate)
        rounded_by[strategy] = max(float((master - stored[name]).abs().max()) for name, master in masters.items())
    assert rounded_by["ddp"] < 3 * rate
    assert rounded_by["zero2"] > 10 * rate


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16 full, pure", "fp16 full", "nf4 in bf16"])
def test_evaluated_and_saved_in_one_step(name: str, tiny_llama: Path, chats: Path, tmp_path: Path) -> None:
    """After a forward without a backward the head's unit is still gathered."""
    often = {"eval_steps": 2, "save_steps": 2, "data": {"eval": {"fraction": 0.25}}, "samples": {"count": 1}}
    actual = trained(tmp_path / "run", tiny_llama, chats, CASES[name], often | ONE_ROW, "fsdp2")
    assert actual.losses[-1] < actual.losses[0]


@pytest.mark.slow
def test_adapters_in_bf16_have_one_format_on_all_ranks(tiny_llama: Path, chats: Path, tmp_path: Path) -> None:
    """peft 0.21 leaves adapters on meta, where ranks without the weights build them, in float32."""
    case = Case("lora", in_dtype("bfloat16", pure_bf16=True), 0, 0)
    actual = trained(tmp_path / "run", tiny_llama, chats, case, ONE_ROW, "fsdp2")
    assert actual.losses[-1] < actual.losses[0]
    assert actual.receipt["dtypes"]["master"] == "bfloat16"


EIGHT_BIT_ADAM = Case("full", in_dtype("bfloat16", optim="adamw_8bit"), 0, 0)
RESUMED = {
    "nf4, single": (CASES["nf4 in bf16"], "single"),
    "nf4, fsdp2": (CASES["nf4 in bf16"], "fsdp2"),
    "int8, ddp": (CASES["int8 in bf16"], "ddp"),
    "fp16, fsdp2": (CASES["fp16 full"], "fsdp2"),
    "8-bit AdamW, ddp": (EIGHT_BIT_ADAM, "ddp"),
    "pure bf16, single": (CASES["bf16 full, pure"], "single"),
    "pure bf16, fsdp2": (CASES["bf16 full, pure"], "fsdp2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_killed_run_continues_bitwise(
    name: str, tiny_llama: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, strategy = RESUMED[name]
    often = {"save_steps": 2, "eval_steps": 3, "data": {"eval": {"fraction": 0.25}}}
    uninterrupted = trained(tmp_path / "whole", tiny_llama, chats, case, often, strategy)
    save = training_run.save

    def save_and_die(*parts: Any) -> None:
        save(*parts)
        _, _, state, saves, _ = parts
        if state.step == 4:
            saves.wait()
            os._exit(9)

    with monkeypatch.context() as patch:
        patch.setattr(training_run, "save", save_and_die)
        patch.setattr(sys.modules[__name__], "main", in_a_fork)
        with pytest.raises(AssertionError):
            trained(tmp_path / "broken", tiny_llama, chats, case, often, strategy)
    saved = sorted(path.name for path in (tmp_path / "broken" / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000002", "step-00000004"]
    resumed = trained(tmp_path / "broken", tiny_llama, chats, case, often, strategy)
    assert (resumed.losses, resumed.norms) == (uninterrupted.losses, uninterrupted.norms)


def in_a_fork(arguments: list[str]) -> int:
    """`main` in a process that may die."""
    codes = wait_all(fork_ranks(Path(arguments[0]), Path(arguments[0]).parent / "run", 1, "single"), 120)
    return 1 if codes is None else codes[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", SLOW_OR_NOT)
def test_it_learns_and_the_receipt_says_in_what(name: str, wholes: Runs) -> None:
    run = wholes(name)
    assert run.losses[-1] < 0.98 * run.losses[0]
    dtypes = run.receipt["dtypes"]
    formats = (dtypes["master"], dtypes["compute"], dtypes["optimizer_state"], run.receipt["quantized_layers"])
    assert formats == RECEIPTS[name]
    assert run.receipt["loss_scaling"] == ("dynamic" if "fp16" in name else None)


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("name", ["nf4 in float32", "int8 in float32"])
def test_the_curve_is_that_of_the_dequantised_weights(name: str, wholes: Runs, tiny_llama: Path, chats: Path) -> None:
    """The independent loop, one document at a time, over the dequantised weights."""
    requested = quantised_recipe(tiny_llama, CASES[name].changes["quantization"])
    quantised, plain = build_model(requested, torch.device("cpu")), base_model(tiny_llama, "lora")
    layers = set(quantized_layers(quantised))
    for path, layer in quantised.named_modules():
        if layer in layers:
            plain.get_submodule(path).weight.data = dequantised(layer)
    curve = reference_run(
        plain,
        [documents(chats, tiny_llama)] * STEPS,
        learning_rates=learning_rates("lora"),
        max_grad_norm=MAX_GRAD_NORM,
        weight_decay=WEIGHT_DECAY,
    )
    run = wholes(name)
    assert largest_difference(run.losses, [step.loss for step in curve]) < TOLERANCE
    assert largest_difference(run.norms, [step.grad_norm for step in curve]) < TOLERANCE
