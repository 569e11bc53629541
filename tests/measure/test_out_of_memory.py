"""A run that is out of memory ends with what ran, plan against measurement and a remedy; its checkpoint is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from finetune.measure.out_of_memory import does_not_fit, is_out_of_memory, requested_bytes, smaller
from finetune.measure.phases import Memory
from finetune.recipe.schema import Data, DataSet, ModelSection, Recipe, Training
from finetune.run_folder.checkpoint import newest_valid
from finetune.train import main
from finetune.training import loop, memory_report, session
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import tiny, write_recipe
from tests.support.runs.soak_resume import MEASURED

pytestmark = pytest.mark.usefixtures("forget_the_last_run")
GIB = 2**30
CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.69 GiB"
PLAN = {
    "peak": {"phase": "backward", "module": "model.layers.3"},
    "outside_bytes": {"CUDA context": GIB},
    "phases": {
        "forward": {"peak_bytes": 5 * GIB, "parts": {"parameters": 3 * GIB, "activations": 2 * GIB}, "module": ""},
        "backward": {
            "peak_bytes": 7 * GIB,
            "parts": {"parameters": 3 * GIB, "activations": 4 * GIB},
            "module": "model.layers.3",
        },
    },
}
RECIPE = Recipe(
    model=ModelSection(name_or_path="nothing"),
    data=Data(train=[DataSet(path="json", data_files="none.jsonl")], max_length=4096),
    training=Training(per_device_batch_size=4, activation_checkpointing=2),
)


def real_failure() -> None:
    """The host's allocator cannot give an eighth of its address space."""
    torch.empty(2**61, dtype=torch.uint8)


def test_what_is_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError(CUDA))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
    with pytest.raises(RuntimeError) as real:
        real_failure()
    assert is_out_of_memory(real.value)
    assert requested_bytes(real.value) == 2**61
    assert requested_bytes(torch.OutOfMemoryError(CUDA)) == int(2.5 * GIB)
    assert requested_bytes(MemoryError()) is None


def text(
    planned: dict[str, Any], *, phase: str = "backward", error: BaseException | None = None, others: int = 0
) -> list[str]:
    memory = Memory(total=24 * GIB, taken=22 * GIB, peak=21 * GIB, others=others)
    failure = error or torch.OutOfMemoryError(CUDA)
    how = {"memory": memory, "planned": planned, "command": "accelerate launch again"}
    return str(does_not_fit(RECIPE, failure, doing="training", phase=phase, step=7, **how)).splitlines()  # type: ignore[arg-type]


def test_it_says_phase_component_plan_measurement_and_what_fits() -> None:
    changes = [{"change": f"data.max_length={n}", "needed_bytes": n * 2**20} for n in (4096, 2048, 1024, 512)]
    assert text({"plan": PLAN, "why": None, "changes": changes}) == [
        "training: out of memory in backward: 22.00 of 24.0 GiB taken, 2.50 GiB more requested; fits by plan: "
        "data.max_length=4096 (4.00 GiB), or data.max_length=2048 (2.00 GiB), or data.max_length=1024 (1.00 GiB)",
        "  planned: 8.00 GiB at the peak of backward, in model.layers.3, most of it activations, 4.00 GiB; "
        "measured: 21.00 GiB at the peak",
        "  nothing is lost: the run is at step 7; after the change: accelerate launch again",
    ]


def test_without_a_plan_it_says_why_and_what_to_try() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    error.add_note("an evaluation on 4 rows of 4,096 tokens")
    lines = text({"plan": None, "why": "no such model", "changes": None}, phase="", error=error, others=9 * GIB)
    assert lines[0] == (
        "training: out of memory, an evaluation on 4 rows of 4,096 tokens: 22.00 of 24.0 GiB taken; try "
        "training.per_device_batch_size=2, or training.activation_checkpointing=true, or data.max_length=2048, "
        "or a strategy that shards more"
    )
    assert lines[1].startswith("  not planned: no such model; measured: 21.00 GiB")
    assert lines[2].startswith("  9.0 GiB of this GPU are used by other processes")


def test_another_phase_is_described_by_the_largest() -> None:
    assert "planned: 6.00 GiB at the peak of forward, most of it parameters" in text({"plan": PLAN}, phase="forward")[1]
    assert "planned: 8.00 GiB at the peak of backward" in text({"plan": PLAN}, phase="export")[1]


def test_what_takes_less() -> None:
    least = RECIPE.model_copy(update={"training": Training(per_device_batch_size=1)})
    offloading, shorter = "training.activation_offloading=true", "data.max_length=2048"
    assert list(smaller(least)) == [offloading, shorter]
    offloads = Training(per_device_batch_size=1, activation_offloading=True)
    assert list(smaller(least.model_copy(update={"training": offloads}))) == [shorter]
    assert list(smaller(least.model_copy(update={"accelerate_config": "1f1b"}))) == [shorter]


@pytest.fixture
def write(tmp_path: Path, tiny_llama: Path) -> Callable[[str], Path]:
    chats = write_chats(tmp_path / "chats.jsonl", [30, 45, 60, 80, 25, 100])

    def written(name: str) -> Path:
        content: dict[str, Any] = {
            "lora": {"r": 4},
            "data": {"max_length": 128},
            "training": {"global_batch_size": 2, "max_steps": 6, "activation_checkpointing": True},
            "samples": {"count": 0},
            "save_steps": 2,
            "output_dir": str(tmp_path / name),
        }
        return write_recipe(tmp_path, tiny(tiny_llama, chats, **content), f"{name}.yaml")

    return written


def curve(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["cuda", "host", "python"])
def test_in_the_middle_of_a_run(
    how: str,
    write: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """At the third step of six; the same command then continues to the end of the same curve."""
    backward, calls = Accelerator.backward, []
    answer = {"plan": PLAN, "why": None, "changes": None}
    monkeypatch.setattr(memory_report, "ask_planner", lambda *_, **__: answer)

    def fail(self: Accelerator, loss: torch.Tensor, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 2 + 2 * 2 + 1:  # the worst step's two, two of each step
            if how == "host":
                real_failure()
            raise MemoryError if how == "python" else torch.OutOfMemoryError(CUDA)
        backward(self, loss, **options)

    recipe, run = write("run"), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "backward", fail)
        assert main([str(recipe)]) == 3
    errors = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    at = next(index for index, line in enumerate(errors) if "out of memory" in line)
    assert errors[at].startswith("training: out of memory in backward: ")
    assert "; try training.per_device_batch_size" not in errors[at], "it is 1 already"
    assert "data.max_length=64" in errors[at]
    assert "planned: 8.00 GiB at the peak of backward, in model.layers.3, most of it activations" in errors[at + 1]
    assert "the run is at step 2; after the change: " in errors[at + 2]
    assert "Traceback" not in "".join(errors)
    state = json.loads((run / "run_state.json").read_text("utf-8"))
    assert (state["state"], state["phase"], state["step"]) == ("failed", "training", 2)
    assert state["error"].startswith("DoesNotFit: training: out of memory in backward")
    checkpoint, damaged = newest_valid(run)
    assert checkpoint is not None
    assert (checkpoint.step, damaged) == (2, ())
    assert main([str(recipe)]) == 0
    assert main([str(write("whole"))]) == 0
    assert curve(run) == curve(tmp_path / "whole")


@pytest.mark.slow
def test_while_loading(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "assemble", lambda *_, **__: real_failure())
    assert main([str(write("run"))]) == 3
    assert "load: out of memory in load: " in capfd.readouterr().err


@pytest.mark.thorough
def test_another_error_is_no_matter_of_memory(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(loop, "optimizer_step", wrong)
    with pytest.raises(RuntimeError, match="mat1"):
        main([str(write("run"))])
