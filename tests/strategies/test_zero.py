"""DeepSpeed ZeRO: what it holds, what it refuses, and that a resumed run is the run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from finetune.errors import EnvironmentMismatch
from finetune.recipe.loader import load_recipe
from finetune.recipe.strategy import read_strategy
from finetune.recipe.strategy_fit import unfit
from finetune.strategies import packages, zero_requirements
from finetune.strategies.zero import LARGEST_BUCKET, SMALLEST_BUCKET, buckets
from tests.support.models.tiny import save_tiny, tiny_model, write_chats
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import TOLERANCE, require_deepspeed, skip_where_missing, worst
from tests.support.runs.one_curve import LENGTHS, checkpointed, curve_of, reference, write_curve_recipe

ALONE = {"training": {"per_device_batch_size": 1}}
HALF = {"mixed_precision": "bf16"}
# Each way to keep state: cut, in host memory, cut with the weights, on a disk. All, killed: benchmarks/resume.py.
KINDS = pytest.mark.parametrize("names", [("zero1", "zero2_offload", "zero3"), ("zero3_nvme",)], ids=" ".join)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.4M parameters: what is under a megabyte on a rank, NVMe offload keeps in memory."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return save_tiny(tmp_path_factory.mktemp("wide"), **sizes)


def to_step_3(run: Path) -> None:
    """As a run that was killed after its third step's checkpoint."""
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    state = json.loads((run / "run_state.json").read_text("utf-8")) | {"state": "running"}
    (run / "run_state.json").write_text(json.dumps(state), "utf-8")


def tensors_at_the_end(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    from finetune.run_folder.checkpoint import newest_valid, read_checkpoint

    checkpoint, damaged = newest_valid(run)
    assert checkpoint is not None
    assert (checkpoint.step, damaged) == (6, ())
    return read_checkpoint(checkpoint)[0]


@pytest.mark.slow
@KINDS
def test_a_resumed_run_is_the_run_bitwise(names: tuple[str, ...], wide: Path, chats: Path, tmp_path: Path) -> None:
    skip_where_missing(names[-1])
    recipes = [
        write_curve_recipe(tmp_path / name, wide, chats, "full", ALONE, accelerate_config=name, save_steps=3)
        for name in names
    ]
    assert launch(recipes, ranks=2, timeout=400) == [0] * len(names)
    curves = {recipe: curve_of(recipe) for recipe in recipes}
    ends = {recipe: tensors_at_the_end(recipe.parent / "run") for recipe in recipes}
    expected = reference(wide, chats, "full")
    assert {
        recipe.parent.name: worst(curve, expected) <= TOLERANCE for recipe, curve in curves.items()
    } == dict.fromkeys(names, True)
    for recipe in recipes:
        to_step_3(recipe.parent / "run")
    assert launch(recipes, ranks=2, timeout=400) == [0] * len(names)
    for recipe in recipes:
        assert curve_of(recipe) == curves[recipe], recipe.parent.name
        actual = tensors_at_the_end(recipe.parent / "run")
        assert set(actual["optimizer"]) == {f"{name}:{key}" for name in actual["model"] for key in STATE}
        for group, named in ends[recipe].items():
            for name, tensor in named.items():
                assert torch.equal(tensor, actual[group][name]), f"{recipe.parent.name} {group} {name}"
        assert not (recipe.parent / "run" / "swap").exists()


STATE = ("step", "exp_avg", "exp_avg_sq")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "zero2"), (1, "zero3_nvme")),
        ((1, "zero3_offload"), (2, "zero1")),
        ((2, "fsdp2"), (2, "zero3")),
    ],
    ids=str,
)
def test_resumed_under_another_strategy(
    before: tuple[int, str], after: tuple[int, str], wide: Path, chats: Path, tmp_path: Path
) -> None:
    skip_where_missing(after[1])
    recipe = write_curve_recipe(tmp_path / "r", wide, chats, "lora", ALONE, save_steps=3)
    assert launch([recipe], ranks=before[0], words=[f"accelerate_config={before[1]}"]) == [0]
    to_step_3(tmp_path / "r" / "run")
    assert launch([recipe], ranks=after[0], words=[f"accelerate_config={after[1]}"]) == [0]
    assert worst(curve_of(recipe), reference(wide, chats, "lora")) <= 1e-5


@pytest.mark.slow
@KINDS
def test_a_step_that_is_not_finite_leaves_everything_alone(
    names: tuple[str, ...], wide: Path, chats: Path, tmp_path: Path
) -> None:
    skip_where_missing(names[-1])
    recipes = [
        write_curve_recipe(tmp_path / name, wide, chats, "full", ALONE, accelerate_config=name) for name in names
    ]
    half = [
        write_curve_recipe(tmp_path / f"{name}_bf16", wide, chats, "full", ALONE, accelerate_config=name, training=HALF)
        for name in names
    ]
    assert launch([*recipes, *half], ranks=2, timeout=400, program="tests/support/runs/zero_spoilt.py") == [
        130
    ] * 2 * len(names)
    for recipe in [*recipes, *half]:
        name = recipe.parent.name
        facts = json.loads((recipe.parent / "run" / "spoilt.json").read_text("utf-8"))
        assert facts["refused"], name
        assert facts["moved"] == [], name
        assert facts["pieces"] > 0, name
        assert 0 < facts["next_norm"] < 100, name
        # Three of four tensors of the masters, moments and gradients, 4 bytes an element: on the disk, and on no other.
        assert (facts["swapped_bytes"] > 3 * 4 * 1_000_000) == name.startswith("zero3_nvme"), name


@pytest.mark.slow
def test_tied_heads(chats: Path, tmp_path: Path) -> None:
    tied = save_tiny(tmp_path / "tied", tie_word_embeddings=True)
    recipe = write_curve_recipe(tmp_path / "run_of_tied", tied, chats, "full", ALONE, accelerate_config="zero3")
    assert launch([recipe], ranks=2) == [0]
    assert worst(curve_of(recipe), reference(tied, chats, "full")) <= TOLERANCE
    assert "lm_head.weight" not in checkpointed(recipe.parent / "run")


class Shaped(nn.Module):
    """Layers and embeddings of a given size, without storage."""

    def __init__(self, layers: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embeddings = nn.Embedding(vocabulary, hidden)
            self.layers = nn.ModuleList(nn.Linear(hidden, 12 * hidden) for _ in range(layers))


@pytest.mark.parametrize(
    ("layers", "hidden", "vocabulary"), [(2, 64, 512), (16, 2048, 128_256), (32, 4096, 128_256), (80, 8192, 128_256)]
)
def test_buckets_follow_the_model(layers: int, hidden: int, vocabulary: int) -> None:
    model = Shaped(layers, hidden, vocabulary)
    trained = sum(parameter.numel() for parameter in model.parameters())
    layer = 12 * hidden * hidden + 12 * hidden
    actual = buckets(model, 3)
    bucket = actual["reduce_bucket_size"]
    assert bucket % 2 == 0
    assert bucket == actual["allgather_bucket_size"]
    assert min(trained, SMALLEST_BUCKET) <= bucket <= LARGEST_BUCKET
    if trained > 256 * SMALLEST_BUCKET:
        assert bucket <= trained / 256 + 2, "two buffers are under 1 % of the gradients"
    assert actual["stage3_prefetch_bucket_size"] == layer
    assert actual["stage3_max_live_parameters"] == 2 * layer + max(layer - 12 * hidden, vocabulary * hidden)
    assert 12 * hidden < actual["stage3_param_persistence_threshold"] < hidden * hidden, "biases stay whole, no matrix"
    unsharded = buckets(model, 2)
    assert set(unsharded) == {"reduce_bucket_size", "allgather_bucket_size"}
    size = unsharded["reduce_bucket_size"]
    assert trained / 24 <= size or size >= SMALLEST_BUCKET
    assert size <= max(1.44 * trained / 24, SMALLEST_BUCKET), "two buffers are at most 12 % of the gradients"
    filled, counted = 0, 1
    for parameter in reversed(list(model.parameters())):  # as backward reaches them
        if filled + parameter.numel() > size and filled:
            filled, counted = 0, counted + 1
        filled += parameter.numel()
    assert counted <= 24


def test_buckets_see_what_is_trained() -> None:
    model = Shaped(16, 2048, 128_256)
    model.requires_grad_(False)
    model.layers[0].requires_grad_(True)
    trained = 12 * 2048 * 2048 + 12 * 2048
    assert buckets(model, 3)["reduce_bucket_size"] == SMALLEST_BUCKET
    assert trained / 24 <= buckets(model, 2)["reduce_bucket_size"] <= trained / 24 + 2


def refusals(tmp_path: Path, strategy: str, *words: str) -> list[str]:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {name_or_path: x}\ndata: {train: [{path: y}]}\n")
    loaded = load_recipe(str(file), [*words])
    return [str(each) for each in unfit(loaded.recipe, read_strategy(strategy))]


CASES: Mapping[str, tuple[str, list[str], str]] = {
    "fits": ("zero3", ["training.mixed_precision=bf16"], ""),
    "fp16 on a CPU": ("zero2", ["training.mixed_precision=fp16"], ""),
    "8-bit state": ("zero2", ["training.optim=adamw_8bit"], "set adamw"),
    "pure and offloaded": ("zero2_offload", ["training.pure_bf16=true"], "set training.pure_bf16=false"),
    "float32 over a bf16 base": (
        "zero2",
        ["training.mixed_precision=no", "model.dtype=bfloat16"],
        "model.dtype: float32",
    ),
    "int8 cut": ("zero3", ["quantization={load_in_8bit: true}"], "accelerate_config=zero2"),
    "int8 whole": ("zero2", ["quantization={load_in_8bit: true}"], ""),
    "4 bits in bytes": ("zero3", ["quantization={load_in_4bit: true, bnb_4bit_quant_storage: uint8}"], "set bfloat16"),
    "4 bits under float32": (
        "zero2",
        ["quantization={load_in_4bit: true}", "training.mixed_precision=no", "model.dtype=float32"],
        "set bf16",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_engine_cannot_do_is_reported(case: str, tmp_path: Path) -> None:
    strategy, words, text = CASES[case]
    lines = refusals(tmp_path, strategy, *words)
    assert len(lines) == bool(text)
    assert all(text in line and "\n" not in line and ": " in line for line in lines)


@pytest.mark.parametrize(
    ("name", "missing", "line"),
    [
        ("zero2", "deepspeed", "DS_BUILD_OPS=0 pip install -e '.[deepspeed]'"),
        ("zero3_nvme", "g++", "apt-get install g++ ninja-build"),
        ("zero3_nvme", "libaio", "apt-get install libaio-dev"),
    ],
)
def test_what_is_missing_is_reported_with_the_line_to_install(
    name: str, missing: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, which = importlib.util.find_spec, shutil.which
    monkeypatch.setattr(importlib.util, "find_spec", lambda found: None if found == missing else find(found))
    monkeypatch.setattr(shutil, "which", lambda found: None if found == missing else which(found) or found)
    linked = subprocess.CompletedProcess([], returncode=int(missing == "libaio"))
    monkeypatch.setattr(zero_requirements.subprocess, "run", lambda *_, **__: linked)
    with pytest.raises(EnvironmentMismatch, match="install it ") as caught:
        require_deepspeed(name)
    assert str(caught.value).endswith(line)
    assert caught.value.exit_code == 4
    assert f"accelerate_config: {name}: " in str(caught.value)


@pytest.mark.parametrize(
    ("installed", "refused"), [("0.19.0", True), ("0.19.7", True), ("0.19.8", False), ("0.20", False)]
)
def test_an_engine_that_takes_steps_that_are_not_finite_is_refused(
    installed: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "version", lambda name: installed)
    line = packages.missing_of([packages.engine_package(read_strategy("zero3"))])
    assert bool(line) == refused
    if refused:
        assert re.search(r"DeepSpeed 0.19.8 or newer is not.*pip install -e '\.\[deepspeed\]'$", line)


def test_whole_sizes_without_an_engine() -> None:
    from finetune.strategies.pieces import full_numel, full_shape, local_shard

    weight = tiny_model().lm_head.weight
    assert (full_numel(weight), full_shape(weight)) == (weight.numel(), weight.shape)
    assert local_shard(weight) is weight


def test_a_lock_that_a_killed_compiler_left_is_waited_for_and_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would wait for ever. DeepSpeed's NVMe access is built in two folders."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(zero_requirements, "OLD_LOCK", 0.5)
    locks = [tmp_path / name / "lock" for name in ("async_io", "pin_memory", "of_others")]
    for lock in locks:
        lock.parent.mkdir()
        lock.touch()
    began = time.monotonic()
    # DeepSpeed knows none of that name.
    zero_requirements.compile_ahead("NoSuchBuilder", ("async_io", "pin_memory"), True)
    assert time.monotonic() - began >= 0.4
    assert [lock.exists() for lock in locks] == [False, False, True]


def test_two_environments_do_not_compile_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose folder DeepSpeed shares finds its compiler's command changed, and compiles for minutes again."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "")  # so that it is taken back
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    builds = []
    for prefix in ("/venv/one", "/venv/two", "/venv/one"):
        monkeypatch.setattr(sys, "prefix", prefix)
        builds.append(zero_requirements.own_builds())
    assert builds[0] == builds[2] != builds[1]
    assert all(build.is_relative_to(tmp_path) for build in builds)
    zero_requirements.compile_ahead("NoSuchBuilder", ("async_io",), True)
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(builds[0])
