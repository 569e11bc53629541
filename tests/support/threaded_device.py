"""A device made in Python, for which autograd starts a thread as it does for a GPU. Its tensors lie in host memory.

    python -m tests.support.threaded_device            every case of compiled attention by document, on that device
    python -m tests.support.threaded_device --unmended the same with the inner backward as autograd would queue it
    python -m tests.support.threaded_device --trial    a trial that never ends, inside a run's watchdog

On a CPU the calling thread computes all gradients, so no test there can see two backwards wait for each other.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from finetune.architecture import attention

LENGTHS = (3, 5, 1, 7)
HUNG_AFTER = 60.0  # seconds, on a busy machine too
LIBRARY = torch.library.Library("aten", "IMPL")


class OnDevice(Tensor):
    """A tensor of the device, around one of the CPU's."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device="threaded:0"
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "finetune":  # the operator's own function, as the dispatcher runs it on the device
            with torch._C._AutoDispatchBelowAutograd():
                return OPDEFS[func.name().split(".")[0]]._init_fn(*args)
        if func._opname == "_fused_sdp_choice":
            return 0  # by matrix products: the device has no kernel of its own
        kwargs = {name: "cpu" if name == "device" else value for name, value in (kwargs or {}).items()}
        found = func(*tree_map(_inside, args), **tree_map(_inside, kwargs))
        return tree_map(lambda each: OnDevice(each) if isinstance(each, Tensor) else each, found)


def _inside(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value


def set_up() -> None:
    """Make the device known to torch; once a process."""

    class Module(_DummyBackendModule):  # type: ignore[misc]  # torch has no types for it
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float32, torch.bfloat16]

    _setup_privateuseone_for_python_backend("threaded", backend_module=Module())

    def empty(*sizes: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return OnDevice(torch.empty(*sizes, dtype=dtype))

    LIBRARY.impl("empty.memory_format", empty, "PrivateUse1")


# heads, heads of keys, their width, number format, arguments of attention, and whether the flash kernel is left off
CASES: dict[str, tuple[int, int, int, torch.dtype, dict[str, Any], bool]] = {
    "Gemma 2: soft cap": (4, 2, 16, torch.bfloat16, {"softcap": 50.0}, False),
    "Gemma 2: soft cap in a window": (4, 2, 16, torch.bfloat16, {"softcap": 50.0, "sliding_window": 4}, False),
    "Gemma 4: heads of 512": (4, 1, 512, torch.bfloat16, {}, False),
    "float32": (4, 2, 16, torch.float32, {}, False),
    "float32 with sinks": (4, 2, 16, torch.float32, {"s_aux": True}, False),
    "flash kernel left off": (4, 4, 16, torch.bfloat16, {}, True),
}


def gradients(case: str, device: bool) -> list[Tensor]:
    """Output and gradients of attention inside a compiled layer, on the CPU."""
    heads, key_heads, width, dtype, options, left_off = CASES[case]
    generator = torch.Generator().manual_seed(0)
    tokens, ends = sum(LENGTHS), torch.tensor([0, *LENGTHS]).cumsum(0)
    shapes = [
        (1, heads, tokens, width),
        *[(1, key_heads, tokens, width)] * 2,
        *([(heads,)] if "s_aux" in options else []),
    ]
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    leaves = [(OnDevice(each) if device else each.float()).requires_grad_() for each in drawn]
    given = {**options, **({"s_aux": leaves[3]} if "s_aux" in options else {})}
    layout: dict[str, Any] = {"document_lengths": LENGTHS}
    if device:
        layout = {"longest_document": 8, "document_ends": ends}
    with attention.kernel_left_off() if left_off else nullcontext():
        output, _ = attention.varlen_attention(
            nn.Module(), *leaves[:3], None, cu_seq_lens=ends.int(), scaling=width**-0.5, **given, **layout
        )
        output.float().square().sum().backward()
    return [_inside(each).float() for each in (output.detach(), *(leaf.grad for leaf in leaves))]


def compare_all() -> None:
    for case in CASES:
        for found, expected in zip(gradients(case, True), gradients(case, False), strict=True):
            allowed = 1e-5 if "float32" in case else 3e-2
            assert float((found - expected).norm()) <= allowed * float(expected.norm()), case
        print("right:", case, flush=True)


def endless_trial(run_dir: Path) -> None:
    """A kind of layer whose compiler never returns, in a run of one process."""
    from finetune import trial_limit
    from finetune.architecture.compiled.layers import CompiledLayers
    from finetune.training.watchdog import Progress, watchdog

    class Layer(nn.Module):
        finetune_kind, finetune_trained, gradient_checkpointing = "only", False, False

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * 2

    trial_limit.TRIAL_SECONDS = 0.3
    compiled = CompiledLayers(required=False, say=print, backend=lambda graph, inputs: time.sleep(1e6))
    recipe: Any = SimpleNamespace(run_dir=run_dir)
    launch: Any = SimpleNamespace(world_size=1, rank=0, is_main=True)
    with watchdog(recipe, launch, Progress(phase="worst step first")):
        compiled.run(Layer(), torch.ones(2, 3, requires_grad=True), (torch.ones(2, 3, requires_grad=True),), {})


if __name__ == "__main__":
    faulthandler.dump_traceback_later(HUNG_AFTER if len(sys.argv) == 1 else 60, exit=True)
    if "--trial" in sys.argv:
        endless_trial(Path(sys.argv[-1]))
        sys.exit(0)
    set_up()
    if "--unmended" in sys.argv:
        faulthandler.dump_traceback_later(3, exit=True)
        torch.autograd.set_multithreading_enabled = lambda mode: nullcontext()  # type: ignore[assignment,misc]
    compare_all()
    # The device's autograd thread never ends. On a busy machine the interpreter has waited for it at its exit.
    sys.stdout.flush()
    os._exit(0)
