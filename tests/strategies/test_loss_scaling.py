"""fp16: what overflows costs a step and half the scale, never a weight; the scale survives a resume bitwise."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from finetune import train
from finetune.errors import NotFinite
from finetune.files import read_lines
from finetune.measure.metrics import StepRecord, Terminal, Window
from finetune.model.build import build_model
from finetune.model.optimizer import make_optimizer
from finetune.strategies.accelerator import load_scaler_state, loss_scale, scale_losses_on_cpu, scaler_state
from finetune.training import run as training_run
from finetune.training.step import optimizer_step
from finetune.training.update import StepResult
from tests.support.models.tiny import flat_batch
from tests.support.runs.soak_resume import fingerprint, fork_ranks, wait_all, write_resume_recipe
from tests.support.runs.stepping import CPU, CountReads, float32_recipe, step_parts, weights

pytestmark = pytest.mark.usefixtures("forget_the_last_run")


class Bench:
    """A tiny model, all of it trained in float32 and computed in float16."""

    def __init__(self, folder: Path, scale: float = 2.0**16) -> None:
        self.accelerator = Accelerator(cpu=True, mixed_precision="fp16")
        scale_losses_on_cpu(self.accelerator)
        requested = float32_recipe(folder, mixed_precision="fp16")
        model: nn.Module = build_model(requested, CPU)
        self.model, self.optimizer = self.accelerator.prepare(model.train(), make_optimizer(model, requested))
        fresh = self.accelerator.scaler.state_dict()
        load_scaler_state(self.accelerator, fresh | {"scale": scale})

    def step(self, batches: Sequence[dict[str, Any]] = (flat_batch(),)) -> StepResult:
        return optimizer_step(
            step_parts(self.accelerator, self.model, self.optimizer),
            iter(batches),
            micro_steps=len(batches),
            planned_count=17 * len(batches),
            seed=5,
            stop=False,
        ).result()


def test_accelerate_alone_silently_computes_in_float32(tiny_llama: Path) -> None:
    """When this turns red, scale_losses_on_cpu can go."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    assert (accelerator.mixed_precision, accelerator.native_amp, accelerator.scaler) == ("fp16", False, None)


def test_layers_compute_in_float16_and_weights_stay_float32(tiny_llama: Path) -> None:
    bench = Bench(tiny_llama)
    seen = set()
    for module in bench.model.modules():
        if isinstance(module, nn.Linear) and module is not bench.model.get_output_embeddings():
            module.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    assert not bench.step().skipped
    assert seen == {torch.float16}
    assert {parameter.dtype for parameter in bench.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_one_read_a_step(tiny_llama: Path, micro_steps: int) -> None:
    bench, batches = Bench(tiny_llama), [flat_batch(seed=seed) for seed in range(micro_steps)]
    with CountReads() as counter:
        bench.step(batches)
    assert sum(counter.reads.values()) == 1, counter.reads


def test_what_overflows_is_skipped_until_the_scale_fits(tiny_llama: Path) -> None:
    """A loss times 2**30 is beyond float16 in truth; the scale comes down until training continues."""
    bench = Bench(tiny_llama, scale=2.0**30)
    before, results = weights(bench.model), []
    while not results or results[-1].skipped:
        results.append(bench.step())
        if results[-1].skipped:
            assert all(torch.equal(x, y) for x, y in zip(before, weights(bench.model), strict=True))
            assert not bench.optimizer.state
            assert all(parameter.grad is None for parameter in bench.model.parameters())
    assert len(results) > 5
    assert [result.loss_scale for result in results] == [2.0 ** (30 - skips) for skips in range(len(results))]
    assert {result.loss for result in results} == {results[0].loss}
    assert math.isfinite(results[-1].grad_norm)
    assert not all(torch.equal(x, y) for x, y in zip(before, weights(bench.model), strict=True))


def test_the_scale_leaves_the_gradient_as_it_is(tiny_llama: Path) -> None:
    norms = []
    for scale in (2.0**8, 2.0**14):
        AcceleratorState._reset_state(True)
        norms.append(Bench(tiny_llama, scale).step().grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def spoil_loss(model: nn.Module) -> None:
    inner = model.forward
    model.forward = lambda **batch: inner(**batch) + math.inf


def spoil_gradient(model: nn.Module) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient * math.inf)


@pytest.mark.parametrize(
    ("spoil", "scale", "words"),
    [(spoil_loss, 2.0**16, "loss inf"), (spoil_gradient, 1.0, "loss scale of 1 .*bf16")],
)
def test_no_scale_repairs_these(tiny_llama: Path, spoil: Callable[[nn.Module], None], scale: float, words: str) -> None:
    bench = Bench(tiny_llama, scale)
    before = weights(bench.model)
    spoil(bench.model)
    with pytest.raises(NotFinite, match=words):
        bench.step()
    assert all(torch.equal(x, y) for x, y in zip(before, weights(bench.model), strict=True))


def test_seventeen_skips_in_a_row_end_a_run(tiny_llama: Path) -> None:
    bench = Bench(tiny_llama)
    spoil_gradient(bench.model)
    assert all(bench.step().skipped for _ in range(16))  # at 65536, 32768, ... 2
    with pytest.raises(NotFinite, match="overflow"):
        bench.step()


def test_the_scaler_survives_json(tiny_llama: Path) -> None:
    bench = Bench(tiny_llama, scale=4096.0)
    bench.step()
    saved = json.loads(json.dumps(scaler_state(bench.accelerator)))
    assert (saved["scale"], saved["_growth_tracker"]) == (4096.0, 1)
    AcceleratorState._reset_state(True)
    other = Bench(tiny_llama)
    load_scaler_state(other.accelerator, saved)
    assert scaler_state(other.accelerator) == saved
    assert loss_scale(other.accelerator).tolist() == [4096.0]


def test_the_line_of_metrics_and_the_terminal_say_so() -> None:
    common: dict[str, Any] = {"epoch": 0.1, "loss": 2.0, "learning_rate": 1e-4, "supervised_tokens": 10, "tokens": 20}
    common |= {"seconds": 0.5, "data_wait_seconds": 0.0}
    fine = StepRecord(step=3, grad_norm=1.5, loss_scale=65536.0, skipped_steps=0, **common)
    over = StepRecord(step=4, grad_norm=None, loss_scale=65536.0, skipped_steps=1, **common)
    out = io.StringIO()
    terminal = Terminal(9, silent=False, stream=out)
    for records, norm, words in ([fine, over], 1.5, "norm 1.5"), ([over], None, "norm overflow"):
        line = Window(records).flush(CPU)
        assert (line["grad_norm"], line["loss_scale"], line["skipped_steps"]) == (norm, 65536.0, 1)
        terminal.step(json.loads(json.dumps(line, allow_nan=False)))
        assert f"{words}  scale 65536, 1 skipped" in out.getvalue()
    assert "loss_scale" not in Window([replace(fine, loss_scale=None)]).flush(CPU)


def test_without_fp16_there_is_no_scale() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    scale_losses_on_cpu(accelerator)
    load_scaler_state(accelerator, None)
    assert accelerator.scaler is None
    assert scaler_state(accelerator) is None
    assert loss_scale(accelerator).tolist() == [1.0]


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that starts too high and doubles after two good steps: a short run skips several times."""
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**24, growth_interval=2)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)


@pytest.mark.usefixtures("restless")
@pytest.mark.slow
def test_a_resumed_fp16_run_is_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested = write_resume_recipe(tmp_path, steps=14, dropout=0.1)
    body = yaml.safe_load(requested.read_text())
    body["training"]["mixed_precision"] = "fp16"
    body |= {"save_steps": 3, "logging_steps": 1}
    requested.write_text(yaml.safe_dump(body))

    def run(name: str) -> int:
        AcceleratorState._reset_state(True)
        return train.main([str(requested), f"output_dir={tmp_path / name}", "accelerate_config=single"])

    assert run("whole") == 0
    lines = [line for line in read_lines(tmp_path / "whole" / "metrics.jsonl") if line["kind"] == "train"]
    skipped = [line for line in lines if line["grad_norm"] is None]
    assert 2 <= len(skipped) < len(lines)
    assert lines[-1]["skipped_steps"] == len(skipped)
    assert skipped[-1]["step"] > 6, "the scale is still moving after the first saves"
    assert lines[-1]["loss"] < lines[0]["loss"]

    save = training_run.save
    for end in (3, 6, 9):  # broken off after these saves, and resumed from each

        def save_and_break(*parts: Any, end: int = end) -> None:
            save(*parts)
            _, _, state, saves, _ = parts
            if state.step == end:
                saves.wait()
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(training_run, "save", save_and_break)
            assert run("broken") == 130
    assert run("broken") == 0
    assert fingerprint(tmp_path / "broken") == fingerprint(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_skip_together(strategy: str, tmp_path: Path) -> None:
    """A rank that skipped alone would part from the other for good."""
    requested = write_resume_recipe(tmp_path, steps=10, dropout=0.0)
    body = yaml.safe_load(requested.read_text())
    body["training"]["mixed_precision"] = "fp16"
    body["samples"] = {"count": 0}
    requested.write_text(yaml.safe_dump(body | {"logging_steps": 1}))
    assert wait_all(fork_ranks(requested, tmp_path / "run", 2, strategy), 120) == [0, 0]
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    skips = [line["step"] for line in lines if line["grad_norm"] is None]
    assert 2 <= len(skips) < 10
    assert lines[-1]["skipped_steps"] == len(skips)
    scales = [line["loss_scale"] for line in lines]
    assert all(after in (before, before / 2, before * 2) for before, after in pairwise(scales))
