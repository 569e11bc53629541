"""A recipe's needs from its GPUs: number formats that they compute natively, and a path between them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate.utils import check_cuda_p2p_ib_support

from finetune.architecture.attention import AMPERE
from finetune.errors import EnvironmentMismatch
from finetune.launch.gpu_environment import CUBLAS_VARIABLE, REPRODUCIBLE_WORKSPACES, gpu_of_rank
from finetune.launch.launcher import Launch
from finetune.output_stream import one_line
from finetune.recipe.schema import Recipe
from finetune.wording import counted

DRIVER = Path("/proc/driver/nvidia/version")
OLDER_WHEELS = "for an older driver or card: pip install torch --index-url https://download.pytorch.org/whl/cu126"
ADA = (8, 9)  # the first compute capability with products in float8


def check_gpus(recipe: Recipe, launch: Launch) -> None:
    """Refuse, before anything is loaded, bfloat16 on a GPU that would emulate it, many times slower, and float8 on one
    that has no products in it.

    It looks at all ranks' GPUs on this machine, so that each rank reaches the same result. torch and Accelerate both
    count emulation as support. It also refuses a deterministic training if cuBLAS's workspace is not deterministic.
    Raises EnvironmentMismatch with the settings to write.
    """
    workspace = os.environ.get(CUBLAS_VARIABLE)  # the start has set it where the user has not
    if recipe.training.deterministic and workspace not in REPRODUCIBLE_WORKSPACES:  # torch would refuse each product
        raise EnvironmentMismatch(
            f"training.deterministic: {CUBLAS_VARIABLE}={workspace} is not one of its reproducible settings; unset "
            f"it, or export {CUBLAS_VARIABLE}={REPRODUCIBLE_WORKSPACES[0]}"
        )
    _check_gpu_for_each(launch)
    own_gpus = sorted({gpu_of_rank(rank) for rank in (*range(launch.local_world_size), launch.local_rank)})
    for index in own_gpus:
        if kernels := kernels_of_others(index):
            raise EnvironmentMismatch(
                f"launch: this torch has kernels for {kernels}, and none for "
                f"{torch.cuda.get_device_name(f'cuda:{index}')}; install a wheel that has some: {OLDER_WHEELS}"
            )
    capability, index = min((torch.cuda.get_device_capability(f"cuda:{index}"), index) for index in own_gpus)
    if recipe.model.load_in_fp8 and capability < ADA:
        raise EnvironmentMismatch(
            f"model.load_in_fp8: float8 begins with compute capability 8.9 (Ada, Hopper), "
            f"{torch.cuda.get_device_name(f'cuda:{index}')} has {capability[0]}.{capability[1]}; set it to false"
        )
    remedies = list(_without_bfloat16(recipe))
    if capability >= AMPERE or not remedies:
        return
    key = remedies[0].partition("=")[0]
    raise EnvironmentMismatch(
        f"{key}: bfloat16 begins with compute capability 8.0 (Ampere), {torch.cuda.get_device_name(f'cuda:{index}')} "
        f"has {capability[0]}.{capability[1]} and would emulate it; set {' '.join(remedies)}"
    )


def kernels_of_others(index: int) -> str:
    """The kernels that torch has, if none runs on this GPU; else empty.

    sm_75 runs on capabilities 7.5 to 7.9, so not on a V100 (7.0). compute_90 is compiled there, for 9.0 and later.
    """
    capability = torch.cuda.get_device_capability(f"cuda:{index}")
    kernels = [name for name in torch.cuda.get_arch_list() if name.startswith(("sm_", "compute_"))]  # not AMD's
    for kind, number in re.findall(r"(sm|compute)_(\d+)", " ".join(kernels)):
        needed = divmod(int(number), 10)
        if needed <= capability and (kind == "compute" or needed[0] == capability[0]):
            return ""
    return ", ".join(kernels)


def why_torch_sees_no_gpu(driver: Path = DRIVER) -> str:
    """A clause for machines with an NVIDIA driver that torch cannot use; empty where there is no driver."""
    if not driver.is_file():
        return ""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    installed = one_line(driver.read_text("utf-8", "replace").partition("\n")[0], 120)
    return f"torch {torch.__version__}, {built}, sees no GPU behind this driver: {installed}; {OLDER_WHEELS}"


def _check_gpu_for_each(launch: Launch) -> None:
    """Refuses two ranks on one GPU. NCCL ends them too, with "Duplicate GPU detected", but long after the start.

    Only a launcher that shows its ranks the same GPUs is refused. Under srun each rank may see its own GPU, always as
    number 0, and before the ranks can communicate nothing tells these GPUs apart.
    """
    gpus, ranks = torch.cuda.device_count(), launch.local_world_size
    if not launch.shares_gpus or ranks <= gpus:
        return
    if launch.by_torchrun:
        fewer = f"--nproc_per_node {gpus}"
    elif launch.by_accelerate:
        fewer = f"--num_processes {gpus * launch.nodes}"
    else:
        fewer = f"budget.gpus={gpus}"
    alone = " and accelerate_config=single" if gpus * launch.nodes == 1 else ""
    raise EnvironmentMismatch(
        f"launch: {ranks} ranks were started on this machine, and it shows them {counted(gpus, 'GPU')}; each rank "
        f"needs one of its own. Launch with {fewer}{alone}, or list more in CUDA_VISIBLE_DEVICES"
    )


def go_around_peers(launch: Launch) -> None:
    """Where GPUs cannot reach each other's memory, tell NCCL before it asks: RTX 40 cards under an old driver.

    `accelerate launch` sets these for its ranks; under torchrun, srun and `finetune train` Accelerate would raise an
    error that names them.
    """
    missing = [name for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in os.environ]
    if not missing or check_cuda_p2p_ib_support():
        return
    os.environ.update(dict.fromkeys(missing, "1"))
    if launch.is_main:
        print(
            f"these GPUs' driver gives them no way to each other's memory: {'=1 and '.join(missing)}=1 set, so copies "
            "between them pass through the host; a driver from 550.40.07 on is faster",
            file=sys.stderr,
        )


def _without_bfloat16(recipe: Recipe) -> Iterator[str]:
    """The replacement for each setting that computes in bfloat16."""
    training, quantization = recipe.training, recipe.quantization
    other = "float32" if training.mixed_precision == "no" else "float16"
    if training.mixed_precision == "bf16":
        yield "training.mixed_precision=fp16"
    if training.pure_bf16:
        yield "training.pure_bf16=false"
    if recipe.lora is not None and recipe.model.dtype == "bfloat16":  # else weights are trained in float32
        yield f"model.dtype={other}"
    if quantization is not None and quantization.load_in_4bit and quantization.bnb_4bit_compute_dtype == "bfloat16":
        yield f"quantization.bnb_4bit_compute_dtype={other}"
