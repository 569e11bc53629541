"""The worst step is tried first and leaves no trace: not in the run, and not in its folder when it fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.files import TEMPORARY_PREFIX
from finetune.launch.gpu_environment import ALLOCATOR_VARIABLES, CUBLAS_VARIABLE
from finetune.launch.signals import StopRequest
from finetune.measure.metrics import Terminal
from finetune.measure.phases import Phases
from finetune.run_folder import background, checkpoint
from finetune.run_folder.train_state import TrainState
from finetune.run_folder.trained_tensors import model_tensors, optimizer_tensors
from finetune.train import main
from finetune.training import held_state, session, worst_step
from finetune.training.held_state import Held
from finetune.training.run import Run
from finetune.training.worst_step import WorstStep
from tests.support.models.tiny import write_chats
from tests.support.runs.cells import launch
from tests.support.runs.recipes import tiny, write_recipe
from tests.support.runs.soak_resume import MEASURED

pytestmark = pytest.mark.usefixtures("forget_the_last_run")
LENGTHS = [30, 45, 60, 80, 25, 100, 40, 55, 70, 35, 65, 50]
NONE = WorstStep(0, 0.0, 0.0, 0)


WEIGHTS = 4 * 139_584  # bytes of the tiny model's, all trained


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, tiny_llama: Path, chats: Path) -> Write:
    """Writes a recipe whose run folder is next to it; keyword arguments go into `training`."""

    def written(name: str, *, lora: dict[str, Any] | None = None, **training: Any) -> Path:
        plain = {"global_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2}
        content: dict[str, Any] = {
            "lora": lora,
            "data": {"eval": {"fraction": 0.2}, "max_length": 128},
            "training": plain | training,
            "samples": {"count": 1, "max_new_tokens": 4},
            "logging_steps": 1,
            "eval_steps": 2,
            "save_steps": 2,
            "output_dir": str(tmp_path / name / "run"),
        }
        (tmp_path / name).mkdir()
        return write_recipe(tmp_path / name, tiny(tiny_llama, chats, **content))

    return written


def left_by(recipe: Path) -> dict[str, Any]:
    """Everything of a run that must be bitwise equal."""
    run = recipe.parent / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    files = sorted([*run.glob("checkpoints/step-*/*.safetensors"), *run.glob("*/*model*.safetensors")])
    assert len(files) >= 5
    return {
        "metrics": [{key: value for key, value in line.items() if key not in MEASURED} for line in lines],
        "samples": (run / "samples.jsonl").read_text("utf-8"),
        **{str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    }


def state_before_training(run: Run, state: TrainState) -> dict[str, Any]:
    """What the first step starts from, as bytes where it is large."""
    parts = {**model_tensors(run.parts.model), **optimizer_tensors(run.parts.model, run.parts.optimizer)}
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in run.parts.optimizer.param_groups
    ]
    return {
        "tensors": {name: value.detach().numpy().tobytes() for name, value in parts.items()},
        "gradients": [name for name, value in run.parts.model.named_parameters() if value.grad is not None],
        "groups": groups,
        "rates": [run.schedule.rate(step) for step in range(run.plan.total_steps)],
        "rows": [run.plan.rows_of(step).tolist() for step in range(run.plan.total_steps)],
        "torch": torch.random.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": pickle.dumps(np.random.get_state()),
        "scaler": run.parts.accelerator.scaler and run.parts.accelerator.scaler.state_dict(),
        "training": run.parts.model.training,
        "state": state.as_json(),
    }


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, decayed, accumulated": {"weight_decay": 0.1, "per_device_batch_size": 2},
    "lora with dropout, accumulated": {"lora": {"r": 4, "lora_dropout": 0.3}, "per_device_batch_size": 1},
    "lora with dropout, recomputed": {"lora": {"r": 4, "lora_dropout": 0.3}, "activation_checkpointing": True},
    "fp16": {"mixed_precision": "fp16"},
    "bf16": {"mixed_precision": "bf16"},
    "8-bit AdamW": {"optim": "adamw_8bit"},
}
FAST = ("full, decayed, accumulated", "lora with dropout, accumulated", "bf16")


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES])
def test_the_run_is_bitwise_the_one_without_it(case: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "8-bit AdamW":
        pytest.importorskip("bitsandbytes")
    begun: list[dict[str, Any]] = []
    tried: list[WorstStep] = []
    train, first = session.take_steps, session.worst_step_first

    def spy(run: Run, state: TrainState) -> bool:
        begun.append(state_before_training(run, state))
        return train(run, state)

    def real(*arguments: Any) -> WorstStep:
        tried.append(first(*arguments))
        return tried[-1]

    monkeypatch.setattr(session, "take_steps", spy)
    recipes = []
    for name, how in (("with", real), ("without", lambda *arguments: NONE)):
        monkeypatch.setattr(session, "worst_step_first", how)
        recipes.append(write(name, **CASES[case]))
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        assert main([str(recipes[-1])]) == 0
    assert len(tried) == 1
    assert tried[0].tokens > 0
    assert begun[0] == begun[1]
    assert not begun[0]["gradients"]
    assert left_by(recipes[0]) == left_by(recipes[1])


@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize("missing", ["nothing", "memory", "posix_fallocate"])
def test_it_writes_nothing_where_memory_holds_the_state(
    missing: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it goes through the disk, to the same bits."""
    written: list[int] = []
    save_file, first = checkpoint.save_file, session.worst_step_first
    tried: list[WorstStep] = []

    def real(*arguments: Any) -> WorstStep:
        with monkeypatch.context() as patch:
            if missing == "memory":
                patch.setattr(held_state, "available_bytes", lambda: background.SPARE_BYTES)
            if missing == "posix_fallocate":
                patch.delattr(os, "posix_fallocate")
            patch.setattr(checkpoint, "save_file", lambda found, path: (written.append(1), save_file(found, path)))
            before = state_before_training(arguments[0], TrainState())
            tried.append(first(*arguments))
            after = state_before_training(arguments[0], TrainState())
        assert {**after, "gradients": []} == {**before, "gradients": []}
        return tried[-1]

    monkeypatch.setattr(session, "worst_step_first", real)
    recipe = write("run", max_steps=1)
    assert main([str(recipe)]) == 0
    facts = json.loads((recipe.parent / "run" / "receipt.json").read_text("utf-8"))["worst_step_first"]
    assert bool(written) == (missing != "nothing")
    assert facts["held_bytes"] == (WEIGHTS if missing == "nothing" else 0)
    assert not in_folder(recipe) & {f"{TEMPORARY_PREFIX}worst-step"}


@pytest.mark.slow
def test_a_resumed_run_too(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """With moments, a step count and a loss scale to go back to."""
    begun = []
    train = session.take_steps

    def spy(run: Run, state: TrainState) -> bool:
        begun.append((state.step, state_before_training(run, state)))
        return train(run, state)

    monkeypatch.setattr(session, "take_steps", spy)
    recipe = write("run", mixed_precision="fp16")
    uninterrupted = write("whole", mixed_precision="fp16")
    assert main([str(uninterrupted)]) == 0

    def stopped_after_2(run: Run, state: TrainState) -> bool:
        class Stop(StopRequest):
            def __bool__(self) -> bool:
                return state.step == 1

        return spy(replace(run, stop=Stop()), state)

    with monkeypatch.context() as patch:
        patch.setattr(session, "take_steps", stopped_after_2)
        assert main([str(recipe)]) == 130
    torch.manual_seed(1)
    assert main([str(recipe)]) == 0
    assert [step for step, _ in begun] == [0, 0, 2]
    assert len(begun[2][1]["tensors"]) > len(begun[1][1]["tensors"]), "the optimizer has a state"
    assert left_by(recipe) == left_by(uninterrupted)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("lora", [None, {"r": 4, "lora_dropout": 0.3}], ids=["full", "lora"])
def test_it_leaves_nothing_allocated(
    lora: dict[str, Any] | None, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gradient, no moment: what CUDA's allocator has cached for them goes back to the GPU, once, afterwards."""
    seen: list[str] = []
    left: list[int] = []
    first, give_back = session.worst_step_first, session.give_back_cached_memory

    def watched(run: Run, *arguments: Any) -> WorstStep:
        existing = [*run.parts.model.parameters(), *run.parts.model.buffers()]
        held = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in existing}
        around = Phases(torch.device("cpu"), enabled=True, existing=existing)
        with around("around"):
            tried = first(run, *arguments)
        phase = around.take()["around"]
        assert phase.peak_bytes > 1.5 * sum(held.values()), "gradients and moments were there"
        left.append(phase.allocated_bytes - sum(held.values()))
        seen.append("worst step")
        return tried

    def given_back(device: torch.device) -> None:
        seen.append("given back")
        give_back(device)

    monkeypatch.setattr(session, "worst_step_first", watched)
    monkeypatch.setattr(session, "give_back_cached_memory", given_back)
    assert main([str(write("run", lora=lora, per_device_batch_size=2))]) == 0
    assert seen == ["worst step", "given back"]
    assert 0 <= left[0] < 1024, "bytes; a weight matrix has 16,384"


@pytest.mark.slow
def test_on_a_gpu_it_and_the_training_run_by_deterministic_kernels(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else does: sampling may need kernels that torch has no deterministic one of. Here on a CPU."""
    when: dict[str, bool] = {}
    on_gpu = session.deterministic_algorithms
    monkeypatch.setattr(session, "deterministic_algorithms", lambda wanted, _: on_gpu(wanted, torch.device("cuda", 0)))

    def spy(name: str, real: Callable[..., Any]) -> None:
        def spied(*arguments: Any, **options: Any) -> Any:
            when[name] = torch.are_deterministic_algorithms_enabled()
            return real(*arguments, **options)

        monkeypatch.setattr(session, name, spied)

    for name in ("worst_step_first", "look_before", "take_steps", "write_samples"):
        spy(name, getattr(session, name))
    plain = write("plain")
    assert main([str(plain)]) == 0
    assert not any(when.values())
    for name in (*ALLOCATOR_VARIABLES, CUBLAS_VARIABLE):
        monkeypatch.setenv(name, "")  # so that the environment is as before afterwards
        monkeypatch.delenv(name)
    asked = write("asked", deterministic=True)
    assert main([str(asked)]) == 0
    assert when == {"worst_step_first": True, "look_before": False, "take_steps": True, "write_samples": False}
    assert not torch.are_deterministic_algorithms_enabled()
    assert left_by(asked) == left_by(plain)


WITHOUT = """
import sys
from pathlib import Path
from finetune.training import session
from finetune.training.worst_step import WorstStep
from tests.support.runs import cells
def skip(*arguments):
    with Path(__file__).with_suffix(".skipped").open("a") as file:
        file.write("skipped")
    return WorstStep(0, 0.0, 0.0, 0)
session.worst_step_first = skip
sys.exit(cells.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_on_two_ranks_too(strategy: str, write: Write, tmp_path: Path) -> None:
    program = tmp_path / "without.py"
    program.write_text(WITHOUT)
    cases = {"lora": {"lora": {"r": 4, "lora_dropout": 0.3}}, "full": {}, "fp16": {"mixed_precision": "fp16"}}
    recipes = {}
    for how, script in (("with", "tests/support/runs/cells.py"), ("without", str(program))):
        recipes[how] = [write(f"{how} {name}", per_device_batch_size=1, **case) for name, case in cases.items()]
        words = [f"accelerate_config={strategy}"]
        assert launch(recipes[how], ranks=2, words=words, program=script, timeout=600) == [0, 0, 0]
    for with_it, plain in zip(recipes["with"], recipes["without"], strict=True):
        assert left_by(with_it) == left_by(plain)
    assert program.with_suffix(".skipped").read_text() == "skipped" * 2 * len(cases)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(("per_device", "times", "rows"), [(1, 2, 1), (2, 2, 2), (4, 1, 4)])
def test_it_takes_the_longest_rows_an_evaluation_and_a_save(
    per_device: int, times: int, rows: int, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    prefetch = worst_step.prefetch
    real_hold, real_restore = worst_step.hold_state, Held.restore

    def batches(rows: list[Any], *arguments: Any, **options: Any) -> Any:
        seen.append([int((batch["shift_labels"] != -100).numel()) for batch in rows])
        return prefetch(rows, *arguments, **options)

    def hold(*arguments: Any, **options: Any) -> Held:
        held = real_hold(*arguments, **options)
        seen.append("hold")
        return held

    def restore(held: Held) -> None:
        seen.append("restore")
        real_restore(held)

    lengths: dict[str, list[int]] = {}

    def first(run: Run, *arguments: Any) -> WorstStep:
        lengths["train"] = sorted(run.train_rows.lengths, reverse=True)
        lengths["eval"] = sorted(run.eval_rows.lengths, reverse=True)  # type: ignore[union-attr]
        return worst_step.worst_step_first(run, *arguments)

    monkeypatch.setattr(worst_step, "prefetch", batches)
    monkeypatch.setattr(worst_step, "hold_state", hold)
    monkeypatch.setattr(Held, "restore", restore)
    monkeypatch.setattr(session, "worst_step_first", first)
    assert main([str(write("run", per_device_batch_size=per_device))]) == 0
    most = [sum(lengths[which][:rows]) for which in ("train", "eval")]
    assert len(seen.pop(0)) == 1, "the guard's few tokens"
    assert seen == ["hold", [most[0]] * times, [most[1]], "restore"]
    assert lengths["train"][0] > lengths["train"][-1]


def in_folder(recipe: Path) -> set[str]:
    return {path.name for path in (recipe.parent / "run").iterdir()}


def assert_it_failed_cleanly(recipe: Path, code: int, expected: int, text: str, word: str) -> None:
    """The exit code, one line, and a folder that holds what a start leaves and nothing half-written."""
    assert code == expected
    lines = [line for line in text.splitlines() if word in line]
    assert len(lines) == 1, text
    assert "Traceback" not in text
    assert "; " in lines[0], "a remedy"
    names = in_folder(recipe)
    assert not {name for name in names if name.startswith(TEMPORARY_PREFIX)}, names
    left_by_a_start = {"recipe.yaml", "environment.json", "receipt.json", "run_state.json", "metrics.jsonl"}
    assert names <= left_by_a_start | {".lock", ".state.lock", "conversation.json"}
    state = json.loads((recipe.parent / "run" / "run_state.json").read_text("utf-8"))
    assert (state["state"], state["phase"], state["step"]) == ("failed", "worst step first", 0)


@pytest.mark.thorough
def test_a_full_disk_ends_it_in_one_line(
    write: Write, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int, offset: int, nbytes: int) -> None:
        """With room for the weights alone, and not for the two moments that every later checkpoint has."""
        if nbytes > 2 * WEIGHTS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recipe = write("run")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        code = main([str(recipe)])
    assert_it_failed_cleanly(recipe, code, 4, capfd.readouterr().err, "the disk is full")
    assert main([str(recipe)]) == 0, "with space the same command continues"


@pytest.mark.slow
@pytest.mark.parametrize("message", ["CUDA out of memory", "DefaultCPUAllocator: can't allocate memory"])
@pytest.mark.parametrize("where", ["a training step", "an evaluation"])
def test_too_little_memory_ends_it_in_one_line(
    where: str, message: str, write: Write, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(*arguments: Any, **options: Any) -> Any:
        raise (torch.OutOfMemoryError if "CUDA" in message else RuntimeError)(message)

    recipe = write("run", per_device_batch_size=4)
    with monkeypatch.context() as patch:
        if where == "a training step":
            patch.setattr(worst_step, "optimizer_step", out_of_memory)
        else:
            prefetch = worst_step.prefetch
            takes = iter([prefetch, prefetch, out_of_memory])  # the guard's, the training step's and the evaluation's
            patch.setattr(worst_step, "prefetch", lambda *found, **options: next(takes)(*found, **options))
        code = main([str(recipe)])
    errors = capfd.readouterr().err
    assert_it_failed_cleanly(recipe, code, 3, errors, f"{where} on 4 rows of")
    assert "training.per_device_batch_size=2" in errors
    assert main([str(recipe)]) == 0, "with memory the same command continues"


def test_another_error_is_no_matter_of_memory(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(worst_step, "optimizer_step", wrong)
    with pytest.raises(RuntimeError, match="mat1"):
        main([str(write("run"))])


@pytest.mark.thorough
def test_a_terminal_shows_which_part_of_it_runs(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(Terminal, "progress", lambda self, text: shown.append(text))
    later = ("samples before training: ", "samples after training: ", "held-out loss: ")
    recipe = write("shown", max_steps=1)
    assert main([str(recipe)]) == 0
    parts = ["keeping weights and optimizer state", "a step on the longest rows"]
    parts += ["evaluating the longest held-out rows", "restoring weights and optimizer state"]
    assert shown[: len(parts)] == [f"worst step first: {part}" for part in parts]
    assert all(text.startswith(later) for text in shown[len(parts) :]), "and nothing of the run's own step"
