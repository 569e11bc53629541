"""Kernels that sum in the same order at each call, while a run on a GPU trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from finetune.errors import EnvironmentMismatch

_REFUSED = "does not have a deterministic implementation"  # torch 2.11 to 2.13: Context::alertNotDeterministic


@contextmanager
def deterministic_algorithms(deterministic: bool, device: torch.device) -> Iterator[None]:
    """Within the block, torch uses deterministic kernels only, if `deterministic` and on CUDA; then torch is as before.

    CPU kernels are deterministic anyway. With `warn_only` torch would only warn about a missing kernel, but then flash
    attention's backward is not deterministic either. So it is an error.

    Raises:
        EnvironmentMismatch: torch has no deterministic kernel for an operation in this model.
    """
    if not deterministic or device.type != "cuda":
        yield
        return
    were_enabled = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # torch's types leave out its one setting
    filled_memory = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # else each torch.empty is filled with NaN, for nothing
    try:
        yield
    except RuntimeError as error:
        if _REFUSED not in str(error):
            raise
        operation = str(error).partition(_REFUSED)[0].strip().rpartition("\n")[2]
        raise EnvironmentMismatch(
            f"training.deterministic: torch {torch.__version__} has no deterministic kernel for {operation}, which "
            "this model runs on a GPU; set training.deterministic=false: a resumed run then begins with the same bits, "
            "and its kernels sum in any order"
        ) from error
    finally:
        torch.use_deterministic_algorithms(were_enabled, warn_only=only_warned)
        memory.fill_uninitialized_memory = filled_memory
