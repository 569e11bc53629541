"""One training session: from what is known before the first process group to the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator

from finetune.errors import Stopped
from finetune.files import append_lines, write_json
from finetune.hub.checkpoints import CheckpointPusher
from finetune.launch.launcher import continue_command
from finetune.launch.rendezvous import rendezvous
from finetune.launch.signals import stop_on_signals
from finetune.measure.metrics import Terminal
from finetune.measure.phases import Phase, Phases
from finetune.model.optimizer import call_after_first_step, learning_rate_schedule
from finetune.report.run_page import write_page, write_pages
from finetune.run_folder.folder import Claim, mark_failed, mark_run
from finetune.run_folder.heartbeat import clear_beats
from finetune.run_folder.save_restore import export, read_back, remove_aside, restore, save, save_aside
from finetune.run_folder.train_state import TrainState
from finetune.run_folder.trained_change import describe_change, trained_checksums, unchanged_tensors
from finetune.run_folder.watchdog import Progress, watched
from finetune.strategies.accelerator import accumulation_context, build_accelerator, use_all_cores
from finetune.strategies.assemble import Assembled, assemble
from finetune.strategies.loss_scaling import load_scaler_state
from finetune.strategies.receipt import add_optimizer_state, describe, write_receipt
from finetune.strategies.zero import release_engine, remove_swap
from finetune.training.loop import train
from finetune.training.memory_report import PATIENCE, describe_memory, memory_facts, memory_told, question
from finetune.training.planner_process import asked
from finetune.training.run import Run, check_vocabulary
from finetune.training.samples import look_before, write_samples
from finetune.training.start import Start
from finetune.training.trackers import Trackers
from finetune.training.worst_step import worst_step_first


def train_and_report(start: Start) -> int:
    """Train; then, when no rank waits any more, the pages of the run and what trackers are handed of them."""
    if start.claim is None or start.claim.status == "finished":
        return train_claimed(start)
    trackers, pusher = Trackers(start.recipe), CheckpointPusher(start.recipe)
    ended = False
    try:
        code = train_claimed(replace(start, trackers=trackers, pusher=pusher))
        write_pages(start.run_dir, print)
        ended = True
        return code
    finally:
        trackers.finish()
        pusher.close(wait=ended)


def train_claimed(start: Start) -> int:
    asks = start.claim is not None and start.claim.status != "finished"
    about = question(start.recipe, start.launch, start.plan, start.prepared.train) if asks else None
    with asked(about, start.run_dir) as foretold:
        with rendezvous(start.launch):
            accelerator = build_accelerator(start.recipe, start.strategy, start.launch)
        use_all_cores(start.launch, accelerator.device, offloaded=start.strategy.offloaded)
        with stop_on_signals(start.stop, announce=start.launch.is_main):
            return _train_together(replace(start, foretold=foretold), accelerator)


def _train_together(start: Start, accelerator: Accelerator) -> int:
    if start.launch.world_size > 1 and start.claim is not None and start.claim.status != "finished":
        clear_beats(start.run_dir)
    resumed_step = _agree_on_start(accelerator, start.claim)
    if resumed_step is None:
        if start.launch.is_main:
            print(
                f"{start.run_dir}: this run is finished; to train again: training.resume=never, or another output_dir"
            )
        return 0
    progress = Progress(step=resumed_step)
    # The memory of loading and of the worst step is always measured; CUDA's allocator counts without being watched.
    watch = start.recipe.measure_phases or accelerator.device.type != "cuda"
    phases = Phases(accelerator.device, enabled=True, watch=watch)
    command = continue_command(start.launch, resume=start.recipe.training.resume)
    limit = start.recipe.timeout_seconds
    try:
        with (
            watched(start.run_dir, accelerator, start.launch, progress, timeout_seconds=limit, command=command),
            memory_told(start.recipe, accelerator.device, progress, phases, start.foretold, command),
        ):
            return _train(start, accelerator, resumed_step, progress, phases)
    except BaseException as error:
        mark_failed(start.run_dir, error, phase=progress.phase, rank=start.launch.rank, step=progress.step)
        raise
    finally:
        release_engine(accelerator)
        accelerator.end_training()
        if start.launch.is_main:
            remove_swap(start.recipe)


def _agree_on_start(accelerator: Accelerator, claim: Claim | None) -> int | None:
    """The step that every rank starts from: rank 0 knows. None when the run is finished."""
    position = -1
    if claim is not None and claim.status != "finished":
        position = claim.checkpoint.step if claim.checkpoint else 0
    told = torch.tensor(position if claim is not None else 0, device=accelerator.device)
    agreed = int(accelerator.reduce(told, reduction="sum"))
    return None if agreed < 0 else agreed


def _train(start: Start, accelerator: Accelerator, first_step: int, progress: Progress, phases: Phases) -> int:
    parts, run, state = _build(start, accelerator, first_step, progress, phases)
    note = _write_receipt(start, accelerator, parts, run)
    measured = _loaded(run, first_step)
    progress.phase = "worst step first"
    try:
        tried = worst_step_first(run, lambda: save_aside(start.recipe, parts), lambda folder: read_back(parts, folder))
    finally:
        if start.launch.is_main:
            remove_aside(start.recipe)
    run.terminal.log(str(tried))
    measured |= tried.phases
    note("memory", memory_facts(start.foretold.answer(), measured, accelerator.device))
    if first_step == 0:
        progress.phase = "looking before"
        look_before(start, run, parts.unwrapped_model)
    progress.phase = "training"
    if not train(run, state):
        command = mark_run(start.run_dir, "stopped", step=state.step) if start.launch.is_main else ""
        run.terminal.log(f"stopped and saved at step {state.step}; continue with:\n  {command}")
        accelerator.wait_for_everyone()
        return Stopped.exit_code
    progress.phase = "export"
    unchanged = unchanged_tensors(parts, state.start_checksums)
    note("change", {"unchanged_tensors": unchanged})
    run.terminal.log(describe_change(unchanged, state.start_checksums))
    write_samples(start, parts.unwrapped_model, "after", state.step)
    folder = export(start.recipe, parts, start.tokenizer, write=start.launch.is_main)
    if start.launch.is_main:
        memory = memory_facts(start.foretold.answer(wait_seconds=PATIENCE), measured, accelerator.device)
        note("memory", memory)
        run.terminal.log(describe_memory(memory))
        mark_run(start.run_dir, "finished", step=state.step)
        run.terminal.log(f"finished: {folder}\ntalk to it: finetune chat {start.run_dir}")
    accelerator.wait_for_everyone()
    return 0


def _build(
    start: Start, accelerator: Accelerator, first_step: int, progress: Progress, phases: Phases
) -> tuple[Assembled, Run, TrainState]:
    recipe, prepared = start.recipe, start.prepared
    plan = start.plan
    learning_rate = learning_rate_schedule(recipe.training, plan.total_steps)
    with phases("load"):
        parts = assemble(recipe, start.strategy, accelerator, launch=start.launch)
        check_vocabulary(prepared, parts.unwrapped_model)
        state = restore(recipe, parts, first_step)
        load_scaler_state(accelerator, state.loss_scaler)
        if first_step == 0:
            state.start_checksums = trained_checksums(parts)
    if start.trackers is not None:
        start.trackers.start(first_step)
    parts.model.train()  # DeepSpeed's returns nothing
    terminal = Terminal(plan.total_steps, silent=not start.launch.is_main)
    run = Run(
        recipe=recipe,
        accelerator=accelerator,
        model=parts.model,
        optimizer=parts.optimizer,
        train_rows=prepared.train,
        eval_rows=prepared.eval,
        plan=plan,
        learning_rate=learning_rate,
        terminal=terminal,
        phases=phases,
        stop_requested=_stop_requested(start, progress, state),
        write_metrics=_metrics_writer(start, progress, terminal),
        save=lambda state: _save(start, parts, state),
        skip_gradient_sync=accumulation_context(accelerator, start.strategy, parts.model),
    )
    return parts, run, state


def _save(start: Start, parts: Assembled, state: TrainState) -> None:
    save(start.recipe, parts, state)
    if start.recipe.hub.checkpoints is None:
        return
    changed = trained_checksums(parts) != state.start_checksums  # every rank takes part
    if start.pusher is not None and changed:
        start.pusher.push(state.step)


def _loaded(run: Run, step: int) -> dict[str, Phase]:
    """What loading took; where all phases are measured, told to the metrics too."""
    loaded = run.phases.seen
    if run.recipe.measure_phases:
        for line in run.phases.lines(step):
            run.write_metrics(line)
    run.phases.take()
    run.phases.enabled = run.recipe.measure_phases
    return loaded


def _stop_requested(start: Start, progress: Progress, state: TrainState) -> Callable[[], bool]:
    """Asked once a step, so each rank tells here which step it has reached."""

    def asked() -> bool:
        progress.reached(state.step)
        return bool(start.stop)

    return asked


def _metrics_writer(start: Start, progress: Progress, terminal: Terminal) -> Callable[[dict[str, Any]], None]:
    def write(line: dict[str, Any]) -> None:
        progress.reached(line["step"])
        if start.launch.is_main:
            append_lines(start.run_dir / "metrics.jsonl", [line])
            if start.trackers is not None:
                start.trackers.log(line)
            if line["kind"] == "eval":
                write_page(start.run_dir, terminal.log)

    return write


def _write_receipt(
    start: Start, accelerator: Accelerator, parts: Assembled, run: Run
) -> Callable[[str, dict[str, Any]], None]:
    """Writes the receipt; the function that it returns adds a section to it."""
    receipt = write_receipt(start.recipe, accelerator, parts, start.strategy)
    batch, facts = run.plan.facts(), start.prepared.facts
    receipt |= {"nodes": start.launch.nodes, "local_world_size": start.launch.local_world_size}
    receipt |= {"batch": batch, "data": {"fingerprint": start.prepared.fingerprint, **facts}}

    def write() -> None:
        if start.launch.is_main:
            write_json(start.run_dir / "receipt.json", receipt)

    def note_state(held: Counter[str]) -> None:
        add_optimizer_state(start.recipe, start.strategy, receipt, held, accelerator.num_processes)
        write()

    def note(section: str, found: dict[str, Any]) -> None:
        receipt[section] = found
        write()

    write()
    run.terminal.log("\n".join([describe(receipt), *start.prepared.notes]))
    call_after_first_step(parts.optimizer, note_state)
    return note
