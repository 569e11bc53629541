"""Worst step first: what must fail fails in the first minute, not in the tenth hour.

One optimizer step on the longest rows, one evaluation of the longest held-out rows, one checkpoint written, verified
and read back. Reading it back is also what takes everything to the exact initial state again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from finetune.batches import Rows, prefetch
from finetune.errors import DoesNotFit
from finetune.loop import NotFinite, optimizer_step
from finetune.loss_scaling import load_scaler_state, scaler_state
from finetune.phases import GIB, Phases, peak_bytes
from finetune.run import Plan, Run


@dataclass(frozen=True)
class Rehearsed:
    """What the worst step cost."""

    tokens: int  # of the longest micro-batch, over all ranks
    step_seconds: float
    save_seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        return (
            f"worst step first: {self.tokens:,} tokens forward, backward, updated and evaluated in "
            f"{self.step_seconds:.1f} s, peak {self.peak_bytes / GIB:.1f} GiB; saved and read back in "
            f"{self.save_seconds:.1f} s"
        )


def worst_step_first(run: Run, save: Callable[[], Path], read_back: Callable[[Path], None]) -> Rehearsed:
    """Try the step that takes most memory, then go back to the state before it, to the bit. Every rank calls it.

    Args:
        save: Writes the present state and returns where.
        read_back: Verifies what was written and fills weights and optimizer from it.

    Raises:
        DoesNotFit: the device has not the memory.
        NotFinite: the loss or its gradient is not finite.
        EnvironmentMismatch: the checkpoint cannot be written.
    """
    began = time.perf_counter()
    scaler = scaler_state(run.accelerator)
    where = save()
    saved = time.perf_counter()
    device = run.accelerator.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout seeds the generators
        tokens = _step(run)
        if run.eval_rows is not None:
            _evaluate(run, run.eval_rows)
    stepped = time.perf_counter()
    read_back(where)
    load_scaler_state(run.accelerator, scaler)
    read = time.perf_counter()
    return Rehearsed(tokens, stepped - saved, (saved - began) + (read - stepped), peak_bytes(device))


def longest_rows(rows: Rows, plan: Plan) -> np.ndarray:
    """The rows of the micro-batch with most tokens, dealt out to the ranks as any other."""
    order = np.argsort(-np.asarray(rows.lengths), kind="stable")
    return np.asarray(order[: plan.per_device_batch_size * plan.world_size])


def _step(run: Run) -> int:
    """An optimizer step on the longest rows, taken twice where steps accumulate: gradients then wait beside them."""
    rows, plan = run.train_rows, run.plan
    longest = longest_rows(rows, plan)
    times = min(2, plan.micro_steps(min(plan.global_batch_size, plan.total_rows)))
    batches = [batch for _ in range(times) for batch in plan.micro_batches(rows, longest)]
    try:
        optimizer_step(
            run.accelerator,
            run.model,
            run.optimizer,
            prefetch(batches, run.accelerator.device, run.recipe.training.non_blocking),
            micro_steps=times,
            supervised_tokens=times * int(rows.supervised[longest].sum()),
            max_grad_norm=run.recipe.training.max_grad_norm,
            seed=plan.seed,
            stop=False,
            phases=Phases(run.accelerator.device, enabled=False),
            hold=run.hold,
        )
    except NotFinite as error:
        places = ", ".join(place for index in longest[:4] for place in rows.places(int(index)))
        raise NotFinite(f"worst step first: {error}: not finite; look at the longest rows, {places}") from error
    except RuntimeError as error:
        if not _of_memory(error):
            raise
        raise _does_not_fit(run, int(rows.lengths[longest].max()), "a training step") from error
    return int(rows.lengths[longest].sum())


def _evaluate(run: Run, rows: Rows) -> None:
    longest = longest_rows(rows, run.plan)
    run.model.eval()
    try:
        with torch.no_grad():
            batches = run.plan.micro_batches(rows, longest)
            for batch in prefetch(batches, run.accelerator.device, non_blocking=True):
                run.model(**batch)
    except RuntimeError as error:
        if not _of_memory(error):
            raise
        raise _does_not_fit(run, int(rows.lengths[longest].max()), "an evaluation") from error
    finally:
        run.model.train()


def _of_memory(error: RuntimeError) -> bool:
    """The host's allocator says it in words alone."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _does_not_fit(run: Run, tokens: int, what: str) -> DoesNotFit:
    training, device = run.recipe.training, run.accelerator.device
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    remedies = [f"training.per_device_batch_size={training.per_device_batch_size // 2}"]
    remedies *= training.per_device_batch_size > 1
    remedies += ["training.activation_checkpointing=true"] * (not training.activation_checkpointing)
    remedies += [f"data.max_length={run.recipe.data.max_length // 2}", "a strategy that shards more"]
    return DoesNotFit(
        f"worst step first: {what} on {training.per_device_batch_size} rows of {tokens:,} tokens does not fit into "
        f"{memory / GIB:.0f} GiB; try {', or '.join(remedies)}"
    )
