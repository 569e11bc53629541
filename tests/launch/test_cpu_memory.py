"""What libraries keep on a CPU is bounded, and a user's own setting stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.cli.main import console
from finetune.launch.cpu_memory import bound_libraries, readable_threads
from tests.support.runs.recipes import least, write_recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7", "LRU_CACHE_CAPACITY": "8", "OMP_WAIT_POLICY": "ACTIVE"},
        {"DNNL_PRIMITIVE_CACHE_CAPACITY": "7", "GOMP_SPINCOUNT": "3"},
    ],
)
def test_what_the_user_set_stays(chosen: dict[str, str]) -> None:
    environment = dict(chosen)
    bound_libraries(environment)
    assert environment.items() >= chosen.items()
    names = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY", "OMP_WAIT_POLICY"}
    if "OMP_WAIT_POLICY" not in chosen:
        names |= {"GOMP_SPINCOUNT"}
    if "DNNL_PRIMITIVE_CACHE_CAPACITY" in chosen:  # oneDNN would read the newer name first
        names -= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    assert environment.keys() == chosen.keys() | names


AT_TORCHS_IMPORT = """
import json, os, sys
from finetune.train import main
class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(json.dumps(dict(os.environ)), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Look())
main(sys.argv[1:])
"""


def test_a_training_sets_them_before_it_loads_torch(tmp_path: Path) -> None:
    bounded: dict[str, str] = {}
    bound_libraries(bounded)
    environment = {name: value for name, value in os.environ.items() if name not in bounded}
    words = [sys.executable, "-c", AT_TORCHS_IMPORT, str(write_recipe(tmp_path, least("me/it")))]
    ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=True, text=True)
    first, variables = ended.stdout.splitlines()
    assert first.endswith("importing torch ...")
    assert json.loads(variables).items() >= bounded.items()


KEEPS = """
import sys
from finetune.launch.cpu_memory import bound_libraries, give_back_freed_memory
if sys.argv[1] == "bounded":
    bound_libraries()
import torch
import psutil
weight = torch.ones(192, 64)
def resident():
    give_back_freed_memory()
    return psutil.Process().memory_info().rss
torch.nn.functional.linear(torch.ones(8, 64, dtype=torch.bfloat16), weight.bfloat16())
before = resident()
for tokens in range(16, 1216):
    torch.nn.functional.linear(torch.ones(tokens, 64, dtype=torch.bfloat16), weight.bfloat16())
print((resident() - before) / 2**20)
"""


@pytest.mark.slow
def test_a_process_keeps_less_of_the_shapes_it_has_seen() -> None:
    """1,200 products of as many shapes, in two processes."""
    bounded: dict[str, str] = {}
    bound_libraries(bounded)
    environment = {name: value for name, value in os.environ.items() if name not in bounded}  # a training set them here
    kept = []
    for how in ("bounded", "as it comes"):
        words = [sys.executable, "-c", KEEPS, how]
        ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=True, text=True)
        kept.append(float(ended.stdout))
    assert kept[0] < 0.7 * kept[1], kept


def test_every_verb_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded: dict[str, str] = {}
    bound_libraries(bounded)
    for name in bounded:
        monkeypatch.setenv(name, "x")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["finetune", "--version"])
    with pytest.raises(SystemExit):
        console()
    assert {name: os.environ.get(name) for name in bounded} == bounded


@pytest.mark.parametrize(
    ("value", "left", "told"),
    [
        (None, None, ""),
        ("4", "4", ""),
        (" 4 ", " 4 ", ""),
        ("4,2", "4", "its first number counts, 4"),
        ("8,,1", "8", "its first number counts, 8"),
        ("500m", None, "is no number of threads and is left out"),
        ("", None, "is left out"),
        ("0", None, "is left out"),
        ("-1", None, "is left out"),
        ("1.5", None, "is left out"),
        (",4", None, "is left out"),
        ("0x2", None, "is left out"),
        ("\u0664\u00b2", None, "is left out"),  # int() reads the first of them and not the second
    ],
)
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_threads_that_no_library_reads(name: str, value: str | None, left: str | None, told: str) -> None:
    environment = {} if value is None else {name: value}
    line = readable_threads(environment)
    assert environment.get(name) == left
    assert told in line
    assert bool(line) == bool(told)
    assert left is None or int(left) > 0  # as Accelerate reads it
