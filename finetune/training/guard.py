"""The guard before the worst step: each part chosen for speed matches the library's module, or all ranks leave it off.

The guard runs one forward of a few tokens from the longest rows, without gradients. In it architecture/guard.py and
compiled layers compare each kind of module. The optimizer's state is not allocated yet, and the guard holds one layer's
activations and gradients at a time. So its peak stays below a step's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn

from finetune.architecture.compiled.layers import CompiledLayers
from finetune.architecture.flash_kernels import FlashKernel
from finetune.architecture.guard import ATTENTION, COMPARED_TOKENS, Guard
from finetune.architecture.own_layers.compute import ADAPTERS, GATES, NORMS, leave_to_library
from finetune.model.build import decoder_parts
from finetune.tokens.batches import prefetch
from finetune.tokens.mixture import Rows
from finetune.training.run import Run
from finetune.training.worst_step import longest_rows

INSTEAD = {
    ADAPTERS: "peft computes all adapters",
    NORMS: "transformers computes all norms",
    GATES: "transformers computes all gates",
    ATTENTION: "attention runs document by document",
}


def compare_fast_paths(run: Run, unwrapped: nn.Module, compiled: CompiledLayers, kernel: FlashKernel) -> Guard:
    """Compare until no further path is left off. Every rank calls this, and all ranks end with the same paths.

    Raises EnvironmentMismatch if the recipe asks for compiled layers and they differ.
    """
    left_off: dict[str, str] = {}
    while True:
        guard = Guard()
        with kernel.active():
            _forward(run, unwrapped, guard, compiled)
        compiled.agree(partial(run.parts.accelerator.reduce, reduction="sum"), run.parts.accelerator.device)
        found = _agreed(run, guard)
        if not found:
            guard.left_off = left_off
            return guard
        for path, reason in found.items():
            run.output.terminal.log(f"guard: {INSTEAD[path]} from here on, because the faster way differs: {reason}")
            if path == ATTENTION:
                kernel.leave_off(reason)
            else:
                leave_to_library(unwrapped, path)
        left_off |= found
        compiled.forget()  # its graphs contain the path that was left off


def _forward(run: Run, unwrapped: nn.Module, guard: Guard, compiled: CompiledLayers) -> None:
    """One forward that compares every kind of module."""
    decoder, device = decoder_parts(unwrapped), run.parts.accelerator.device
    rows = FirstTokens(run.train_rows, COMPARED_TOKENS // run.plan.per_device_batch_size, split=run.plan.flat)
    batches = run.plan.micro_batches(rows, longest_rows(run.train_rows, run.plan))
    trained_embeddings = any(each.requires_grad for each in decoder.get_input_embeddings().parameters())

    with (
        run.parts.phases("guard"),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.no_grad(),
        guard.watching(unwrapped) as end,
        compiled.comparing(trained_embeddings, before=end),
        run.parts.weights.cast(),
    ):
        for batch in prefetch(batches[:1], device, non_blocking=False):
            run.parts.model(**batch)


def _agreed(run: Run, guard: Guard) -> dict[str, str]:
    """The paths that any rank has to leave off, with reasons; equal on all ranks."""
    paths = list(INSTEAD)
    flags = torch.tensor(
        [path in guard.left_off for path in paths], dtype=torch.int32, device=run.parts.accelerator.device
    )
    if not run.parts.accelerator.reduce(flags, reduction="sum").any():
        return {}
    rank, ranks = run.parts.accelerator.process_index, run.parts.accelerator.num_processes
    on_rank = f" on rank {rank}" if ranks > 1 else ""
    found: list[dict[str, str]] = gather_object([{path: why + on_rank for path, why in guard.left_off.items()}])
    return {path: next(each[path] for each in found if path in each) for path in paths if any(path in e for e in found)}


@dataclass(frozen=True)
class FirstTokens:
    """Rows cut to `most` tokens, the first tokens of their documents. At least two documents remain."""

    rows: Rows
    most: int
    split: bool  # a single document becomes two, so that the separation is compared too

    def documents(self, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Like `Rows.documents`, with every token supervised."""
        given, kept, left = self.rows.documents(row), list[np.ndarray](), max(2, self.most)
        for ids, _ in given:
            first = ids[: max(1, left if len(given) == 1 else -(-left * 2 // 3))]
            kept.append(first)
            left -= len(first)
            if left <= 0:
                break
        if self.split and len(kept) == 1 and len(kept[0]) > 2:
            cut = len(kept[0]) * 2 // 3
            kept = [kept[0][:cut], kept[0][cut:]]
        return [(ids, ids) for ids in kept]
