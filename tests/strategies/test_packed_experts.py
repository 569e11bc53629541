"""A mixture's experts in 4 bits under every strategy: one curve, resumed bitwise, exported alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import FinetuneError
from finetune.finished_run import finished_run, load_adapted
from finetune.train import main
from tests.support.models.tiny import write_chats
from tests.support.rows.mixtures import save_mixture
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import receipt_of, skip_where_missing
from tests.support.runs.exports import assert_the_last_step_exports_alike
from tests.support.runs.one_curve import LENGTHS, STEPS, checkpointed, curve_of, write_curve_recipe

LORA = {"r": 4, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture(tmp_path_factory.mktemp("base") / "glm4_moe", "glm4_moe")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


def recipe(folder: Path, base: Path, chats: Path, *, engine: bool = False, **training: Any) -> Path:
    """Layers are recomputed. An `engine` computes in one number format, and takes no quantised weights in float32."""
    rows = {"per_device_batch_size": 2, "learning_rate": 5e-4, "activation_checkpointing": True}
    rows |= {"mixed_precision": "bf16"} if engine else {}
    dtype = "bfloat16" if engine else "float32"
    quantization = {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": dtype}
    sections = {"lora": LORA, "quantization": quantization, "training": rows | training, "model": {"dtype": dtype}}
    return write_curve_recipe(folder, base, chats, "lora", sections)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, base: Path, chats: Path) -> dict[bool, Path]:
    """All rows in one forward, without recomputation; in float32, and as an engine computes."""
    pages = {}
    for engine in (False, True):
        folder = tmp_path_factory.mktemp("alone")
        settings = {"per_device_batch_size": 8, "activation_checkpointing": False}
        pages[engine] = recipe(folder, base, chats, engine=engine, **settings)
    assert launch(list(pages.values()), ranks=1, timeout=500) == [0, 0]
    return pages


def assert_one_curve(page: Path, expected: Path, loss: float = 1e-5, norm: float = 1e-5) -> None:
    points = curve_of(expected)
    for found, point in zip(curve_of(page), points, strict=True):
        assert found.loss == pytest.approx(point.loss, rel=loss)
        assert found.grad_norm == pytest.approx(point.grad_norm, rel=norm)
    assert points[-1].loss < points[0].loss - 0.005
    receipt = receipt_of(page)
    assert receipt["experts"] == {"nf4": 4}  # in the second of two layers
    assert receipt["quantized_layers"] == {"Linear4bit": 2 * 4 + 3 + 3 + 2}
    assert receipt["adapted_modules"]["experts.down_proj"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "zero2", "zero3"])
def test_the_curve_is_that_of_one_forward(
    strategy: str, alone: dict[bool, Path], base: Path, chats: Path, tmp_path: Path
) -> None:
    skip_where_missing(strategy)
    engine = strategy.startswith("zero")
    page = recipe(tmp_path / "two", base, chats, engine=engine)
    ranks = 1 if strategy == "single" else 2
    assert launch([page], ranks=ranks, words=[f"accelerate_config={strategy}"], timeout=500) == [0]
    # In 16 bits rounding decides which experts a token goes to. One process alone differs by 2.4e-4 and 4.5e-3 between
    # micro-batches of 8, 4, 2 and 1 rows; ZeRO by 1.4e-4 and 2.6e-3. Three times the largest is allowed.
    assert_one_curve(page, alone[engine], *((7e-4, 1.4e-2) if engine else ()))
    assert_the_last_step_exports_alike(page.parent / "run", tmp_path / "exported")


@pytest.mark.slow
def test_packed_rows_have_the_curve_of_single_ones(
    alone: dict[bool, Path], base: Path, chats: Path, tmp_path: Path
) -> None:
    page = recipe(tmp_path / "packed", base, chats, global_batch_size=1, per_device_batch_size=1)
    assert main([str(page), "data.packing=true", f"data.max_length={sum(LENGTHS)}"]) == 0
    assert_one_curve(page, alone[False])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_it_resumes_bitwise(strategy: str, base: Path, chats: Path, tmp_path: Path) -> None:
    words = [f"accelerate_config={strategy}", "save_steps=3", "training.lr_scheduler_type=constant"]
    ranks = 1 if strategy == "single" else 2
    halves, again = (recipe(tmp_path / name, base, chats) for name in ("halves", "again"))
    for steps in (3, STEPS):
        assert launch([halves], ranks=ranks, words=[*words, f"training.max_steps={steps}"], timeout=500) == [0]
    assert launch([again], ranks=ranks, words=words, timeout=500) == [0]
    first, second = checkpointed(halves.parent / "run"), checkpointed(again.parent / "run")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.thorough
def test_a_run_of_an_earlier_release_is_told_apart(
    base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its 4 bits left experts in 16, so it neither goes on nor is loaded with experts in 4. Its receipt counts none."""
    page = recipe(tmp_path / "earlier", base, chats, max_steps=1)
    words = ["lora.target_parameters=null", "save_steps=1", "eval_steps=1", "training.lr_scheduler_type=constant"]
    assert main([str(page), *words]) == 0
    run = page.parent / "run"
    for file, keys in (("receipt.json", ()), ("run_state.json", ("identity",))):
        whole = part = json.loads((run / file).read_text())
        for key in keys:
            part = part[key]
        assert part.pop("experts") == ("in 4 bits, without adapters" if keys else {"nf4": 4})
        (run / file).write_text(json.dumps(whole))
    capsys.readouterr()
    assert main([str(page), *words, "training.max_steps=2"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "experts: (not set) there, in 4 bits, without adapters now" in told, told
    with pytest.raises(FinetuneError, match=r"experts in 16 bits, and they would be in 4 now; add quantization=null"):
        load_adapted(finished_run(run), torch.device("cpu"))
    load_adapted(finished_run(run, ["quantization=null"]), torch.device("cpu"))
