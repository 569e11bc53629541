"""Worst step first: what must fail fails in the first minute, not in the tenth hour.

One optimizer step on the longest rows, one evaluation of the longest held-out rows, one checkpoint written, verified
and read back. Reading it back is also what takes everything to the exact initial state again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import DistributedType

from finetune.errors import NotFinite
from finetune.measure.phases import GIB, Phase, Phases, peak_bytes
from finetune.model.optimizer import unwrap_optimizer
from finetune.strategies.loss_scaling import load_scaler_state, scaler_state
from finetune.tokens.batches import prefetch
from finetune.tokens.mixture import Rows
from finetune.training.loop import optimizer_step
from finetune.training.run import BatchPlan, Run


@dataclass(frozen=True)
class WorstStep:
    """What the worst step cost."""

    tokens: int  # of the longest micro-batch, over all ranks
    step_seconds: float
    save_seconds: float
    peak_bytes: int  # of the process so far
    phases: dict[str, Phase] = field(default_factory=dict)  # state (the optimizer's), forward, backward, step

    def __str__(self) -> str:
        return (
            f"worst step first: {self.tokens:,} tokens forward, backward, updated and evaluated in "
            f"{self.step_seconds:.1f} s, peak {self.peak_bytes / GIB:.1f} GiB; saved and read back in "
            f"{self.save_seconds:.1f} s"
        )


def worst_step_first(run: Run, save: Callable[[], Path], read_back: Callable[[Path], None]) -> WorstStep:
    """Try the step that takes most memory, then go back to the state before it, to the bit. Every rank calls it.

    Args:
        save: Writes the present state and returns where.
        read_back: Verifies what was written and fills weights and optimizer from it.

    Raises:
        NotFinite: the loss or its gradient is not finite.
        EnvironmentMismatch: the checkpoint cannot be written.
    """
    began = time.perf_counter()
    scaler = scaler_state(run.accelerator)
    where = save()
    saved = time.perf_counter()
    device = run.accelerator.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout seeds the generators
        with _measured(run.phases) as phases:
            with run.phases("state"):
                _make_optimizer_state(run)
            tokens = _step(run)
        if run.eval_rows is not None:
            _evaluate(run, run.eval_rows)
    stepped = time.perf_counter()
    read_back(where)
    load_scaler_state(run.accelerator, scaler)
    read = time.perf_counter()
    peak = max(peak_bytes(device), *(phase.peak_bytes for phase in phases.values()))
    return WorstStep(tokens, stepped - saved, (saved - began) + (read - stepped), peak, phases)


@contextmanager
def _measured(phases: Phases) -> Iterator[dict[str, Phase]]:
    """The phases of the block, filled in at its end, whether or not all of the run's are measured."""
    enabled, phases.enabled = phases.enabled, True
    measured: dict[str, Phase] = {}
    yield measured
    measured |= phases.take()
    phases.enabled = enabled


def _make_optimizer_state(run: Run) -> None:
    """An update that changes nothing, of gradients that are zero: from the run's second step on its moments, 8 bytes a
    trained weight, lie beside all of a step, and so they shall here. DeepSpeed's engines make theirs by themselves."""
    optimizer = unwrap_optimizer(run.optimizer)
    if optimizer.state or run.accelerator.distributed_type == DistributedType.DEEPSPEED:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def longest_rows(rows: Rows, plan: BatchPlan) -> np.ndarray:
    """The rows of the micro-batch with most tokens, dealt out to the ranks as any other."""
    order = np.argsort(-np.asarray(rows.lengths), kind="stable")
    return np.asarray(order[: plan.per_device_batch_size * plan.world_size])


@dataclass(frozen=True)
class AllTokensSupervised:
    """Rows whose every token is learned, prompts too: the head is applied to no more of any row."""

    rows: Rows

    def documents(self, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(ids, ids) for ids, _ in self.rows.documents(row)]


def micro_steps_to_try(plan: BatchPlan) -> int:
    """How often the worst step takes its micro-batch: twice where steps accumulate, for gradients wait beside it."""
    return min(2, plan.micro_steps(min(plan.global_batch_size, plan.total_rows)))


def _step(run: Run) -> int:
    """An optimizer step on the longest rows."""
    rows, plan = run.train_rows, run.plan
    longest, times = longest_rows(rows, plan), micro_steps_to_try(plan)
    batches = [batch for _ in range(times) for batch in plan.micro_batches(AllTokensSupervised(rows), longest)]
    tokens, documents = int(rows.lengths[longest].sum()), sum(len(rows.members(int(row))) for row in longest)
    try:
        optimizer_step(
            run.accelerator,
            run.model,
            run.optimizer,
            prefetch(batches, run.accelerator.device, run.recipe.training.non_blocking),
            micro_steps=times,
            supervised_tokens=times * (tokens - documents),  # a document's last predicts nothing
            max_grad_norm=run.recipe.training.max_grad_norm,
            seed=plan.seed,
            stop=False,
            phases=run.phases,
            skip_gradient_sync=run.skip_gradient_sync,
        )
    except NotFinite as error:
        places = ", ".join(place for index in longest[:4] for place in rows.places(int(index)))
        raise NotFinite(f"worst step first: {error}: not finite; look at the longest rows, {places}") from error
    except (RuntimeError, MemoryError) as error:
        _name_what_ran(error, run, int(rows.lengths[longest].max()), "a training step")
        raise
    return tokens


def _evaluate(run: Run, rows: Rows) -> None:
    longest = longest_rows(rows, run.plan)
    run.model.eval()
    try:
        with torch.no_grad():
            batches = run.plan.micro_batches(AllTokensSupervised(rows), longest)
            for batch in prefetch(batches, run.accelerator.device, non_blocking=True):
                run.model(**batch)
    except (RuntimeError, MemoryError) as error:
        _name_what_ran(error, run, int(rows.lengths[longest].max()), "an evaluation")
        raise
    finally:
        run.model.train()


def _name_what_ran(error: BaseException, run: Run, tokens: int, what: str) -> None:
    """For out_of_memory.py, which makes one line of it."""
    error.add_note(f"{what} on {run.recipe.training.per_device_batch_size} rows of {tokens:,} tokens")
