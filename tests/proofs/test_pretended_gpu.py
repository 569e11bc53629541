"""Whole runs on a GPU that is the host: from the start to the export they take the branches that they take on CUDA.

The curve is the CPU's, and a run that broke off goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune import train
from finetune.files import read_lines
from finetune.finished_run import best_device, finished_run
from finetune.training import session
from tests.support.runs.cells import free_ports
from tests.support.runs.finished import held_out_figures
from tests.support.runs.launching import REPOSITORY, TORCHRUN
from tests.support.runs.one_rank import as_before
from tests.support.runs.recipes import write_recipe
from tests.support.runs.soak_resume import fingerprint, write_resume_recipe
from tests.support.stand_ins.pretend_cuda import pretended_cuda
from tests.support.stand_ins.varlen_stand_in import FACTORS

pytestmark = pytest.mark.usefixtures("one_thread")
RANKS = "ddp", "fsdp2", "fsdp2_offload"


def recipe_of(folder: Path, dropout: float = 0.1, **changes: Any) -> Path:
    recipe = write_resume_recipe(folder, steps=4, dropout=dropout)
    content = json.loads(recipe.read_text())
    content["training"] |= changes
    return write_recipe(folder, content | {"save_steps": 2})


def run(recipe: Path, run_dir: Path, way: str = "single") -> int:
    with as_before():
        return train.main([str(recipe), f"output_dir={run_dir}", f"accelerate_config={way}"])


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run_dir / "metrics.jsonl") if line["kind"] in ("train", "eval")]


def receipt(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "receipt.json").read_text("utf-8"))
    return found


@pytest.mark.thorough
def test_the_curve_is_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path)
    assert run(recipe, tmp_path / "cpu") == 0
    with monkeypatch.context() as patches, pretended_cuda(patches):
        assert run(recipe, tmp_path / "gpu") == 0
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)
    on_gpu, on_cpu = receipt(tmp_path / "gpu"), receipt(tmp_path / "cpu")
    assert (on_gpu["device"], on_gpu["pinned_memory"], on_gpu["sharding"]["weights_on"]) == ("cuda", True, ["cuda"])
    assert (on_cpu["device"], on_cpu["pinned_memory"]) == ("cpu", False)
    assert on_gpu["memory"]["measured"]["by"] == "CUDA's allocator"


@pytest.mark.slow
def test_a_run_in_bfloat16_that_broke_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, mixed_precision="bf16")

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the export broke")

    with monkeypatch.context() as patches, pretended_cuda(patches):
        assert run(recipe, tmp_path / "whole") == 0
        with monkeypatch.context() as patch:
            patch.setattr(session, "export", broken)
            with pytest.raises(RuntimeError, match="the export broke"):
                run(recipe, tmp_path / "again")
        assert run(recipe, tmp_path / "again") == 0
    assert fingerprint(tmp_path / "again") == fingerprint(tmp_path / "whole")
    assert receipt(tmp_path / "whole")["probe"]["precision"] == "bfloat16"
    assert receipt(tmp_path / "whole")["attention"] == "varlen"


@pytest.mark.slow
def test_a_kernel_that_is_wrong_is_left_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its gradients are half of what they should be from the worst step on: the probe has seen it right."""
    recipe, compile_as_asked = recipe_of(tmp_path, dropout=0.0, mixed_precision="bf16"), session.compile_as_asked
    with monkeypatch.context() as patches, pretended_cuda(patches):
        assert run(recipe, tmp_path / "right") == 0

        def from_here_on(*given: Any) -> Any:
            patches.setitem(FACTORS, "gradients", 0.5)
            return compile_as_asked(*given)

        patches.setattr(session, "compile_as_asked", from_here_on)
        assert run(recipe, tmp_path / "wrong") == 0
    right, wrong = (receipt(tmp_path / name) for name in ("right", "wrong"))
    assert (right["guard"]["left_off"], right["guard"]["compared"]["flash attention"]) == ({}, 1)
    assert list(wrong["guard"]["left_off"]) == ["flash attention"]
    assert wrong["flash_kernel"]["by_document"] is True
    assert "guard: attention runs document by document from here on, because the faster way" in capsys.readouterr().out
    assert losses(tmp_path / "wrong") == pytest.approx(losses(tmp_path / "right"), rel=1e-2)


@pytest.mark.slow
def test_a_base_in_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the finished run, evaluated there."""
    recipe = recipe_of(tmp_path)
    content = json.loads(recipe.read_text())
    content["quantization"] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
    write_recipe(tmp_path, content)
    assert run(recipe, tmp_path / "cpu") == 0
    with monkeypatch.context() as patches, pretended_cuda(patches):
        assert run(recipe, tmp_path / "gpu") == 0
        with as_before():
            figures = held_out_figures(finished_run(tmp_path / "gpu"), best_device())
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)
    assert figures["tuned"]["loss"] == pytest.approx(figures["recorded"], rel=1e-5)
    assert receipt(tmp_path / "gpu")["quantized_layers"]


@pytest.mark.slow
def test_float16_scales_its_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, mixed_precision="fp16")
    assert run(recipe, tmp_path / "cpu") == 0
    with monkeypatch.context() as patches, pretended_cuda(patches):
        assert run(recipe, tmp_path / "gpu") == 0
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=2e-3)
    scales = [line["loss_scale"] for line in read_lines(tmp_path / "gpu" / "metrics.jsonl") if line["kind"] == "train"]
    assert set(scales) == {65536.0}


@pytest.mark.slow
def test_weights_in_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 of one rank, whose units are copied to the GPU as they are used."""
    recipe = recipe_of(tmp_path)
    assert run(recipe, tmp_path / "cpu", "fsdp2_offload") == 0
    with monkeypatch.context() as patches, pretended_cuda(patches):
        assert run(recipe, tmp_path / "gpu", "fsdp2_offload") == 0
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)
    assert receipt(tmp_path / "gpu")["sharding"]["weights_on"] == ["cpu"]


def ranks(recipe: Path, run_dir: Path, way: str) -> subprocess.Popen[bytes]:
    port = str(free_ports(1)[0])
    words = [
        *TORCHRUN,
        "--nproc_per_node",
        "2",
        "--master_port",
        port,
        "tests/support/stand_ins/pretend_cuda.py",
        str(recipe),
    ]
    with run_dir.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [*words, f"output_dir={run_dir}", f"accelerate_config={way}"],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=log,
            stderr=log,
        )


@pytest.mark.slow
@pytest.mark.parametrize("way", RANKS)
def test_two_gpus_killed_and_resumed(way: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, dropout=0.0)  # whose numbers two ranks draw each for itself
    assert run(recipe, tmp_path / "cpu") == 0
    assert ranks(recipe, tmp_path / "whole", way).wait(600) == 0, (tmp_path / "whole.log").read_text()
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)
    process, killed = ranks(recipe, tmp_path / "killed", way), tmp_path / "killed"
    while process.poll() is None and not (killed / "checkpoints" / "step-00000002").exists():
        time.sleep(0.05)
    for each in (*psutil.Process(process.pid).children(recursive=True), process):
        each.kill()
    process.wait()
    assert not (killed / "adapter").exists(), "it was over before it was killed"
    assert ranks(recipe, killed, way).wait(600) == 0, (tmp_path / "killed.log").read_text()
    assert "resumed from step" in (tmp_path / "killed.log").read_text()
    assert "Warning" not in (tmp_path / "whole.log").read_text()
    assert fingerprint(killed) == fingerprint(tmp_path / "whole")
    offloaded = "offload" in way
    assert receipt(killed)["sharding"]["weights_on"] == (["cpu"] if offloaded else ["cuda"])
