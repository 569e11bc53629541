"""GPUs before Ampere (T4, V100): attention without flash attention, and no emulated bfloat16."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.architecture import attention
from finetune.errors import EnvironmentMismatch
from finetune.recipe.loader import load_recipe
from finetune.strategies import machine
from finetune.strategies.machine import gpu_problems, why_torch_sees_no_gpu
from tests.support.runs.launching import check_launch
from tests.support.runs.recipes import half_recipe
from tests.support.stand_ins.older_gpus import ALONE, seeming_gpus

LENGTHS = (5, 20, 1, 13)
FP16 = {"mixed_precision": "fp16"}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    return seeming_gpus(monkeypatch)


@pytest.mark.parametrize(
    ("changes", "remedies"),
    [
        ({}, ["training.mixed_precision=fp16", "model.dtype=float16"]),
        ({"lora": None}, ["training.mixed_precision=fp16"]),
        ({"training": FP16}, ["model.dtype=float16"]),
        (
            {"model": {"name_or_path": "x", "dtype": "bfloat16"}, "training": {"mixed_precision": "no"}},
            ["model.dtype=float32"],
        ),
        (
            {"lora": None, "training": {"pure_bf16": True}},
            ["training.mixed_precision=fp16", "training.pure_bf16=false"],
        ),
        (
            {"quantization": FOUR_BITS},
            ["training.mixed_precision=fp16", "model.dtype=float16", "quantization.bnb_4bit_compute_dtype=float16"],
        ),
        (
            {
                "quantization": FOUR_BITS,
                "model": {"name_or_path": "x", "dtype": "float16"},
                "training": {"mixed_precision": "no"},
            },
            ["quantization.bnb_4bit_compute_dtype=float32"],
        ),
    ],
)
def test_bfloat16_is_refused_where_it_would_be_emulated(
    changes: dict[str, Any], remedies: list[str], gpus: list[tuple[int, int]]
) -> None:
    gpus.append((7, 5))
    with pytest.raises(EnvironmentMismatch) as caught:
        check_launch(half_recipe(**changes), ALONE)
    text = str(caught.value)
    assert caught.value.exit_code == 4
    assert "Card 0" in text
    assert "7.5" in text
    assert text.partition("; set ")[2].split() == remedies
    assert "\n" not in text
    gpus[0] = (8, 0)
    assert check_launch(half_recipe(**changes), ALONE).kind == "single"


def test_the_gpus_of_this_machines_ranks_are_asked(gpus: list[tuple[int, int]]) -> None:
    """Every rank of a machine refuses what one of its GPUs cannot do, so that rank 0 says it; others do not count."""
    gpus += [(8, 0), (7, 5)]
    two = replace(ALONE, world_size=2, local_world_size=2)
    for rank in (0, 1):
        with pytest.raises(EnvironmentMismatch, match=r"Card 1.*7\.5"):
            check_launch(half_recipe(accelerate_config="ddp"), replace(two, rank=rank, local_rank=rank))
    assert check_launch(half_recipe(), ALONE).kind == "single"  # on the first alone
    gpus[:] = [(8, 0)]  # each rank sees its own, as under srun
    assert check_launch(half_recipe(accelerate_config="ddp"), replace(two, rank=1, local_rank=1)).kind == "ddp"


def test_a_cpu_is_not_asked_for_its_compute_capability(gpus: list[tuple[int, int]]) -> None:
    gpus.append((7, 5))
    assert check_launch(half_recipe(), replace(ALONE, on_cpu=True)).kind == "single"


@pytest.mark.parametrize("name", ["llama3_3b_lora_1x16gb", "llama3_8b_qlora_1x16gb"])
def test_the_recipes_for_a_t4_are_let_through(name: str, gpus: list[tuple[int, int]]) -> None:
    gpus.append((7, 5))
    assert list(gpu_problems(load_recipe(f"recipes/{name}.yaml").recipe, ALONE)) == []


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 6), (9, 0)])
def test_gpus_without_flash_attention_take_a_document_at_a_time(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without data take the place of those on a GPU: shapes and devices are theirs."""
    flash: list[torch.device] = []
    calls: list[tuple[torch.Size, torch.Size, bool]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def on_cuda(query: Tensor, *_: object) -> Tensor:
        flash.append(query.device)
        return query.transpose(1, 2)

    def sdpa(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        calls.append((query.shape, key.shape, options["is_causal"]))
        return real(query, key, value, **options)

    monkeypatch.setattr(attention, "attend_on_cuda", on_cuda)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    attention.has_flash.cache_clear()
    with FakeTensorMode():
        query, key = (torch.empty(1, heads, sum(LENGTHS), 8, dtype=torch.float16, device="cuda:0") for heads in (4, 2))
        starts = torch.empty(len(LENGTHS) + 1, dtype=torch.int32, device="cuda:0")
        output, _ = attention.varlen_attention(
            torch.nn.Module(), query, key, key, None, cu_seq_lens=starts, document_lengths=LENGTHS
        )
    attention.has_flash.cache_clear()
    assert output.shape == (1, sum(LENGTHS), 4, 8)
    if capability >= (8, 0):
        assert len(flash) == 1
        assert not calls
    else:  # all heads, since groups may lead to plain matrix products
        assert not flash
        assert calls == [((1, 4, length, 8), (1, 4, length, 8), True) for length in LENGTHS]


@pytest.mark.parametrize(
    ("words", "seen", "ranks", "nodes", "remedy"),
    [
        (("torchrun",), 2, 4, 1, "--nproc_per_node 2,"),
        (("python", "-m", "torch.distributed.run"), 1, 2, 1, "--nproc_per_node 1 and accelerate_config=single,"),
        (("accelerate", "launch"), 3, 4, 1, "--num_processes 3,"),
        (("accelerate", "launch"), 1, 2, 2, "--num_processes 2,"),
        (("accelerate", "launch"), 1, 8, 1, "--num_processes 1 and accelerate_config=single,"),
    ],
)
def test_more_ranks_than_gpus_are_refused_where_all_see_the_same(
    words: tuple[str, ...], seen: int, ranks: int, nodes: int, remedy: str, gpus: list[tuple[int, int]]
) -> None:
    gpus[:] = [(8, 0)] * seen
    recipe = half_recipe(accelerate_config="ddp")
    launch = replace(
        ALONE, words=words, nodes=nodes, world_size=ranks * nodes, local_world_size=ranks, shares_gpus=True
    )
    for rank in range(ranks):
        with pytest.raises(EnvironmentMismatch) as caught:
            check_launch(recipe, replace(launch, rank=rank, local_rank=rank))
        text = str(caught.value)
        assert text.startswith(f"launch: {ranks} ranks were started on this machine, and it shows them {seen} GPU")
        assert f"Launch with {remedy}" in text
        assert "\n" not in text
    fewer = replace(launch, world_size=seen * nodes, local_world_size=seen, rank=0)
    if seen * nodes > 1:  # the remedy
        assert check_launch(recipe, fewer).kind == "ddp"
    else:
        assert check_launch(half_recipe(accelerate_config="single"), fewer).kind == "single"
    # srun --gpus-per-task=1, or two sockets with half of the GPUs each: not known to be the same.
    assert check_launch(recipe, replace(launch, words=("srun", "python"), shares_gpus=False)).kind == "ddp"


@pytest.mark.parametrize(
    ("kernels", "capability", "refused"),
    [
        (["sm_75", "sm_80", "sm_90"], (7, 0), True),
        (["sm_75", "sm_80", "sm_90"], (6, 0), True),
        (["sm_75", "sm_80", "compute_120"], (12, 0), False),
        (["sm_75", "sm_80"], (8, 6), False),
        ([], (7, 0), False),
        (["gfx90a", "gfx942"], (9, 4), False),  # AMD's
    ],
)
def test_a_card_without_kernels_is_one_line(
    kernels: list[str], capability: tuple[int, int], refused: bool, gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """V100 and P100 under wheels for CUDA 13: else "no kernel image is available", in the first kernel."""
    gpus.append(capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: kernels)
    recipe = half_recipe(training={"mixed_precision": "fp16"}, model={"name_or_path": "x", "dtype": "float16"})
    problems = list(gpu_problems(recipe, ALONE))
    assert len(problems) == refused
    assert all(re.search(r"kernels for sm_75.* none for Card 0; install a wheel", problem) for problem in problems)


def test_a_driver_that_torch_is_too_new_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_torch_sees_no_gpu(tmp_path / "none") == ""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01\nGCC version: 12\n")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "built for CUDA 13.0, sees no GPU behind this driver: NVRM" in why_torch_sees_no_gpu(tmp_path / "version")
    assert "535.183.01; for an older driver or card: pip install" in why_torch_sees_no_gpu(tmp_path / "version")
    with monkeypatch.context() as hidden:  # a healthy GPU, hidden by the user
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        line = why_torch_sees_no_gpu(tmp_path / "version")
    assert "built for CUDA 13.0, with CUDA_VISIBLE_DEVICES='', sees no GPU" in line
    assert "535.183.01; unset that variable, or for an older driver or card: pip install" in line
    monkeypatch.setattr(machine.why_torch_sees_no_gpu, "__defaults__", (tmp_path / "version",))
    with pytest.raises(EnvironmentMismatch, match=r"^budget: torch .* sees no GPU behind this driver.*budget.gpus=0$"):
        check_launch(half_recipe(budget={"gpus": 1}), ALONE)
