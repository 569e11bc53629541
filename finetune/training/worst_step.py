"""Worst step first: a run that would fail for memory, disk or data fails in its first minute, not in its tenth hour.

First the guard compares each part chosen for speed with the library's module: one forward of a few tokens from the
longest rows, without gradients. If a part differs, all ranks leave it out. Then a forward of the whole longest rows
compiles each kind of layer and compares it. The optimizer's state is not allocated yet, and the guard holds one layer's
activations and gradients at a time. So its peak stays below a step's.

Then it proves that the disk has room for a checkpoint, takes one optimizer step on the longest rows, evaluates the
longest held-out rows, and restores weights and optimizer to the bit (training/held_state.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from accelerate.utils import DistributedType, gather_object

from finetune.architecture.compiled.layers import CompiledLayers
from finetune.architecture.flash_kernels import FlashKernel
from finetune.architecture.guard import ATTENTION, COMPARED_TOKENS, Guard
from finetune.architecture.own_layers.compute import ADAPTERS, GATES, NORMS, leave_to_library
from finetune.errors import NotFinite
from finetune.measure.phases import Phase, peak_bytes, peak_of
from finetune.model.optimizer import allocate_optimizer_state
from finetune.strategies.accelerator import load_scaler_state, scaler_state
from finetune.strategies.assemble import Assembled
from finetune.strategies.pieces import Ranks
from finetune.tokens.batches import MicroBatch, prefetch
from finetune.tokens.mixture import Rows
from finetune.training.batch_plan import BatchPlan
from finetune.training.held_state import hold_state, remove_temporary
from finetune.training.objectives import ChosenRows
from finetune.training.run import Forwards, Run
from finetune.training.step import optimizer_step
from finetune.training.update import keep_refusal_flag, updates_on_device
from finetune.wording import GIB, counted


@dataclass(frozen=True)
class WorstStep:
    """The worst step's cost."""

    tokens: int  # of the longest micro-batch, over all ranks
    step_seconds: float
    save_seconds: float
    peak_bytes: int  # so far
    phases: dict[str, Phase] = field(default_factory=dict)  # state (the optimizer's), forward, backward, step
    peak_of: str = "process"  # on a GPU: tensors
    held_bytes: int = 0  # this rank's copies in host memory, until the step was over; 0: they were on the disk

    def facts(self) -> dict[str, int | float]:
        """For the receipt."""
        seconds = {"step_seconds": round(self.step_seconds, 2), "save_seconds": round(self.save_seconds, 2)}
        return {"tokens": self.tokens, **seconds, "peak_bytes": self.peak_bytes, "held_bytes": self.held_bytes}

    def __str__(self) -> str:
        tokens, gib = counted(self.tokens, "token"), self.peak_bytes / GIB
        kept = "state kept in host memory and restored" if self.held_bytes else "saved and read back"
        return (
            f"worst step first: {tokens} forward, backward, updated and evaluated in "
            f"{self.step_seconds:.1f} s, peak of {self.peak_of} {gib:.1f} GiB; {kept} in "
            f"{self.save_seconds:.1f} s"
        )


def worst_step_first(run: Run, assembled: Assembled, ranks: Ranks) -> WorstStep:
    """Try the step that takes most memory, then restore the state before it, to the bit. Every rank calls it.

    Args:
        ranks: As the run's saves have them.

    Raises:
        NotFinite: the loss or its gradient is not finite.
        EnvironmentMismatch: the disk has no room, or cannot be written.
    """
    began = time.perf_counter()
    run.output.terminal.progress("worst step first: keeping weights and optimizer state")
    scaler = scaler_state(run.parts.accelerator)
    device, strategy = run.parts.accelerator.device, run.parts.strategy
    on_host = device.type != "cuda" or (strategy is not None and strategy.offloaded)
    try:
        held = hold_state(run.recipe, assembled, ranks, on_host=on_host)
        saved = time.perf_counter()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout seeds the generators
            run.output.terminal.progress("worst step first: a step on the longest rows")
            with run.parts.phases.measured() as phases:
                with run.parts.phases("state"):
                    # The moments are resident during every later step, so allocate them here too. DeepSpeed's engines
                    # have theirs from the start. The flag of an optimizer that can refuse an update stays as well.
                    if run.parts.accelerator.distributed_type != DistributedType.DEEPSPEED:
                        allocate_optimizer_state(run.parts.optimizer)
                    if updates_on_device(run.parts.accelerator, run.parts.optimizer):
                        keep_refusal_flag(run.parts.optimizer, device)
                tokens = _step(run)
            if run.eval_rows is not None:
                run.output.terminal.progress("worst step first: evaluating the longest held-out rows")
                _evaluate(run, run.eval_rows)
        stepped = time.perf_counter()
        run.output.terminal.progress("worst step first: restoring weights and optimizer state")
        held.restore()
        load_scaler_state(run.parts.accelerator, scaler)
        restored = time.perf_counter()
    finally:
        if ranks.rank == 0:
            remove_temporary(run.recipe)
    peak = max(peak_bytes(device), *(phase.peak_bytes for phase in phases.values()))
    seconds = stepped - saved, (saved - began) + (restored - stepped)
    return WorstStep(tokens, *seconds, peak, phases, peak_of(device), held.nbytes)


def longest_groups(rows: Rows, plan: BatchPlan) -> list[list[int]]:
    """The rows of the micro-batch with most tokens over all ranks, longest first; rows that are computed as one row are
    a group."""
    share = plan.per_device_batch_size * plan.world_size
    order = np.argsort(-np.asarray(rows.lengths), kind="stable")
    if plan.capacity is None:
        return [[int(row)] for row in order[:share]]
    groups = [[int(order[place]) for place in places] for places in plan.groups(rows, order)]
    return sorted(groups, key=lambda group: -int(rows.lengths[group].sum()))[:share]


def longest_rows(rows: Rows, plan: BatchPlan) -> np.ndarray:
    """The rows of `longest_groups`, one after another."""
    return np.concatenate([np.asarray(group, dtype=np.int64) for group in longest_groups(rows, plan)])


def worst_batches_of(run: Run, rows: Rows) -> tuple[list[MicroBatch], int]:
    """This rank's micro-batch with most tokens, and its units over all ranks; every token is supervised."""
    groups = longest_groups(rows, run.plan)
    few = rows.subset([row for group in groups for row in group])
    # A document's last token predicts nothing.
    supervised = few.lengths - np.asarray([len(few.documents(row)) for row in range(len(few))])
    all_supervised = replace(few, supervised=supervised, is_all_supervised=True)
    numbers = iter(range(len(few)))
    numbered = [[next(numbers) for _ in group] for group in groups]
    objective, indices = run.parts.objective, np.arange(len(few))
    batches = objective.batches(ChosenRows(run.plan, all_supervised, indices, groups=numbered))
    return batches, objective.planned_count(all_supervised, indices)


def micro_steps_to_try(plan: BatchPlan) -> int:
    """How many micro-batches the worst step has.

    Two with accumulation: the first one's gradients are still in memory. In a pipeline all of them: their activations
    wait.
    """
    of_a_step = plan.micro_steps(min(plan.global_batch_size, plan.total_rows))
    if plan.stages > 1:
        return of_a_step
    return min(2, of_a_step)


def _step(run: Run) -> int:
    """An optimizer step on the longest rows."""
    rows, plan = run.train_rows, run.plan
    longest, times = longest_rows(rows, plan), micro_steps_to_try(plan)
    tokens, units = int(rows.lengths[longest].sum()), 0
    batches: list[MicroBatch] = []
    for _ in range(times):  # each with tensors of its own
        made, count = worst_batches_of(run, rows)
        batches, units = batches + made, units + count
    try:
        optimizer_step(
            run.parts,
            prefetch(batches, run.parts.accelerator.device, run.recipe.training.non_blocking),
            micro_steps=times,
            planned_count=units,
            seed=plan.seed,
            stop=False,
        ).result()
    except NotFinite as error:
        places = ", ".join(place for index in longest[:4] for place in rows.places(int(index)))
        raise NotFinite(f"worst step first: {error}: not finite; look at the longest rows, {places}") from error
    except (RuntimeError, MemoryError) as error:
        _name_what_ran(error, run, int(rows.lengths[longest].max()), "a training step")
        raise
    return tokens


def _evaluate(run: Run, rows: Rows) -> None:
    batches, _ = worst_batches_of(run, rows)
    model, objective, accelerator = run.parts.model, run.parts.objective, run.parts.accelerator
    model.eval()
    try:
        with torch.no_grad(), run.parts.weights.cast():
            for batch in prefetch(batches, run.parts.accelerator.device, non_blocking=True):
                if objective.needs_whole_step:
                    objective.before_step(model, [batch], partial(accelerator.reduce, reduction="sum"))
                objective.loss(model, batch)
    except (RuntimeError, MemoryError) as error:
        _name_what_ran(error, run, int(rows.lengths.max()), "an evaluation")
        raise
    finally:
        model.train()


def _name_what_ran(error: BaseException, run: Run, tokens: int, doing: str) -> None:
    """Add a note that measure/out_of_memory.py puts into its message."""
    error.add_note(f"{doing} on {counted(run.recipe.training.rows_at_once, 'row')} of {counted(tokens, 'token')}")


INSTEAD = {
    ADAPTERS: "peft computes all adapters",
    NORMS: "transformers computes all norms",
    GATES: "transformers computes all gates",
    ATTENTION: "attention runs document by document",
}


def compare_fast_paths(run: Forwards, assembled: Assembled, compiled: CompiledLayers, kernel: FlashKernel) -> Guard:
    """Compare until every remaining path is right. Every rank calls this, and all ranks end with the same paths.

    Raises EnvironmentMismatch if the recipe asks for compiled layers and they differ.
    """
    left_off: dict[str, str] = {}
    while True:
        guard = Guard()
        with kernel.active(), guard.watching(assembled.unwrapped_model):
            _forward(run, COMPARED_TOKENS // run.plan.per_device_batch_size)
        differing = _agreed(run, guard)
        if not differing:
            break
        for path, reason in differing.items():
            run.terminal.say(f"guard: {INSTEAD[path]} from here on, because the faster way differs: {reason}")
            if path == ATTENTION:
                kernel.leave_off(reason)
            else:
                leave_to_library(assembled.unwrapped_model, path)
        left_off |= differing
    guard.left_off = left_off
    if compiled.applied:
        # On whole rows: a compiler chooses its kernels' blocks by the first sizes that it sees.
        trained_embeddings = assembled.decoder.get_input_embeddings().parameters()
        with kernel.active(), compiled.comparing(any(parameter.requires_grad for parameter in trained_embeddings)):
            _forward(run, int(run.train.lengths.max()))
        compiled.agree(partial(run.accelerator.reduce, reduction="sum"), run.accelerator.device)
    return guard


def _forward(run: Forwards, most: int) -> None:
    """One forward, without gradients, of the longest rows' first tokens: `most` of each."""
    device = run.accelerator.device
    rows = FirstTokens(run.train, most, split=run.plan.flat)
    batches = run.plan.micro_batches(rows, longest_rows(run.train, run.plan))
    with (
        run.phases("guard"),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.no_grad(),
        run.weights.cast(),
    ):
        for batch in prefetch(batches[:1], device, non_blocking=False):
            run.model(**batch)


def _agreed(run: Forwards, guard: Guard) -> dict[str, str]:
    """The paths that any rank has to leave off, with reasons; equal on all ranks."""
    paths = list(INSTEAD)
    flags = torch.tensor([path in guard.left_off for path in paths], dtype=torch.int32, device=run.accelerator.device)
    if not run.accelerator.reduce(flags, reduction="sum").any():
        return {}
    rank, ranks = run.accelerator.process_index, run.accelerator.num_processes
    on_rank = f" on rank {rank}" if ranks > 1 else ""
    of_ranks: list[dict[str, str]] = gather_object([{path: why + on_rank for path, why in guard.left_off.items()}])
    reasons = {path: why for left_off in reversed(of_ranks) for path, why in left_off.items()}  # the first rank's
    return {path: reasons[path] for path in paths if path in reasons}


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
