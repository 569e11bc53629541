"""What a training sets for torch's allocator and for cuBLAS: before torch loads, in every rank, whoever started it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from finetune.launch import gpu_environment
from finetune.launch.gpu_environment import (
    ALLOCATOR_VARIABLES,
    COMPILE_WORKERS,
    CUBLAS_VARIABLE,
    expands_segments,
    on_wsl,
    set_gpu_environment,
    share_compile_workers,
)
from finetune.measure.host_memory import usable_cores
from finetune.strategies.machine import gpu_problems
from tests.support.runs.launching import ACCELERATE, ALONE, TORCHRUN
from tests.support.runs.recipes import least, least_recipe, write_recipe

ROOT = Path(__file__).resolve().parents[2]
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("chosen", "deterministic", "expected"),
    [
        ({}, False, EXPANDABLE),
        ({}, True, EXPANDABLE | {CUBLAS_VARIABLE: ":4096:8"}),
        ({CUBLAS_VARIABLE: ":16:8"}, True, EXPANDABLE | {CUBLAS_VARIABLE: ":16:8"}),
        *(({name: "max_split_size_mb:64"}, False, {name: "max_split_size_mb:64"}) for name in ALLOCATOR_VARIABLES),
    ],
)
def test_what_the_user_set_stays(chosen: dict[str, str], deterministic: bool, expected: dict[str, str]) -> None:
    environment = dict(chosen)
    set_gpu_environment(deterministic=deterministic, environment=environment)
    assert environment == expected


def test_wsl_gets_no_expandable_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drivers answer "unknown error" or "device not ready" to the first allocation."""
    release = tmp_path / "osrelease"
    for text, wsl in (("6.6.87.2-microsoft-standard-WSL2\n", True), ("6.8.0-45-generic\n", False)):
        release.write_text(text)
        assert on_wsl(release) == wsl
    assert not on_wsl(tmp_path / "none")
    monkeypatch.setattr(gpu_environment, "on_wsl", lambda: True)
    environment: dict[str, str] = {}
    set_gpu_environment(deterministic=False, environment=environment)
    assert environment == {}
    assert not expands_segments(environment)


@pytest.mark.parametrize(
    ("chosen", "expands"),
    [
        ({}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : true"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, False),
    ],
)
def test_what_the_planner_replays_is_what_the_start_sets(chosen: dict[str, str], expands: bool) -> None:
    assert expands_segments(chosen) == expands
    environment = dict(chosen)
    set_gpu_environment(deterministic=False, environment=environment)
    assert expands_segments(environment) == expands


# A program like finetune/train.py: it writes down its variables at torch's first import, and ends there.
AT_TORCHS_IMPORT = """
import json, os, sys
from pathlib import Path
from finetune.train import main
assert "torch" not in sys.modules
class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
            (Path(os.environ["SEEN_IN"]) / f"rank-{rank}").write_text(json.dumps(dict(os.environ)))
            os._exit(0)
sys.meta_path.insert(0, Look())
main(sys.argv[1:])
"""
LAUNCHERS = {
    "python": [[sys.executable]],
    "accelerate": [ACCELERATE],
    "torchrun": [[*TORCHRUN, "--nproc_per_node", "2", "--master-port", "29533"]],
    "srun": [[sys.executable], [sys.executable]],
    "finetune train": [],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=pytest.mark.slow if name == "torchrun" else ()) for name in LAUNCHERS]
)
def test_every_rank_has_them_before_it_loads_torch(launcher: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, least("me/it", accelerate_config="ddp", training={"deterministic": True}))
    script, seen = tmp_path / "train.py", tmp_path / "seen"
    script.write_text(AT_TORCHS_IMPORT)
    seen.mkdir()
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in (*ALLOCATOR_VARIABLES, CUBLAS_VARIABLE, COMPILE_WORKERS)
    }
    plain |= {"SEEN_IN": str(seen), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    commands = [[*words, str(script), str(recipe)] for words in LAUNCHERS[launcher]]
    if launcher == "finetune train":
        run = "import sys; from finetune.launch.local_ranks import run_ranks; run_ranks(sys.argv[1:], 2, on_cpu=True)"
        commands = [[sys.executable, "-c", run, sys.executable, str(script), str(recipe)]]
    for rank, words in enumerate(commands):
        variables = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)}
        variables |= {"SLURM_STEP_NODELIST": "here", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
        environment = plain | (variables if launcher == "srun" else {})
        subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=120)
    found = [json.loads(path.read_text()) for path in sorted(seen.iterdir())]
    assert len(found) == (1 if launcher == "python" else 2)
    for environment in found:
        assert environment.items() >= (EXPANDABLE | {CUBLAS_VARIABLE: ":4096:8"}).items()
        assert environment[COMPILE_WORKERS] == str(min(8, max(1, usable_cores() // len(found))))


@pytest.mark.parametrize(
    ("cores", "chosen", "expected"), [(4, {}, "4"), (64, {}, "8"), (4, {COMPILE_WORKERS: "1"}, "1")]
)
def test_a_rank_compiles_on_its_own_cores(cores: int, chosen: dict[str, str], expected: str) -> None:
    environment = dict(chosen)
    share_compile_workers(cores, environment)
    assert environment == {COMPILE_WORKERS: expected}


ALLOCATES_AS = "import torch; print(torch._C._accelerator_getAllocatorSettings())"  # no public way to read it


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch 2.11 does not tell")
def test_torch_reads_what_is_set() -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ALLOCATOR_VARIABLES}
    set_gpu_environment(deterministic=False, environment=environment)
    said = subprocess.run([sys.executable, "-c", ALLOCATES_AS], env=environment, capture_output=True, text=True)
    assert said.stdout.strip() == "expandable_segments:True"


@pytest.mark.parametrize("workspace", [":0:0", ":4096:2:16:8"])
def test_a_workspace_that_is_not_reproducible_is_refused(workspace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card 0")
    monkeypatch.setenv(CUBLAS_VARIABLE, workspace)
    assert list(gpu_problems(least_recipe("x"), ALONE)) == []
    deterministic = least_recipe("x", training={"deterministic": True})
    (problem,) = gpu_problems(deterministic, ALONE)
    assert re.match(rf"training.deterministic: {CUBLAS_VARIABLE}={workspace}.*; unset", problem)
    monkeypatch.setenv(CUBLAS_VARIABLE, ":16:8")
    assert list(gpu_problems(deterministic, ALONE)) == []
    monkeypatch.delenv(CUBLAS_VARIABLE)  # a start sets it, an evaluation and `doctor` do not
    assert list(gpu_problems(deterministic, ALONE)) == []
