"""405B on 512 ranks is planned in seconds: what takes a time for each rank is not done for each rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_common

from finetune.planner.trace.fake_model import first_chunk
from finetune.strategies import fsdp

ROOT = Path(__file__).resolve().parents[2]
CPU_SECONDS, GIB = 20, 1.0  # 14 s on two shared cores; without the shortcuts 37 s and more
RECIPE = """
accelerate_config: fsdp2
model: {name_or_path: meta-llama/Llama-3.1-405B}
lora: null
data: {train: [{path: json, data_files: unused.jsonl}], max_length: 4096}
training: {global_batch_size: 512, pure_bf16: true}
"""
MEASURED = """
import json, re, resource, sys
from pathlib import Path
from finetune.cli.main import main
code = main(["plan", sys.argv[1], "--gpus", "H100:8", "--nodes", "64", "--json"])
used = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss, which begins with what the process had that started this one.
kib = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps({"code": code, "cpu_seconds": used.ru_utime + used.ru_stime, "gib": kib / 2**20}))
"""


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 9])
def test_parts_of_a_tensor(rows: int) -> None:
    """What rank 0 sends: as torch.chunk cuts it, each padded to the first one's size."""
    whole = torch.arange(2.0 * rows).reshape(rows, 2)
    size = -(-rows // 4)
    parts = fsdp.shard_parts(whole, size, 4)
    assert [part.shape for part in parts] == [(size, 2)] * 4
    assert torch.equal(torch.cat(parts)[:rows], whole)
    assert not torch.cat(parts)[rows:].any()


@pytest.mark.parametrize("shape", [(8, 2), (3, 2), (5,)])
def test_the_first_chunk_is_that_of_torch(shape: tuple[int, ...]) -> None:
    """FSDP2 looks at its own rank's part and at the first; on rank 0 both are the first."""
    whole = torch.zeros(shape)
    for chunks in (1, 2, 4, 512):
        theirs = _fsdp_common._chunk_with_empty(whole, chunks, dim=0)
        ours = first_chunk(whole, chunks, 0)
        assert ours[0].shape == theirs[0].shape


@pytest.mark.slow
def test_405b_on_512_ranks(tmp_path: Path) -> None:
    recipe = tmp_path / "huge.yaml"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, str(recipe)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    plan, measured = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert (plan["ranks"], plan["strategy"]) == (512, "fsdp2")
    # 405,853,388,800 weights of two bytes, cut in 512; embeddings and layers divide evenly.
    assert plan["phases"]["step"]["parts"]["parameters"] == pytest.approx(2 * 405_853_388_800 / 512, rel=1e-4)
    assert measured["gib"] < GIB
    assert measured["cpu_seconds"] < CPU_SECONDS
