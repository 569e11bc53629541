"""Every shipped recipe, made small, on a GPU that is the host: probe, worst step, steps, saving, a stop, a resume.

Recipes that are alike in what CUDA decides make a group, of which one is played
(tests/support/stand_ins/recipes_on_gpu.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from finetune.model.dtypes import COMPUTE, dtype_name
from finetune.recipe.loader import load_recipe
from finetune.recipe.mixed_precision import fastest_for
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.strategy import read_strategy
from tests.support.runs.cells import free_ports
from tests.support.runs.launching import REPOSITORY, TORCHRUN
from tests.support.runs.recipe_results import recipes
from tests.support.runs.soak_resume import fingerprint
from tests.support.stand_ins.recipes_on_gpu import LACKING, Job, group_of, make_small, play, write_job

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("llama3_3b_lora_1x16gb", "llama3_8b_full_1x80gb", "llama3_8b_full_fsdp2_offload_1x24gb")
ALONE = """
    gemma3_12b_qlora_1x24gb gpt_oss_20b_lora_reasoning_1x80gb gpt_oss_20b_qlora_reasoning_1x24gb llama3_1b_lora_1x8gb
    llama3_70b_int8_1x141gb llama3_70b_qlora_1x80gb llama3_8b_lora_1x24gb llama3_8b_lora_1x80gb llama3_8b_qlora_1x16gb
    llama3_qlora mistral_7b_lora_1x24gb phi4_qlora_math_1x24gb qwen3.5_4b_lora_reasoning_1x24gb
    qwen3.5_35b_a3b_qlora_reasoning_1x32gb qwen3_30b_a3b_lora_code_1x80gb qwen3_30b_a3b_qlora_code_1x24gb
    qwen3_4b_lora_tools_1x24gb qwen3_8b_lora_sql_1x24gb qwen3_8b_qlora_chat_1x24gb qwen3_8b_qlora_reasoning_1x24gb
    smollm2_1.7b_full_text_1x48gb smollm2_135m_full_cpu
""".split()
TOGETHER = """
    llama3_3b_full_zero2_offload_2x24gb llama3_70b_full_fsdp2_2x8x80gb llama3_70b_lora_hsdp_2x8x80gb
    llama3_70b_qlora_fsdp2_4x24gb llama3_70b_qlora_zero3_4x48gb llama3_8b_full_fsdp2_grad_op_8x80gb
    llama3_8b_qlora_1f1b_2x12gb llama3_8b_qlora_2x24gb qwen3_30b_a3b_qlora_code_fsdp2_2x24gb
    llama3_ddp llama3_fsdp llama3_full llama3_zero2 llama3_zero3 llama3_zero3_nvme
    llama3_zero3_offload smollm3_3b_full_apo_fsdp2_2x80gb
""".split()
PLAYED = (*QUICK, *ALONE, *TOGETHER)


def test_every_recipe_is_of_a_group_that_is_played() -> None:
    on_a_gpu = fastest_for(1)  # a recipe for CPUs leaves its formats to the device
    groups = {name: group_of(load_recipe(path).formats_for(on_a_gpu)[0].recipe) for name, path in recipes().items()}
    played = {groups[name]: name for name in PLAYED}
    assert len(played) == len(PLAYED), "two of one group"
    assert sorted(name for name, group in groups.items() if group not in played) == []


def test_what_the_host_lacks_is_what_recipes_ask_for() -> None:
    asked = {load_recipe(path).recipe.training.optim for path in recipes().values()}
    assert set(LACKING) == {("training.optim", name) for name in asked if OPTIMIZERS[name].paged}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLAYED]
)
def test_a_recipe_on_a_gpu(name: str, tmp_path: Path) -> None:
    job, recipe = make_small(name, tmp_path), load_recipe(recipes()[name]).recipe
    assert (job.ranks > 1) == (name in TOGETHER)
    assert (play(job) if job.ranks == 1 else played_by_ranks(job)) == [0, 130, 0]
    assert fingerprint(job.stopped) == fingerprint(job.whole)
    found: dict[str, Any] = json.loads((job.stopped / "receipt.json").read_text("utf-8"))
    strategy, half = read_strategy(recipe.accelerate_config), dtype_name(COMPUTE[recipe.training.mixed_precision])
    assert (found["device"], found["pinned_memory"], found["deterministic"]) == ("cuda", True, False)
    assert (found["strategy"], found["world_size"]) == (strategy.name, job.ranks)
    assert (found["probe"]["device"], found["probe"]["precision"]) == ("cuda", half)
    assert (found["attention"] == "sdpa") == (recipe.model.attention == "sdpa")
    assert bool(found["quantized_layers"]) == (recipe.quantization is not None)
    assert (found["checkpointed_layers"] > 0) == bool(recipe.training.activation_checkpointing)
    masters = "bfloat16" if recipe.training.pure_bf16 else "float32"
    assert ("optimizer_update" in found) == recipe.training.pure_bf16
    assert found.get("optimizer_update", {}).get("fused", True), found["optimizer_update"]["left_off"]
    formats = OPTIMIZERS[recipe.training.optim].state_dtypes(masters)
    assert set(found["dtypes"]["optimizer_state"].split(", ")) <= set(formats)


def played_by_ranks(job: Job) -> list[int]:
    words = [*TORCHRUN, "--nproc_per_node", str(job.ranks), "--master_port", str(free_ports(1)[0])]
    file = write_job(job)
    done = subprocess.run(
        [*words, "tests/support/stand_ins/recipes_on_gpu.py", str(file)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    codes: list[int] = json.loads(file.with_suffix(".codes").read_text())
    return codes
