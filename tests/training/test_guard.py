"""A run whose fast paths are wrong goes on without them, by the right curve, and says so; on two ranks too."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.architecture.own_layers.compute import GATES, NORMS
from finetune.train import main
from finetune.training import session
from finetune.training import worst_step as guard
from finetune.training.worst_step import INSTEAD, FirstTokens
from tests.support.models.tiny import write_chats
from tests.support.runs.cells import launch
from tests.support.runs.one_curve import LENGTHS, TOLERANCE, curve_of, write_curve_recipe
from tests.support.stand_ins.compiling import nothing_compiled
from tests.support.stand_ins.planted import plant_in_run

assert nothing_compiled
pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
PACKED: dict[str, Any] = {
    "data": {"packing": True, "max_length": 560},
    "training": {"global_batch_size": 2, "per_device_batch_size": 1, "max_steps": 3},
}
SAID = {
    "compiled": "training.compile: layers run without it from here on: compiled, LlamaDecoderLayer computes something",
    "adapters": "guard: peft computes all adapters from here on, because the faster way differs: Linear: ",
    "norms": "guard: transformers computes all norms from here on, because the faster way differs: LlamaRMSNorm: ",
    "gates": "guard: transformers computes all gates from here on, because the faster way differs: LlamaMLP: ",
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


def page(folder: Path, base: Path, chats: Path, method: str, asked: bool | str, **sections: Any) -> Path:
    return write_curve_recipe(folder, base, chats, method, PACKED, training={"compile": asked}, **sections)


def receipt(recipe: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((recipe.parent / "run" / "receipt.json").read_text("utf-8"))
    return found


def assert_right_curve(recipe: Path, expected: Path) -> None:
    for found, right in zip(curve_of(recipe), curve_of(expected), strict=True):
        assert tuple(found) == pytest.approx(tuple(right), rel=TOLERANCE)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("where", ["compiled", "adapters", "norms", "gates"])
def test_the_run_goes_on_without_what_is_wrong(
    where: str,
    method: str,
    tiny_llama: Path,
    chats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if where == "adapters" and method == "full":
        return
    right = page(tmp_path / "right", tiny_llama, chats, method, False)
    assert main([str(right)]) == 0
    assert "from here on" not in capsys.readouterr().out
    facts = receipt(right)
    assert facts["guard"]["left_off"] == {}
    paths = {"own norms", "own gates"} | ({"own adapters"} if method == "lora" else set())
    assert set(facts["guard"]["compared"]) == set(facts["guard"]["furthest"]) == paths
    plant_in_run(f"{where} halved", monkeypatch)
    wrong = page(tmp_path / "wrong", tiny_llama, chats, method, "auto")
    assert main([str(wrong)]) == 0
    assert_right_curve(wrong, right)
    assert capsys.readouterr().out.count(SAID[where]) == 1
    facts = receipt(wrong)
    if where == "compiled":
        assert facts["compiled"]["left_off"].startswith("compiled, LlamaDecoderLayer computes something else: ")
        assert facts["compiled"]["layers"] is False
        return
    assert list(facts["guard"]["left_off"]) == [f"own {where}"]
    assert facts["compiled"]["layers"] is True, "not blamed for what it was compared with"
    if where == "adapters":
        assert list(facts["adapters_computed"]) == ["differs from peft's"]
    else:
        assert facts["own_norms_and_gates"][where] == 0


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_it_takes_less_memory_than_a_step(
    method: str, tiny_llama: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks: dict[str, int] = {}
    facts_of = session.memory_facts

    def spy(planned: Any, phases: Any, device: Any) -> dict[str, Any]:
        peaks.update({name: phase.peak_bytes for name, phase in phases.items()})
        return facts_of(planned, phases, device)

    monkeypatch.setattr(session, "memory_facts", spy)
    assert main([str(page(tmp_path / "run", tiny_llama, chats, method, False))]) == 0
    assert peaks["load"] < peaks["guard"] < max(peaks["forward"], peaks["backward"])


@pytest.mark.slow
def test_where_it_has_to_be_compiled_a_difference_is_one_line(
    tiny_llama: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant_in_run("compiled zero", monkeypatch)
    assert main([str(page(tmp_path / "true", tiny_llama, chats, "lora", True))]) == 4
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert line.startswith("training.compile: true: compiled, LlamaDecoderLayer computes something else: gradient of ")
    assert line.endswith("; set training.compile: auto, or false")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("planted", ["compiled zero", "compiled halved", "compiled transposed", "adapters negative"])
def test_what_one_rank_finds_all_ranks_leave_off(
    planted: str, strategy: str, tiny_llama: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 alone is wrong; rank 0 says so."""
    right = page(tmp_path / "right", tiny_llama, chats, "lora", False)
    assert main([str(right)]) == 0
    pages = [page(tmp_path / name, tiny_llama, chats, "lora", "auto", accelerate_config=strategy) for name in ("a",)]
    monkeypatch.setenv("PLANTED", planted)
    assert launch(pages, ranks=2, timeout=600, program="tests/support/stand_ins/planted.py") == [0]
    facts = receipt(pages[0])
    if planted.startswith("compiled"):
        assert facts["compiled"]["left_off"].startswith("another rank has stopped")
    else:
        assert facts["compiled"]["layers"] is True
        assert "on rank 1" in facts["guard"]["left_off"]["own adapters"]
        assert list(facts["adapters_computed"]) == ["differs from peft's"]
    assert_right_curve(pages[0], right)


class Rows:
    """One row of documents of these lengths."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def documents(self, row: int) -> Any:
        ids = torch.arange(sum(self.lengths)).split(list(self.lengths))
        return [(each.numpy(), each.numpy()) for each in ids]


@pytest.mark.parametrize(
    ("lengths", "split", "expected"),
    [
        ((1000,), True, [60, 30]),
        ((1000,), False, [90]),
        ((1000, 1000), True, [60, 20]),
        ((10, 20, 5, 1000), True, [10, 20, 5, 37]),
        ((1,), True, [1]),
        ((2,), True, [2]),
        ((3, 1), True, [3, 1]),
    ],
)
def test_the_tokens_that_are_compared(lengths: tuple[int, ...], split: bool, expected: list[int]) -> None:
    rows: Any = Rows(*lengths)
    found = FirstTokens(rows, 90, split).documents(0)
    assert [len(ids) for ids, _ in found] == expected
    assert found[0][0][0] == 0


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ({}, {}, {}),
        ({}, {NORMS: "off"}, {NORMS: "off on rank 1"}),
        ({GATES: "far"}, {}, {GATES: "far on rank 0"}),
        ({GATES: "far"}, {GATES: "near", NORMS: "off"}, {GATES: "far on rank 0", NORMS: "off on rank 1"}),
    ],
)
def test_both_ranks_answer_whether_one_differs(
    own: dict[str, str], other: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second rank is pretended. Only if any rank differs do both gather; a rank that decided alone would hang."""
    gathered = []

    def reduce(flags: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        assert flags.tolist() == [path in own for path in INSTEAD]
        return flags + torch.tensor([path in other for path in INSTEAD], dtype=flags.dtype)

    def gather(mine: list[dict[str, str]]) -> list[dict[str, str]]:
        gathered.append(mine)
        return [*mine, {path: f"{why} on rank 1" for path, why in other.items()}]

    monkeypatch.setattr(guard, "gather_object", gather)
    accelerator = SimpleNamespace(device="cpu", reduce=reduce, process_index=0, num_processes=2)
    run: Any = SimpleNamespace(accelerator=accelerator)
    found: Any = SimpleNamespace(left_off=own)
    assert guard._agreed(run, found) == expected
    assert len(gathered) == bool(expected)
