"""One training session, from what is known before the process group to the exit code.

process_group          the ranks meet; a signal to stop becomes a flag
  watchdog             heartbeats; a failure is recorded in run_state.json
    build              model, optimizer and receipt, as of the first step
    try_worst_step     fast paths compared, then the step that takes most memory
    compare_with_reference   preferences: the reference's log-probabilities
    train              the loop (training/loop.py)
    finish             answers after, export, the last lines
pages                  when no rank waits any more
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from finetune.architecture.compiled.choice import compile_as_asked
from finetune.architecture.compiled.layers import CompiledLayers
from finetune.architecture.flash_kernels import FlashKernel, choose_flash_kernel
from finetune.errors import Stopped
from finetune.hub.start_adapter import building_on_top, start_from
from finetune.launch.cpu_memory import give_back_freed_memory
from finetune.launch.determinism import deterministic_algorithms
from finetune.launch.launcher import repeat_after_launcher
from finetune.launch.rendezvous import rendezvous
from finetune.launch.signals import stop_on_signals
from finetune.measure.cuda_peaks import give_back_cached_memory
from finetune.measure.phases import Phase, Phases, peak_of
from finetune.model.base_identity import COVERS, base_identity
from finetune.model.build import build_model, decoder_parts
from finetune.model.from_base import untrained_in_words
from finetune.model.generate import stop_on
from finetune.model.on_top import is_on_top
from finetune.model.optimizer import call_after_first_step, learning_rate_schedule, unwrap_optimizer
from finetune.model.optimizers.fused_update import choose_update
from finetune.probe.padding import may_share_a_batch
from finetune.recipe.sections.preferences import warnings_of
from finetune.recipe.sections.training import RECOMPUTATIONS
from finetune.run_folder.best import describe_exported, forget_lost_best, weights_to_export
from finetune.run_folder.facts import read_run
from finetune.run_folder.folder import Claim, mark_run, record_base
from finetune.run_folder.heartbeat import clear_heartbeats
from finetune.run_folder.save_restore import export, remove_temporary, restore, restore_temporary, save, save_temporary
from finetune.run_folder.saving.background import Saves, saves_in_background
from finetune.run_folder.train_state import TrainState
from finetune.run_folder.trained_change import describe_change, trained_checksums, unchanged_tensors
from finetune.run_folder.watchdog import Progress, watchdog
from finetune.strategies.accelerator import accumulation_context, build_accelerator, use_all_cores
from finetune.strategies.assemble import Assembled, assemble
from finetune.strategies.loss_scaling import load_scaler_state
from finetune.strategies.pieces import all_ranks
from finetune.strategies.receipt import computed_layers, describe, write_receipt
from finetune.strategies.zero import release_engine, remove_swap
from finetune.training.cast_weights import CastWeights, cast_weights
from finetune.training.formats import check_same_formats
from finetune.training.guard import compare_fast_paths
from finetune.training.loop import train
from finetune.training.memory_report import describe_memory, memory_facts, out_of_memory_explained, plan_request
from finetune.training.objectives import objective_of
from finetune.training.reference import find_reference, keep_second_model
from finetune.training.run import Run, check_vocabulary, steps_of
from finetune.training.run_output import Receipt, RunOutput
from finetune.training.samples import look_before, shared_by_all, write_samples
from finetune.training.scored_answers import (
    Answering,
    generated_answers,
    score_line,
    score_line_in_words,
    scores_on_all,
)
from finetune.training.start import Start
from finetune.training.step import StepParts
from finetune.training.worst_step import measured_phases, worst_step_first
from finetune.wording import recomputation_in_words


@dataclass(frozen=True)
class Session:
    """A training that was built: the strategy's parts, the loop's Run, and its output."""

    start: Start
    assembled: Assembled
    run: Run
    state: TrainState
    receipt: Receipt
    output: RunOutput
    kernel: FlashKernel  # that computes the steps' packed attention
    compiled: CompiledLayers
    measured: dict[str, Phase]  # phases of loading, the comparison and the worst step


def train_and_report(start: Start) -> int:
    """Train; then, when no rank waits any more, write the run's pages and close its trackers. Returns 0 or 130."""
    output, ended_well, code = RunOutput(start), False, 0
    log = output.terminal.log
    try:
        with process_group(start) as accelerator:
            if start.writes and start.launch.world_size > 1:
                clear_heartbeats(start.run_dir)
            first_step = _agree_on_first_step(accelerator, start.claim)
            if first_step is None:
                again = "to train again: training.resume=never, or another output_dir"
                log(f"{start.run_dir}: this run is finished; {again}")
            else:
                check_same_formats(accelerator, start.recipe, start.formats)
                start = agree_on_recomputation(accelerator, start)
                device, progress = accelerator.device, Progress(step=first_step)
                output.terminal.memory_of = peak_of(device)
                # The memory of loading and of the worst step is always measured. On CUDA reading the allocator's peak
                # is free. Elsewhere each operation is watched.
                watch = start.recipe.measure_phases or device.type != "cuda"
                phases = Phases(device, enabled=True, watch=watch)
                with (
                    watchdog(start.recipe, accelerator, start.launch, progress),
                    out_of_memory_explained(start, progress, phases),
                    saves_in_background(start.recipe, log) as saves,
                ):
                    keep_second_model(start, accelerator, output.terminal)
                    session = build(start, accelerator, output, progress, phases, saves)
                    try_worst_step(session)
                    progress.phase = "reference"
                    compare_with_reference(session)
                    if session.state.step == 0:
                        progress.phase = "looking before"
                        look_before(start, session.run, session.assembled, output, session.kernel)
                    progress.phase = "training"
                    deterministic = deterministic_algorithms(start.recipe.training.deterministic, device)
                    with session.kernel.active(), deterministic, start.stop.finishes_step():
                        reached_end = train(session.run, session.state)
                    session.receipt.add("compiled", session.compiled.facts())
                    if reached_end:
                        progress.phase = "export"
                        finish(session)
                    else:
                        _say_stopped(session)
                        code = Stopped.exit_code
                    accelerator.wait_for_everyone()
        output.write_pages()
        ended_well = True
        return code
    finally:
        output.close(wait=ended_well)


@contextmanager
def process_group(start: Start) -> Iterator[Accelerator]:
    """The Accelerator, once the ranks have met. While the block runs, a signal to stop sets `start.stop`."""
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
    """The finished steps that every rank starts from, broadcast from rank 0; None if the run is finished."""
    step = 0
    if claim is not None and claim.checkpoint:
        step = claim.checkpoint.step
    if claim is not None and claim.status == "finished":
        step = -1
    agreed = int(accelerator.reduce(torch.tensor(step, device=accelerator.device), reduction="sum"))
    if agreed < 0:
        return None
    return agreed


def agree_on_recomputation(accelerator: Accelerator, start: Start) -> Start:
    """If `auto` chose: every rank recomputes as much as the rank with the least memory."""
    if not start.recomputation:
        return start
    own = RECOMPUTATIONS.index(start.recipe.training.activation_checkpointing)
    most = int(accelerator.gather(torch.tensor([own], device=accelerator.device)).max())
    if most == own:
        return start
    runs = RECOMPUTATIONS[most]
    training = start.recipe.training.model_copy(update={"activation_checkpointing": runs})
    reason = "another rank's device has less memory"
    line = f"activation checkpointing: {recomputation_in_words(runs)}, because {reason}"
    chosen = start.recomputation | {"runs": runs, "why": reason, "line": line}
    return replace(start, recipe=start.recipe.model_copy(update={"training": training}), recomputation=chosen)


def build(
    start: Start, accelerator: Accelerator, output: RunOutput, progress: Progress, phases: Phases, saves: Saves
) -> Session:
    """Model, optimizer and receipt as of step `progress.step`."""
    recipe, first_step, device, log = start.recipe, progress.step, accelerator.device, output.terminal.log
    with phases("load"):
        below = start.adapter if is_on_top(recipe) else None
        build_it = build_model if below is None else building_on_top(below)
        assembled = assemble(recipe, start.strategy, accelerator, build_it, launch=start.launch)
        check_vocabulary(start.prepared, assembled.unwrapped_model)
        stops = start.prepared.conversation.stops
        if lacking := stop_on(assembled.unwrapped_model, stops.values()):
            names = ", ".join(token for token, number in stops.items() if number in lacking)
            log(f"answers end with {names}: the base's own settings do not stop there; samples, scores and exports do")
        if start.adapter is not None and below is None and first_step == 0:
            start_from(assembled, start.adapter)
        state = restore(recipe, assembled, first_step)
        load_scaler_state(accelerator, state.loss_scaler)
        log(forget_lost_best(recipe, state))
        if first_step == 0:
            state.start_checksums = trained_checksums(assembled)
    give_back_freed_memory()
    output.open_trackers(first_step)
    assembled.model.train()  # DeepSpeed's returns nothing

    def stop_requested() -> bool:  # called once a step
        progress.reached(state.step)
        return bool(start.stop) or saves.failed

    def write_metrics(line: dict[str, Any]) -> None:
        progress.reached(line["step"])
        output.write_metrics(line)

    def save_and_push(state: TrainState) -> None:
        # Every rank takes part in the checksums. A checkpoint in which nothing has changed yet is not pushed.
        push = None
        if recipe.hub.checkpoints is not None and trained_checksums(assembled) != state.start_checksums:
            push = partial(output.push_checkpoint, state.step)
        save(recipe, assembled, state, saves, push)

    parts = StepParts(
        accelerator=accelerator,
        model=assembled.model,
        optimizer=assembled.optimizer,
        objective=objective_of(recipe),
        phases=phases,
        max_grad_norm=recipe.training.max_grad_norm,
        skip_gradient_sync=accumulation_context(accelerator, start.strategy, assembled.model),
        weights=cast_weights(recipe, start.strategy, assembled.unwrapped_model),
        pipeline=assembled.pipeline,
    )
    run = Run(
        recipe=recipe,
        plan=start.plan,
        parts=parts,
        train_rows=start.prepared.train,
        eval_rows=start.prepared.eval,
        eval_sets=start.prepared.eval_sets,
        learning_rate=learning_rate_schedule(recipe.training, start.plan.total_steps),
        terminal=output.terminal,
        stop_requested=stop_requested,
        write_metrics=write_metrics,
        save=save_and_push,
        wait_for_saves=saves.finish,
        score=scoring_of(start, accelerator, assembled, output, parts.weights) if start.scored else None,
    )
    receipt = _begin_receipt(start, accelerator, assembled, output)

    loading = phases.seen
    if recipe.measure_phases:
        for line in phases.lines(state.step):
            run.write_metrics(line)
    phases.take()
    phases.enabled = recipe.measure_phases

    progress.phase = "worst step first"
    decoder = decoder_parts(assembled.unwrapped_model)
    compiled = compile_as_asked(recipe, start.strategy, decoder, device, log)
    computes = receipt.content["dtypes"]["compute"].partition(",")[0]
    kernel = choose_flash_kernel(recipe, device, getattr(torch, computes))
    receipt.add("flash_kernel", kernel.facts())
    log(str(kernel))
    with deterministic_algorithms(recipe.training.deterministic, device):
        update = choose_update(recipe, unwrap_optimizer(assembled.optimizer), device)
    if update is not None:
        update.agree(partial(accelerator.reduce, reduction="sum"), device)
        receipt.add("optimizer_update", update.facts())
        log(str(update))
    return Session(start, assembled, run, state, receipt, output, kernel, compiled, dict(loading))


def scoring_of(
    start: Start, accelerator: Accelerator, assembled: Assembled, output: RunOutput, weights: CastWeights
) -> Callable[[int], dict[str, Any]]:
    """A function that answers the scored rows with the weights after `step` steps, and writes and returns the line."""
    asked, pipeline, device = start.scored, assembled.pipeline, accelerator.device
    assert asked is not None

    def score(step: int) -> dict[str, Any]:
        how = Answering(
            shared=shared_by_all(accelerator, may_share_a_batch(start.probed)),
            device=device,
            ranks=all_ranks(),
            sharded=start.strategy.shards_parameters,
            staged=pipeline is not None,
        )
        with weights.cast(), pipeline.answering(assembled.unwrapped_model) if pipeline else nullcontext():
            answers = generated_answers(
                assembled.unwrapped_model, start.tokenizer, asked, how, output.terminal.progress
            )
        line = score_line(step, scores_on_all(asked, answers, how.ranks))
        output.write_metrics(line)
        output.terminal.log(
            f"step {step}: {score_line_in_words(line)}" if step else f"before: {score_line_in_words(line)}"
        )
        return line

    return score


def _begin_receipt(start: Start, accelerator: Accelerator, assembled: Assembled, output: RunOutput) -> Receipt:
    """Write and print the receipt for the built run. Optimizer state is added after the first update."""
    content = write_receipt(start.recipe, accelerator, assembled, start.strategy)
    content |= {
        "nodes": start.launch.nodes,
        "local_world_size": start.launch.local_world_size,
        "batch": start.plan.facts(start.prepared.train) | steps_of(start.recipe, start.plan.total_steps),
    }
    if start.adapter is not None:
        content["adapter"] = start.adapter.facts()
    if start.writes:
        content["base"] = base_identity(start.recipe.model) | {"covers": COVERS}
        record_base(start.run_dir, content["base"])
    content |= {
        "probe": start.probed,
        "recomputation": start.recomputation,
        "formats": start.formats.facts,
        "data": {"fingerprint": start.prepared.fingerprint, **start.prepared.facts},
    }
    receipt = Receipt(start, content)
    receipt.write()
    lines = [describe(content)]
    if start.formats.line:
        lines.append(start.formats.line)
    if start.recomputation:
        lines.append(start.recomputation["line"])
    if start.adapter is not None:
        lines.append(start.adapter.note(start.recipe))
    output.terminal.log("\n".join([*lines, *start.prepared.notes]))
    call_after_first_step(assembled.optimizer, receipt.add_optimizer_state)
    return receipt


def try_worst_step(session: Session) -> None:
    """Compare the parts chosen for speed with the library's modules, then try the step that takes most memory.

    It leaves weights and optimizer as they were. Layers are compiled in it.
    """
    start, run, receipt, compiled = session.start, session.run, session.receipt, session.compiled
    device, deterministic = run.parts.accelerator.device, start.recipe.training.deterministic

    with deterministic_algorithms(deterministic, device), measured_phases(run.parts.phases) as compared:
        guard = compare_fast_paths(run, session.assembled.unwrapped_model, compiled, session.kernel)
    session.measured.update(compared)
    receipt.add("guard", guard.facts())
    if guard.left_off:
        receipt.add("flash_kernel", session.kernel.facts())
        for name, facts in computed_layers(run.parts.accelerator, session.assembled).items():
            receipt.add(name, facts)

    try:
        with session.kernel.active(), deterministic_algorithms(deterministic, device):
            worst = worst_step_first(
                run,
                lambda: save_temporary(start.recipe, session.assembled),
                lambda folder: restore_temporary(session.assembled, folder),
            )
    finally:
        if start.writes:
            remove_temporary(start.recipe)
    session.measured.update(worst.phases)
    give_back_freed_memory()
    give_back_cached_memory(device)
    run.terminal.log(str(worst))
    receipt.add("worst_step_first", worst.facts())
    compiled.agree(partial(run.parts.accelerator.reduce, reduction="sum"), device)
    run.terminal.log(str(compiled))
    receipt.add("compiled", compiled.facts())
    receipt.add("memory", memory_facts(plan_request(start), session.measured, device))


def compare_with_reference(session: Session) -> None:
    """Give an objective on preferences the log-probabilities of its reference."""
    start, run = session.start, session.run
    deterministic = deterministic_algorithms(start.recipe.training.deterministic, run.parts.accelerator.device)
    with session.kernel.active(), deterministic:
        facts = find_reference(run, start, session.assembled.unwrapped_model, session.state.step)
    if facts is not None:
        session.receipt.add("reference", facts)


def _say_stopped(session: Session) -> None:
    start, step = session.start, session.state.step
    command = mark_run(start.run_dir, "stopped", step=step) if start.writes else ""
    line = f"stopped and saved at step {step}; continue with:\n  {command}"
    session.output.terminal.log(line)
    if start.launch.is_main:
        repeat_after_launcher(line)


def finish(session: Session) -> None:
    """Answers after training, the export, and the last lines."""
    start, state, assembled, output = session.start, session.state, session.assembled, session.output
    log = output.terminal.log
    exported = weights_to_export(start.recipe, assembled, state)
    unchanged = unchanged_tensors(assembled, state.start_checksums)
    session.receipt.add("change", {"unchanged_tensors": unchanged})
    log(describe_change(unchanged, state.start_checksums))
    write_samples(start, session.run, assembled, output, when="after", step=state.step)
    folder = export(start.recipe, assembled, start.tokenizer, write=start.writes)
    if start.writes:
        memory = memory_facts(plan_request(start), session.measured, session.run.parts.accelerator.device)
        session.receipt.add("memory", memory)
        log(describe_memory(memory))
        session.receipt.add("export", exported.as_json())
        mark_run(start.run_dir, "finished", step=state.step, exported=exported.as_json())
        log(describe_exported(exported, state))
        if start.recipe.lora is None:
            for line in untrained_in_words(start.recipe.model, decoder_parts(assembled.unwrapped_model)):
                log(line)
        if start.recipe.preferences is not None:
            facts = read_run(start.run_dir, start.recipe)
            rows = start.recipe.training.global_batch_size
            log("\n".join(warnings_of(facts.trained(), facts.exported_eval(), rows)))
        run = str(start.run_dir)
        log(f"finished: {folder}\ntalk to it: {shlex.join(['finetune', 'chat', run])}")
        log(f"how good is it, and what was forgotten: {shlex.join(['finetune', 'eval', run, '--general'])}")
        log(f"serve it: {shlex.join(['finetune', 'export', run, '--for', 'ollama'])}")
