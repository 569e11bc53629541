"""`training.compile` from the recipe to the receipt: the same curve, resumed to the bit, and what is said where the
layers cannot be compiled."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.architecture.compiled import layers as choice
from finetune.architecture.compiled.layers import GRAPHS_RECOMPUTE, CompiledLayers
from finetune.train import main
from finetune.training import session
from tests.support.models.tiny import write_chats
from tests.support.runs.cells import launch
from tests.support.runs.one_curve import LENGTHS, STEPS, TOLERANCE, checkpointed, curve_of, write_curve_recipe
from tests.support.stand_ins.compiling import Counting, broken_backward, broken_forward, nothing_compiled

assert nothing_compiled
pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    # Dynamo itself looks at the gradient of tensors that have none, and in a long-lived process says so.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
PACKED: dict[str, Any] = {
    "data": {"packing": True, "max_length": 560},
    "training": {"global_batch_size": 2, "per_device_batch_size": 1, "activation_checkpointing": 2},
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


def page(folder: Path, base: Path, chats: Path, method: str, asked: bool | str, **training: Any) -> Path:
    return write_curve_recipe(folder, base, chats, method, PACKED, training={"compile": asked, **training})


def receipt(recipe: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((recipe.parent / "run" / "receipt.json").read_text("utf-8"))
    return found


def by(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "CompiledLayers", partial(CompiledLayers, backend=backend))


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(recipe: Any, strategy: Any, model: Any, device: torch.device, say: Any) -> CompiledLayers:
        return choice.compile_as_asked(recipe, strategy, model, torch.device("cuda", 0), say)

    monkeypatch.setattr(session, "compile_as_asked", asked)
    monkeypatch.setattr(choice, "NOT_BY_AUTO", ())  # these runs compute in float32


@pytest.mark.thorough
def test_the_curve_is_that_of_the_layers_as_they_are_written(
    tiny_llama: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And `auto` compiles nothing on a CPU."""
    written = page(tmp_path / "written", tiny_llama, chats, "full", "auto")
    assert main([str(written)]) == 0
    assert receipt(written)["compiled"]["left_off"].startswith("on a CPU")
    assert "compile" not in capsys.readouterr().out
    counting = Counting()
    by(counting, monkeypatch)
    compiled = page(tmp_path / "compiled", tiny_llama, chats, "full", True)
    assert main([str(compiled)]) == 0
    facts = receipt(compiled)["compiled"]
    assert (facts["layers"], facts["kinds_of_layers"], facts["left_off"]) == (True, 2, None)
    assert "compiled: 2 kinds of layers, forward and backward, in " in capsys.readouterr().out
    # One layer is recomputed, the other is not. Before torch 2.13 recomputation is around the graph, which both share.
    assert counting.graphs == (2 if GRAPHS_RECOMPUTE else 1)
    for found, expected in zip(curve_of(compiled), curve_of(written), strict=True):
        assert tuple(found) == pytest.approx(tuple(expected), rel=TOLERANCE)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", [broken_forward, broken_backward])
def test_where_it_fails_the_run_goes_on_and_says_so(
    backend: Any,
    tiny_llama: Path,
    chats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    by(backend, monkeypatch)
    as_on_a_gpu(monkeypatch)
    recipe = page(tmp_path / "auto", tiny_llama, chats, "full", "auto", max_steps=2)
    assert main([str(recipe)]) == 0
    said = capsys.readouterr().out
    assert said.count("training.compile: layers run without it from here on: ") == 1
    assert "no compiler" in said
    facts = receipt(recipe)["compiled"]
    assert facts["layers"] is False
    assert "no compiler" in facts["left_off"]
    assert len(curve_of(recipe)) == 2


@pytest.mark.thorough
def test_where_it_has_to_be_a_failure_is_one_line(
    tiny_llama: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by(broken_forward, monkeypatch)
    assert main([str(page(tmp_path / "true", tiny_llama, chats, "full", True, max_steps=2))]) == 4
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert line.startswith("training.compile: LlamaDecoderLayer cannot be compiled here: ")
    assert line.endswith("; set training.compile: auto, or false")


def resumed_and_not(folder: Path, base: Path, chats: Path) -> list[dict[str, torch.Tensor]]:
    """The trained tensors of a run that broke off in its middle, and of one that did not."""
    found = []
    for name, starts in {"halves": (STEPS // 2, STEPS), "whole": (STEPS,)}.items():
        steady = {"lr_scheduler_type": "constant", "activation_checkpointing": False}
        recipe = page(folder / name, base, chats, "full", True, **steady)
        for steps in starts:
            assert main([str(recipe), f"save_steps={STEPS // 2}", f"training.max_steps={steps}"]) == 0
        assert receipt(recipe)["compiled"]["layers"]
        found.append(checkpointed(recipe.parent / "run"))
    return found


@pytest.mark.slow
def test_a_resumed_run_is_the_run_to_the_bit(
    tiny_llama: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by(Counting(), monkeypatch)
    resumed, whole = resumed_and_not(tmp_path, tiny_llama, chats)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_a_resumed_run_is_the_run_to_the_bit_by_inductor(tiny_llama: Path, chats: Path, tmp_path: Path) -> None:
    resumed, whole = resumed_and_not(tmp_path, tiny_llama, chats)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_two_ranks(method: str, tiny_llama: Path, chats: Path, tmp_path: Path) -> None:
    """Inside of the hooks by which FSDP2 gathers a layer's weights, and beside those by which the others reduce.

    Forward and backward are traced; no code is made, which takes minutes.
    """
    strategies = ["ddp", "fsdp2", "zero2"]
    written = page(tmp_path / "written", tiny_llama, chats, method, False)
    assert main([str(written)]) == 0
    pages = []
    for name in strategies:
        pages.append(page(tmp_path / name, tiny_llama, chats, method, True, activation_checkpointing=True))
        content = json.loads(pages[-1].read_text("utf-8")) | {"accelerate_config": name}
        pages[-1].write_text(json.dumps(content), "utf-8")
    assert launch(pages, ranks=2, timeout=1200, program="tests/support/stand_ins/compiling.py") == [0] * len(pages)
    for each in pages:
        assert receipt(each)["compiled"]["layers"]
        for found, expected in zip(curve_of(each), curve_of(written), strict=True):
            assert tuple(found) == pytest.approx(tuple(expected), rel=TOLERANCE), each
