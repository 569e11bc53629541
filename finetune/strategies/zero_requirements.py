"""DeepSpeed's needs from the machine and the recipe: one line for what is missing, before anything is loaded."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.metadata import version
from pathlib import Path

import torch
from filelock import FileLock

from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy

OLD_LOCK = 20.0  # seconds; who finds it all compiled holds torch's lock for milliseconds


def zero_environment(recipe: Recipe, *, on_cpu: bool) -> None:
    """Set the environment variables that DeepSpeed and Accelerate read, before either starts a process group."""
    # The config in force is built here. Accelerate refuses a whole config together with single fields of its own file.
    os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # torch 2.13 renames collectives; DeepSpeed 0.19 and torch 2.11 know the old names.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.pop("ACCELERATE_USE_CPU", None)  # with it, Accelerate silently ignores a DeepSpeed plugin
    if not on_cpu or recipe.training.mixed_precision != "fp16":
        return
    # torch computes fp16 on a CPU, and DeepSpeed 0.19 refuses it: its accelerator says that a CPU has no fp16 unless
    # oneDNN has own kernels for it. `set_accelerator` takes another one. Ours is its own, with one other answer.
    with silenced_deepspeed():
        from deepspeed.accelerator import set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class WithHalves(CPU_Accelerator):  # type: ignore[misc]  # DeepSpeed is not typed
        """The CPU, with torch's fp16."""

        def is_fp16_supported(self) -> bool:
            return True

    set_accelerator(WithHalves())


def engine_problems(strategy: Strategy, *, on_cpu: bool) -> Iterator[str]:
    """Each reason, with its remedy, why this machine runs the engine differently, or not at all."""
    place = f"accelerate_config: {strategy.name}"
    # pip installs ninja next to python, which is not on the PATH of an environment that is not activated.
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    if on_cpu and torch.cuda.is_available():
        yield f"{place}: on a machine with GPUs DeepSpeed takes them; hide them with CUDA_VISIBLE_DEVICES="
    if "nvme" not in strategy.offload_devices.values():
        return  # CPU offload runs torch's own fused AdamW, which needs no compiler
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        install = "install it with: apt-get install g++ ninja-build"
        yield f"{place}: DeepSpeed compiles its NVMe access with g++ and ninja; {install}"
        return
    program = "#include <libaio.h>\nint main() { io_context_t c = 0; return io_setup(1, &c); }"
    command = ["g++", "-x", "c++", "-", "-o", os.devnull, "-laio"]
    if subprocess.run(command, input=program, text=True, capture_output=True, check=False).returncode != 0:
        yield f"{place}: NVMe offload needs libaio and its header; install it with: apt-get install libaio-dev"


def compile_engine(strategy: Strategy, *, on_cpu: bool) -> None:
    """Compile, before anything is loaded, the code that DeepSpeed would compile later within its process group.

    `engine_problems` comes first: it makes ninja known, and refuses a machine without the compilers.
    """
    if "nvme" in strategy.offload_devices.values():
        compile_ahead("AsyncIOBuilder", ("async_io", "pin_memory"), on_cpu)  # the second is built first
    if on_cpu and shutil.which("g++") and shutil.which("ninja"):  # else the engine says what it misses
        compile_ahead("ShareMemCommBuilder", ("deepspeed_shm_comm",), on_cpu)


def compile_ahead(builder: str, folders: Sequence[str], on_cpu: bool) -> None:
    """Compile now what the engine would compile within its process group: two minutes on a slow machine, once.

    One process at a time. torch's own lock is a file. A killed compiler leaves it behind, and every later run would
    wait for it. Under our lock no other process compiles for long, so a lock older than OLD_LOCK has no owner.
    """
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    root = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(own_builds())))
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "finetune.lock"), silenced_deepspeed():
        for lock in [lock for folder in folders for lock in root.glob(f"**/{folder}/lock")]:
            with suppress(FileNotFoundError):  # its owner has removed it
                while time.time() - lock.stat().st_mtime < OLD_LOCK:
                    time.sleep(0.1)
                lock.unlink()
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        op_builder = get_accelerator().create_op_builder(builder)
        # As DeepSpeed asks: without a compiler it does without.
        if op_builder is not None and deepspeed.ops.__compatible_ops__.get(op_builder.NAME, False):
            op_builder.load(verbose=False)


def own_builds() -> Path:
    """A folder for this environment's compiled code. In a shared folder, two environments would recompile in turns."""
    from torch.utils.cpp_extension import get_default_build_root

    environment = f"{sys.prefix} {torch.__version__} {version('deepspeed')}"
    return Path(get_default_build_root()) / f"finetune-{hashlib.sha256(environment.encode()).hexdigest()[:12]}"


@contextmanager
def silenced_deepspeed() -> Iterator[None]:
    """Hide DeepSpeed's prints about compiling and loading on every rank. A user needs none of them."""
    with redirect_stdout(io.StringIO()):
        yield
