"""One training session: from what is known before the process group to the exit code.

train_and_report             at the end the run's pages, and all that rank 0 writes to is closed
  process_group              the ranks meet; a signal to stop becomes a flag
    watchdog                 heartbeats; a failure is recorded in run_state.json
      _train                 build, receipt, worst step, answers before, loop, answers after, export
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from finetune.architecture.compiled.choice import compile_as_asked
from finetune.architecture.compiled.layers import CompiledLayers
from finetune.architecture.flash_kernels import FlashKernel, choose_flash_kernel
from finetune.errors import Stopped
from finetune.hub.start_adapter import start_from
from finetune.launch.cpu_memory import give_back_freed_memory
from finetune.launch.determinism import deterministic_algorithms
from finetune.launch.launcher import repeat_after_launcher
from finetune.launch.rendezvous import rendezvous
from finetune.launch.signals import stop_on_signals
from finetune.measure.cuda_peaks import give_back_cached_memory
from finetune.measure.phases import Phase, Phases, peak_of
from finetune.model.build import decoder_parts
from finetune.model.optimizer import call_after_first_step, learning_rate_schedule
from finetune.recipe.plain_lora import only_by_peft
from finetune.recipe.sections.training import RECOMPUTATIONS
from finetune.run_folder.best import describe_exported, forget_lost_best, weights_to_export
from finetune.run_folder.folder import Claim, mark_run
from finetune.run_folder.heartbeat import clear_heartbeats
from finetune.run_folder.save_restore import export, remove_temporary, restore, restore_temporary, save, save_temporary
from finetune.run_folder.saving.background import Saves, saves_in_background
from finetune.run_folder.train_state import TrainState
from finetune.run_folder.trained_change import describe_change, trained_checksums, unchanged_tensors
from finetune.run_folder.watchdog import Progress, watchdog
from finetune.strategies.accelerator import accumulation_context, build_accelerator, use_all_cores
from finetune.strategies.assemble import Assembled, assemble
from finetune.strategies.loss_scaling import load_scaler_state
from finetune.strategies.receipt import computed_layers, describe, write_receipt
from finetune.strategies.zero import release_engine, remove_swap
from finetune.training.formats import check_same_formats
from finetune.training.guard import compare_fast_paths
from finetune.training.loop import train
from finetune.training.memory_report import describe_memory, memory_facts, out_of_memory_explained, plan_request
from finetune.training.run import Run, check_vocabulary, steps_of
from finetune.training.run_output import Receipt, RunOutput
from finetune.training.samples import look_before, write_samples
from finetune.training.start import Start
from finetune.training.step.cast_weights import cast_weights
from finetune.training.worst_step import measured_phases, worst_step_first
from finetune.wording import recomputation_in_words


def train_and_report(start: Start) -> int:
    """Train; then, when no rank waits any more, write the run's pages and close its trackers. Returns 0 or 130."""
    output, trained = RunOutput(start), False
    try:
        code = _run_session(start, output)
        output.write_pages()
        trained = True
        return code
    finally:
        output.close(wait=trained)


def _run_session(start: Start, output: RunOutput) -> int:
    with process_group(start) as accelerator:
        if start.writes and start.launch.world_size > 1:
            clear_heartbeats(start.run_dir)
        first_step = _agree_on_first_step(accelerator, start.claim)
        if first_step is None:
            again = "to train again: training.resume=never, or another output_dir"
            output.terminal.log(f"{start.run_dir}: this run is finished; {again}")
            return 0
        check_same_formats(accelerator, start.recipe, start.formats)
        start = agree_on_recomputation(accelerator, start)
        progress = Progress(step=first_step)
        with watchdog(start.recipe, accelerator, start.launch, progress):
            return _train(start, accelerator, output, progress)


@contextmanager
def process_group(start: Start) -> Iterator[Accelerator]:
    """The Accelerator of ranks that have met; while the block runs, a signal to stop sets `start.stop`."""
    with rendezvous(start.launch):
        accelerator = build_accelerator(start.recipe, start.strategy, start.launch)
    use_all_cores(start.launch, accelerator.device, offloaded=start.strategy.offloaded)
    with stop_on_signals(start.stop, announce=start.launch.is_main):
        try:
            yield accelerator
        finally:
            release_engine(accelerator)
            accelerator.end_training()
            if start.writes:
                remove_swap(start.recipe)


def _agree_on_first_step(accelerator: Accelerator, claim: Claim | None) -> int | None:
    """The finished steps that every rank starts from, broadcast from rank 0; None when the run is finished."""
    step = 0
    if claim is not None:
        step = claim.checkpoint.step if claim.checkpoint else 0
        step = -1 if claim.status == "finished" else step
    agreed = int(accelerator.reduce(torch.tensor(step, device=accelerator.device), reduction="sum"))
    return None if agreed < 0 else agreed


def agree_on_recomputation(accelerator: Accelerator, start: Start) -> Start:
    """Where `auto` chose: every rank recomputes what the one with least memory has to."""
    if not start.recomputation:
        return start
    at = RECOMPUTATIONS.index(start.recipe.training.activation_checkpointing)
    most = int(accelerator.gather(torch.tensor([at], device=accelerator.device)).max())
    if most == at:
        return start
    runs = RECOMPUTATIONS[most]
    training = start.recipe.training.model_copy(update={"activation_checkpointing": runs})
    line = f"activation checkpointing: {recomputation_in_words(runs)}, because another rank's device has less memory"
    chosen = start.recomputation | {"runs": runs, "why": line.partition("because ")[2], "line": line}
    return replace(start, recipe=start.recipe.model_copy(update={"training": training}), recomputation=chosen)


def _train(start: Start, accelerator: Accelerator, output: RunOutput, progress: Progress) -> int:
    device, log = accelerator.device, output.terminal.log
    output.terminal.memory_of = peak_of(device)
    # The memory of loading and of the worst step is always measured: on CUDA reading its allocator's peak is free,
    # elsewhere each operation is watched.
    phases = Phases(device, enabled=True, watch=start.recipe.measure_phases or device.type != "cuda")
    with (
        out_of_memory_explained(start, progress, phases),
        saves_in_background(start.recipe, log) as saves,
    ):
        parts, run, state = _build(start, accelerator, output, progress, phases, saves)
        receipt = _begin_receipt(start, accelerator, parts, output)
        measured = _phases_of_loading(run, state.step)
        progress.phase = "worst step first"
        compiled = compile_as_asked(start.recipe, start.strategy, decoder_parts(parts.unwrapped_model), device, log)
        kernel = _agree_on_kernel(start, accelerator, parts, receipt)
        log(str(kernel))
        measured |= _compare_fast_paths(start, parts, run, compiled, kernel, receipt)
        with kernel.active():
            measured |= _try_worst_step(start, parts, run, compiled)
        receipt.add("compiled", compiled.facts())
        receipt.add("memory", memory_facts(plan_request(start), measured, device))
        if state.step == 0:
            progress.phase = "looking before"
            look_before(start, run, parts, output, kernel)
        progress.phase = "training"
        with kernel.active(), deterministic_algorithms(start.recipe.training.deterministic, device):
            reached_end = train(run, state)
        receipt.add("compiled", compiled.facts())
        if not reached_end:
            command = mark_run(start.run_dir, "stopped", step=state.step) if start.writes else ""
            line = f"stopped and saved at step {state.step}; continue with:\n  {command}"
            log(line)
            if start.launch.is_main:
                repeat_after_launcher(line)
            accelerator.wait_for_everyone()
            return Stopped.exit_code
        progress.phase = "export"
        exported = weights_to_export(start.recipe, parts, state)
        unchanged = unchanged_tensors(parts, state.start_checksums)
        receipt.add("change", {"unchanged_tensors": unchanged})
        log(describe_change(unchanged, state.start_checksums))
        write_samples(start, run, parts, output, when="after", step=state.step)
        folder = export(start.recipe, parts, start.tokenizer, write=start.writes)
        if start.writes:
            memory = memory_facts(plan_request(start), measured, device)
            receipt.add("memory", memory)
            log(describe_memory(memory))
            receipt.add("export", exported.as_json())
            mark_run(start.run_dir, "finished", step=state.step, exported=exported.as_json())
            log(describe_exported(exported, state))
            log(only_by_peft(start.recipe, start.run_dir))
            log(f"finished: {folder}\ntalk to it: {shlex.join(['finetune', 'chat', str(start.run_dir)])}")
        accelerator.wait_for_everyone()
        return 0


def _build(
    start: Start, accelerator: Accelerator, output: RunOutput, progress: Progress, phases: Phases, saves: Saves
) -> tuple[Assembled, Run, TrainState]:
    """Model and optimizer as of step `progress.step`, and the run that trains them."""
    recipe, first_step = start.recipe, progress.step
    with phases("load"):
        parts = assemble(recipe, start.strategy, accelerator, launch=start.launch)
        check_vocabulary(start.prepared, parts.unwrapped_model)
        if start.adapter is not None and first_step == 0:
            start_from(parts, start.adapter)
        state = restore(recipe, parts, first_step)
        load_scaler_state(accelerator, state.loss_scaler)
        output.terminal.log(forget_lost_best(recipe, state))
        if first_step == 0:
            state.start_checksums = trained_checksums(parts)
    give_back_freed_memory()
    output.open_trackers(first_step)
    parts.model.train()  # DeepSpeed's returns nothing

    def stop_requested() -> bool:  # called once a step
        progress.reached(state.step)
        return bool(start.stop) or saves.failed

    def write_metrics(line: dict[str, Any]) -> None:
        progress.reached(line["step"])
        output.write_metrics(line)

    def save_and_push(state: TrainState) -> None:
        # Every rank takes part in the checksums; a checkpoint in which nothing has changed yet is not pushed.
        pushes = recipe.hub.checkpoints is not None and trained_checksums(parts) != state.start_checksums
        save(recipe, parts, state, saves, partial(output.push_checkpoint, state.step) if pushes else None)

    run = Run(
        recipe=recipe,
        accelerator=accelerator,
        model=parts.model,
        optimizer=parts.optimizer,
        train_rows=start.prepared.train,
        eval_rows=start.prepared.eval,
        eval_sets=start.prepared.eval_sets,
        plan=start.plan,
        learning_rate=learning_rate_schedule(recipe.training, start.plan.total_steps),
        terminal=output.terminal,
        phases=phases,
        stop_requested=stop_requested,
        write_metrics=write_metrics,
        save=save_and_push,
        wait_for_saves=saves.finish,
        skip_gradient_sync=accumulation_context(accelerator, start.strategy, parts.model),
        weights=cast_weights(recipe, start.strategy, parts.unwrapped_model),
        pipeline=parts.pipeline,
    )
    return parts, run, state


def _begin_receipt(start: Start, accelerator: Accelerator, parts: Assembled, output: RunOutput) -> Receipt:
    """The receipt of what was built, written and printed; optimizer state is added once there is some."""
    content = write_receipt(start.recipe, accelerator, parts, start.strategy)
    content |= {"nodes": start.launch.nodes, "local_world_size": start.launch.local_world_size}
    content |= {"batch": start.plan.facts(start.prepared.train) | steps_of(start.recipe, start.plan.total_steps)}
    content |= {"adapter": start.adapter.facts()} if start.adapter else {}
    content |= {"probe": start.probed, "recomputation": start.recomputation, "formats": start.formats.facts}
    content |= {"data": {"fingerprint": start.prepared.fingerprint, **start.prepared.facts}}
    receipt = Receipt(start, content)
    receipt.write()
    started = [start.adapter.note(start.recipe)] if start.adapter else []
    chosen = [start.formats.line] if start.formats.line else []
    chosen += [start.recomputation["line"]] if start.recomputation else []
    output.terminal.log("\n".join([describe(content), *chosen, *started, *start.prepared.notes]))
    call_after_first_step(parts.optimizer, receipt.add_optimizer_state)
    return receipt


def _agree_on_kernel(start: Start, accelerator: Accelerator, parts: Assembled, receipt: Receipt) -> FlashKernel:
    """What computes the packed attention of this run's steps, the same on all ranks, with its line in the receipt."""
    device, computes = accelerator.device, receipt.content["dtypes"]["compute"].partition(",")[0]
    decoder = decoder_parts(parts.unwrapped_model)
    kernel = choose_flash_kernel(start.recipe, decoder, device, getattr(torch, computes))
    kernel.agree(partial(accelerator.reduce, reduction="sum"), device)
    receipt.add("flash_kernel", kernel.facts())
    return kernel


def _phases_of_loading(run: Run, step: int) -> dict[str, Phase]:
    """What loading took; written to the metrics too where all phases are measured."""
    loading = run.phases.seen
    if run.recipe.measure_phases:
        for line in run.phases.lines(step):
            run.write_metrics(line)
    run.phases.take()
    run.phases.enabled = run.recipe.measure_phases
    return loading


def _compare_fast_paths(
    start: Start, parts: Assembled, run: Run, compiled: CompiledLayers, kernel: FlashKernel, receipt: Receipt
) -> dict[str, Phase]:
    """The phase that compares compiled layers, own layers and kernels, and its lines in the receipt."""
    deterministic = deterministic_algorithms(start.recipe.training.deterministic, run.accelerator.device)
    with deterministic, measured_phases(run.phases) as measured:
        guard = compare_fast_paths(run, parts.unwrapped_model, compiled, kernel)
    receipt.add("guard", guard.facts())
    if guard.left_off:
        receipt.add("flash_kernel", kernel.facts())
        for name, facts in computed_layers(run.accelerator, parts).items():
            receipt.add(name, facts)
    return measured


def _try_worst_step(start: Start, parts: Assembled, run: Run, compiled: CompiledLayers) -> dict[str, Phase]:
    """The phases of the worst step, which leaves weights and optimizer as they were. Layers are compiled in it."""
    try:
        with deterministic_algorithms(start.recipe.training.deterministic, run.accelerator.device):
            worst = worst_step_first(
                run, lambda: save_temporary(start.recipe, parts), lambda folder: restore_temporary(parts, folder)
            )
    finally:
        if start.writes:
            remove_temporary(start.recipe)
    give_back_freed_memory()
    give_back_cached_memory(run.accelerator.device)
    run.terminal.log(str(worst))
    compiled.agree(partial(run.accelerator.reduce, reduction="sum"), run.accelerator.device)
    if said := str(compiled):
        run.terminal.log(said)
    return worst.phases
