"""The last two of a training's five parts: `build` makes model, optimizer and receipt, and `train` takes the steps.

    session       meets the other ranks, turns stop signals into a flag, runs watchdog and saves, explains errors
      build       model, optimizer, receipt, schedule and output, as of the first step           -> Built
      train       worst step, reference, answers before, the loop, export and answers after      -> Ended

`refuse`, `choose` and `prepare` come before (training/start.py). finetune/train.py calls all five.
"""

from __future__ import annotations

import math
import shlex
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from accelerate import Accelerator

from finetune.architecture.compiled.layers import CompiledLayers, compile_as_asked
from finetune.architecture.flash_kernels import FlashKernel, choose_flash_kernel, widest_head
from finetune.base.identity import COVERS, base_identity, base_in_words, is_same_base
from finetune.errors import EnvironmentMismatch, Stopped
from finetune.generation.generate import may_share_a_batch, penalties_of, stop_on
from finetune.launch.cpu_memory import give_back_freed_memory
from finetune.launch.determinism import deterministic_algorithms
from finetune.launch.launcher import repeat_after_launcher
from finetune.launch.rendezvous import rendezvous
from finetune.launch.signals import grace_period, stop_on_signals
from finetune.measure.out_of_memory import memory_of
from finetune.measure.phases import Phase, Phases, give_back_cached_memory, peak_of
from finetune.measure.units import GIB
from finetune.model.build import decoder_parts
from finetune.model.dtypes import COMPUTE
from finetune.model.optimizer import call_after_first_step, unwrap_optimizer
from finetune.ranks.heartbeat import clear_heartbeats
from finetune.recipe.mixed_precision import BASE_FORMAT, PRECISION, ChosenFormats
from finetune.recipe.optimizers import checkpoint_bytes
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.base import steps_between
from finetune.recipe.sections.preferences import warnings_of
from finetune.recipe.sections.training import RECOMPUTATIONS
from finetune.run_folder.background import Saves, saves_in_background
from finetune.run_folder.base_parts import untrained_in_words
from finetune.run_folder.checkpoint import checkpoint_steps
from finetune.run_folder.facts import read_run
from finetune.run_folder.folder import Claim, mark_run, record_base
from finetune.run_folder.save_restore import (
    describe_exported,
    export,
    forget_lost_best,
    restore,
    weights_to_export,
)
from finetune.run_folder.train_state import TrainState
from finetune.run_folder.trained_tensors import describe_change, refuse_unchanged, trained_checksums
from finetune.strategies.accelerator import build_accelerator, holds_on_all, load_scaler_state, use_all_cores
from finetune.strategies.assemble import Assembled, assemble, check_vocabulary
from finetune.strategies.pieces import all_ranks
from finetune.strategies.receipt import computed_layers, describe, write_receipt
from finetune.training.cast_weights import cast_weights
from finetune.training.held_state import hold_state, planned_save, remove_temporary
from finetune.training.loop import take_steps
from finetune.training.memory_report import describe_memory, memory_facts, out_of_memory_explained, plan_request
from finetune.training.objectives import objective_of
from finetune.training.run import Checkpoints, Forwards, Run, StepParts, steps_of
from finetune.training.run_output import Receipt, RunOutput
from finetune.training.samples import look_before, write_samples
from finetune.training.start import BASE_FORMATS, Start
from finetune.training.watchdog import Progress, watchdog
from finetune.training.worst_step import compare_fast_paths, measured_phases, worst_step_first
from finetune.wording import recomputation_in_words


@dataclass(frozen=True)
class Session:
    """What lives as long as the process group."""

    start: Start
    accelerator: Accelerator
    output: RunOutput
    progress: Progress
    phases: Phases
    saves: Saves


@dataclass(frozen=True)
class Built:
    """A training that is ready for its first step."""

    start: Start
    assembled: Assembled
    run: Run
    state: TrainState
    receipt: Receipt
    kernel: FlashKernel  # that computes the steps' packed attention
    compiled: CompiledLayers
    loading: Mapping[str, Phase]  # measured while the model was loaded


@dataclass(frozen=True)
class Ended:
    """How a training ended, if no error ended it."""

    step: int  # the last one
    reached_end: bool  # else a signal stopped it

    @property
    def exit_code(self) -> int:
        return 0 if self.reached_end else Stopped.exit_code


@contextmanager
def session(start: Start, output: RunOutput) -> Iterator[Session | None]:
    """Everything around `build` and `train`. None: this run is finished, and a line says so.

    Every rank enters it. A failure is written to run_state.json. Too little memory becomes DoesNotFit.
    """
    with process_group(start) as accelerator:
        if start.writes and start.launch.world_size > 1:
            clear_heartbeats(start.run_dir)
        first_step = _agree_on_first_step(accelerator, start.claim)
        if first_step is None:
            again = "to train again: training.resume=never, or another output_dir"
            output.terminal.log(f"{start.run_dir}: this run is finished; {again}")
            yield None
            return
        check_same_formats(accelerator, start.recipe, start.formats)
        start = agree_on_rows(accelerator, agree_on_recomputation(accelerator, start))
        start = agree_on_reduction(accelerator, start)
        device, progress = accelerator.device, Progress(step=first_step)
        output.terminal.memory_of = peak_of(device)
        # Loading and the worst step are always measured. On CUDA this is free, because the allocator counts its peak.
        # On other devices each operation is watched.
        phases = Phases(device, enabled=True, watch=start.recipe.measure_phases or device.type != "cuda")
        with watchdog(start.recipe, start.launch, progress) as meeting:
            if meeting.apart:
                refuse_apart(start, meeting.apart)
                start = replace(start, recipe=start.recipe.model_copy(update={"output_dir": str(meeting.run_dir)}))
                output.terminal.log(
                    f"{len(meeting.apart)} of {start.launch.world_size} ranks do not see {meeting.run_dir.absolute()}: "
                    "their checkpoint pieces come here over the network"
                )
            with (
                out_of_memory_explained(start, progress, phases),
                saves_in_background(start.recipe, output.terminal.log, meeting.apart) as saves,
            ):
                yield Session(start, accelerator, output, progress, phases, saves)
                accelerator.wait_for_everyone()


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
            if start.strategy.uses_engine:
                from finetune.strategies.zero import release_engine

                release_engine(accelerator)
            accelerator.end_training()
            if start.writes and start.strategy.uses_engine:
                from finetune.strategies.zero import remove_swap

                remove_swap(start.recipe)


def _agree_on_first_step(accelerator: Accelerator, claim: Claim | None) -> int | None:
    """The number of finished steps, which rank 0 tells the other ranks; None if the run is finished."""
    step = 0
    if claim is not None and claim.checkpoint:
        step = claim.checkpoint.step
    if claim is not None and claim.status == "finished":
        step = -1
    agreed = int(accelerator.reduce(torch.tensor(step, device=accelerator.device), reduction="sum"))
    if agreed < 0:
        return None
    return agreed


def check_same_formats(accelerator: Accelerator, recipe: Recipe, chosen: ChosenFormats) -> None:
    """Every rank computes in the same format. Raises EnvironmentMismatch if `auto` chose differently on two ranks.

    With several ranks this is a collective. They read the same recipe, so all take part or none.
    """
    if accelerator.num_processes == 1 or not chosen.keys:
        return
    names = [f"{one} {two}" for one in COMPUTE for two in BASE_FORMATS]
    own = names.index(f"{recipe.training.mixed_precision} {recipe.model.dtype}")
    found = accelerator.gather(torch.tensor([own], device=accelerator.device)).tolist()
    for rank, other in enumerate(found):
        if other != found[0]:
            # A run that has begun keeps its formats in its identity. A new one takes a format that no CPU emulates.
            precision, base = names[found[0]].split() if chosen.kept else ("no", "float32")
            raise EnvironmentMismatch(
                f"{' and '.join(chosen.keys)}: auto chose {names[found[0]]} on rank 0 and {names[other]} on rank "
                f"{rank}, whose devices differ; set {PRECISION}={precision} {BASE_FORMAT}={base} for all ranks"
            )


def refuse_apart(start: Start, apart: Mapping[int, int]) -> None:
    """Raise EnvironmentMismatch, on every rank, if the ranks `apart` would not train rank 0's run.

    They did not read the base and the formats that it began with in its folder, and may have other files.
    """
    for what, device in start.strategy.offload_devices.items():
        key = f"offload_{what}_nvme_path"
        if device == "nvme" and not start.strategy.section("deepspeed_config").get(key):
            raise EnvironmentMismatch(
                f"output_dir: rank {min(apart)} does not see rank 0's folder, where {what} offload keeps its files; "
                f"set {key} in accelerate_config's deepspeed_config to a folder of each machine's own disk"
            )
    own = (base_identity(start.recipe.model), start.prepared.fingerprint, start.adapter and start.adapter.sha256)
    everyone = all_ranks().gather((socket.gethostname(), *own))
    _, base, rows, adapter = everyone[0]
    for rank, (host, other_base, other_rows, other_adapter) in enumerate(everyone):
        problem = None
        if is_same_base(base, other_base) is False:
            problem = f"model: {base_in_words(base)} on rank 0, {base_in_words(other_base)}"
        elif rows != other_rows:
            problem = f"data: rows {rows[:12]} on rank 0, {other_rows[:12]}"
        elif adapter != other_adapter:
            problem = f"model.adapter: {str(adapter)[:12]} on rank 0, {str(other_adapter)[:12]}"
        if problem is not None:
            raise EnvironmentMismatch(f"{problem} on rank {rank}, {host}; put rank 0's files there")


def refuse_without_room(start: Start, trained: int) -> None:
    """Raise EnvironmentMismatch, on every rank, if rank 0's disk has no room for checkpoints of `trained` parameters.

    All pieces go there. While one is written, as many are there as the run keeps.
    """
    problem = None
    if start.writes:
        recipe, size = start.recipe, checkpoint_bytes(start.recipe.training, trained)
        there, total = len(checkpoint_steps(start.run_dir)), start.plan.total_steps
        saves = math.ceil(total / steps_between(recipe.save_steps, total))
        most = min(recipe.save_total_limit + recipe.training.exports_best + 1, there + saves)
        needed, free = max(1, most - there) * size, shutil.disk_usage(start.run_dir).free
        if needed > free:
            problem = (
                f"output_dir: checkpoints take {needed / GIB:,.3f} GiB more on rank 0's disk, where {free / GIB:,.3f} "
                "are free, because other machines do not see that folder and send their pieces; put output_dir on "
                "storage that every machine mounts, or keep fewer: save_total_limit=1, and run.storage for a copy"
            )
    problem = all_ranks().gather(problem)[0]
    if problem is not None:
        raise EnvironmentMismatch(problem)


def agree_on_recomputation(accelerator: Accelerator, start: Start) -> Start:
    """If `auto` chose, make every rank recompute as much as the rank with the least memory."""
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
    chosen = {**start.recomputation, "runs": runs, "why": reason, "line": line}
    return replace(start, recipe=start.recipe.model_copy(update={"training": training}), recomputation=chosen)


def agree_on_rows(accelerator: Accelerator, start: Start) -> Start:
    """If `auto` chose: every rank takes as many rows as the rank with the least memory."""
    if not start.rows:
        return start
    own = start.plan.per_device_batch_size
    least = int(accelerator.gather(torch.tensor([own], device=accelerator.device)).min())
    if least == own:
        return start
    from finetune.closed_form.recomputation import rows_facts

    training = start.recipe.training.model_copy(update={"per_device_batch_size": least})
    return replace(
        start,
        recipe=start.recipe.model_copy(update={"training": training}),
        plan=replace(start.plan, per_device_batch_size=least),
        rows=rows_facts(least, "another rank's device has less memory"),
    )


def agree_on_reduction(accelerator: Accelerator, start: Start) -> Start:
    """FSDP2 reduces gradients once a step if all of them fit unsharded on every rank. Every rank calls it."""
    if not start.strategy.shards_modules:
        return start
    from finetune.closed_form.recomputation import Reduction, choose_reduction

    ranks = start.launch.local_world_size
    memory = start.gpus.memory if start.gpus else memory_of(accelerator.device).total
    chosen = choose_reduction(start.recipe, start.strategy, start.gpus, ranks=ranks, memory=memory)
    once = holds_on_all(accelerator, chosen is not None and chosen.once)
    if chosen is None:
        return start
    if chosen.once and not once:
        chosen = Reduction(False, "another rank's device has less memory")
    return replace(start, strategy=replace(start.strategy, keeps_gradients=once), reduction=chosen.facts)


def build(opened: Session) -> Built:
    """Model, optimizer and receipt as of the first step. Every rank calls it."""
    start, accelerator, output, phases = opened.start, opened.accelerator, opened.output, opened.phases
    recipe, first_step, log = start.recipe, opened.progress.step, opened.output.terminal.log
    if recipe.preferences is not None:
        from finetune.training.reference import keep_second_model

        keep_second_model(start, accelerator, output.terminal, phases)
    with phases("load"):
        assembled, state = _load(opened)
    give_back_freed_memory()
    output.open_trackers(first_step)
    assembled.model.train()  # not chained: DeepSpeed's train() returns None
    parts = StepParts(
        accelerator=accelerator,
        model=assembled.model,
        optimizer=assembled.optimizer,
        objective=objective_of(recipe),
        phases=phases,
        max_grad_norm=recipe.training.max_grad_norm,
        strategy=start.strategy,
        weights=cast_weights(recipe, start.strategy, assembled.unwrapped_model),
        pipeline=assembled.pipeline,
    )
    scorer = None
    if start.scored is not None:
        from finetune.training.row_scorer import RowScorer

        shared, sharded = may_share_a_batch(start.probed), start.strategy.shards_parameters
        scorer = RowScorer(start.scored, start.tokenizer, shared, sharded, parts, assembled, output)
    run = Run(
        recipe=recipe,
        plan=start.plan,
        parts=parts,
        train_rows=start.prepared.train,
        eval_rows=start.prepared.eval,
        eval_sets=start.prepared.eval_sets,
        schedule=start.schedule,
        output=output,
        stop=start.stop,
        progress=opened.progress,
        checkpoints=Checkpoints(recipe, assembled, opened.saves, output),
        scorer=scorer,
    )
    receipt = _begin_receipt(start, accelerator, assembled, output)
    loading = dict(phases.seen)
    if recipe.measure_phases:
        for line in phases.lines(state.step):
            run.write_metrics(line)
    phases.take()
    phases.enabled = recipe.measure_phases

    opened.progress.phase = "worst step first"
    decoder = decoder_parts(assembled.unwrapped_model)
    compiled = compile_as_asked(recipe, start.strategy, decoder, accelerator.device, log)
    computes = receipt.content["dtypes"]["compute"].partition(",")[0]
    kernel = choose_flash_kernel(recipe, accelerator.device, getattr(torch, computes), widest_head(decoder.config))
    receipt.add("flash_kernel", kernel.facts())
    log(str(kernel))
    if accelerator.device.type == "cuda" and recipe.training.compile is not False and computes != "float32":
        from finetune.architecture.compiled.loss_kernel import use_loss_kernel

        words = decoder.config.get_text_config().vocab_size
        with deterministic_algorithms(recipe.training.deterministic, accelerator.device):
            facts = use_loss_kernel(recipe, words, accelerator.device, getattr(torch, computes))
        receipt.add("loss_kernel", facts)
    if hasattr(unwrap_optimizer(assembled.optimizer), "update_range"):  # an optimizer of the kit's own
        from finetune.model.optimizers.fused_update import choose_update

        with deterministic_algorithms(recipe.training.deterministic, accelerator.device):
            update = choose_update(recipe, unwrap_optimizer(assembled.optimizer), accelerator.device)
        if update is not None:
            update.agree(partial(accelerator.reduce, reduction="sum"), accelerator.device)
            receipt.add("optimizer_update", update.facts())
            log(str(update))
    return Built(start, assembled, run, state, receipt, kernel, compiled, loading)


def _load(opened: Session) -> tuple[Assembled, TrainState]:
    """The model as of the first step, and the state that the loop goes on from."""
    start, accelerator, first_step = opened.start, opened.accelerator, opened.progress.step
    recipe, log = start.recipe, opened.output.terminal.log
    assembled = assemble(recipe, start.strategy, accelerator, launch=start.launch)
    check_vocabulary(assembled.unwrapped_model, start.prepared.facts["largest_token_id"])
    stops = start.prepared.conversation.stops
    if penalties := penalties_of(assembled.unwrapped_model):
        words = ", ".join(f"{name}: {value}" for name, value in penalties.items())
        log(f"the base's {words} would change greedy answers: samples, scores and exports leave that out")
    if lacking := stop_on(assembled.unwrapped_model, stops.values()):
        names = ", ".join(token for token, number in stops.items() if number in lacking)
        log(f"answers end with {names}: the base's own settings do not stop there; samples, scores and exports do")
    if start.adapter is not None and first_step == 0:
        from finetune.training.start_adapter import start_from

        start_from(assembled, start.adapter)
    state = restore(recipe, assembled, first_step, opened.saves.ranks)
    load_scaler_state(accelerator, state.loss_scaler)
    log(forget_lost_best(recipe, state))
    if first_step == 0:
        state.start_checksums = trained_checksums(assembled)
    return assembled, state


def _begin_receipt(start: Start, accelerator: Accelerator, assembled: Assembled, output: RunOutput) -> Receipt:
    """Write and print the receipt for the built run. Optimizer state is added after the first update."""
    content = write_receipt(start.recipe, accelerator, assembled, start.strategy)
    content |= {
        "nodes": start.launch.nodes,
        "local_world_size": start.launch.local_world_size,
        "batch": start.plan.facts(start.prepared.train) | steps_of(start.recipe, start.plan.total_steps),
    }
    if start.gpus is not None:
        content["counted_memory"] = start.gpus.memory  # of this rank's GPU, by `auto`
    if start.adapter is not None:
        content["adapter"] = start.adapter.facts()
    if start.writes:
        content["base"] = base_identity(start.recipe.model) | {"covers": COVERS}
        record_base(start.run_dir, content["base"])
    content |= {
        "probe": start.probed,
        "recomputation": start.recomputation,
        "rows": start.rows,
        "reduction": start.reduction,
        "formats": start.formats.facts,
        "data": {"fingerprint": start.prepared.fingerprint, **start.prepared.facts},
    }
    receipt = Receipt(start.recipe, start.strategy, content, writes=start.writes)
    receipt.write()
    lines = [describe(content)]
    if start.formats.line:
        lines.append(start.formats.line)
    lines += [facts["line"] for facts in (start.rows, start.recomputation, start.reduction) if facts]
    if start.adapter is not None:
        lines.append(start.adapter.note(start.recipe))
    output.terminal.log("\n".join([*lines, *start.prepared.notes]))
    call_after_first_step(assembled.optimizer, receipt.add_optimizer_state)
    return receipt


def train(built: Built) -> Ended:
    """Train a built run, and export it if no signal stops it. Every rank calls it."""
    start, run, state, progress = built.start, built.run, built.state, built.run.progress
    log, device = run.output.terminal.log, run.parts.accelerator.device
    measured = dict(built.loading) | try_worst_step(built)
    progress.phase = "reference"
    if start.recipe.preferences is not None:
        run = _with_reference(built)
    if state.step == 0:
        progress.phase = "looking before"
        look_before(start, run, built.assembled, built.kernel)
    progress.phase = "training"
    deterministic = deterministic_algorithms(start.recipe.training.deterministic, device)
    with built.kernel.active(), deterministic, start.stop.finishes_step():
        reached_end = take_steps(run, state)
    built.receipt.add("compiled", built.compiled.facts())
    if reached_end:
        progress.phase = "export"
        _finish(built, run, measured)
    else:
        reason, command = start.stop.reason, ""
        if start.writes:
            command = mark_run(start.run_dir, "stopped", step=state.step, reason=reason)
        line = f"stopped and saved at step {state.step} ({reason}); continue with:\n  {command}"
        log(line)
        if start.launch.is_main:
            repeat_after_launcher(line)
    return Ended(state.step, reached_end)


def try_worst_step(built: Built) -> dict[str, Phase]:
    """Compare the parts chosen for speed with the library's modules, then try the step that takes most memory.

    It leaves weights and optimizer as they were. Layers are compiled during that step. Returns its phases' costs.
    """
    start, run, receipt, compiled = built.start, built.run, built.receipt, built.compiled
    accelerator, log = run.parts.accelerator, run.output.terminal.log
    assert run.checkpoints is not None
    ranks = run.checkpoints.saves.ranks
    device, deterministic = accelerator.device, start.recipe.training.deterministic

    with deterministic_algorithms(deterministic, device), measured_phases(run.parts.phases) as measured:
        guard = compare_fast_paths(Forwards.of(run), built.assembled.unwrapped_model, compiled, built.kernel)
    receipt.add("guard", guard.facts())
    if ranks.apart:
        refuse_without_room(start, receipt.content["parameters"]["trained"])
    if guard.left_off:
        receipt.add("flash_kernel", built.kernel.facts())
        for name, facts in computed_layers(accelerator, built.assembled).items():
            receipt.add(name, facts)

    try:
        with built.kernel.active(), deterministic_algorithms(deterministic, device):
            on_host = device.type != "cuda" or start.strategy.offloaded
            worst = worst_step_first(run, lambda: hold_state(start.recipe, built.assembled, ranks, on_host=on_host))
    finally:
        if start.writes:
            remove_temporary(start.recipe)
    measured |= worst.phases
    give_back_freed_memory()
    give_back_cached_memory(device)
    log(str(worst))
    if start.writes and (grace := grace_period()) is not None:
        saved = checkpoint_bytes(start.recipe.training, receipt.content["parameters"]["trained"])
        planned = planned_save(start.run_dir, saved, *grace)
        log(planned.warning)
        receipt.add("stop", planned.facts())
    receipt.add("worst_step_first", worst.facts())
    compiled.agree(partial(accelerator.reduce, reduction="sum"), device)
    log(str(compiled))
    receipt.add("compiled", compiled.facts())
    receipt.add("memory", memory_facts(plan_request(start), {**built.loading, **measured}, device))
    return measured


def _with_reference(built: Built) -> Run:
    """The run, with an objective that knows its reference's log-probabilities."""
    from finetune.training.reference import find_reference

    start, run = built.start, built.run
    deterministic = deterministic_algorithms(start.recipe.training.deterministic, run.parts.accelerator.device)
    began = time.monotonic()
    with built.kernel.active(), deterministic:
        found = find_reference(run, start, built.assembled.unwrapped_model, built.state.step, built.compiled)
    if found is None:
        return run
    reference, facts = found
    built.receipt.add("reference", {**facts, "seconds": round(time.monotonic() - began, 1)})
    return replace(run, parts=replace(run.parts, objective=objective_of(start.recipe, reference)))


def _finish(built: Built, run: Run, measured: Mapping[str, Phase]) -> None:
    """Write the answers after training, export, and print the last lines."""
    start, state, assembled, receipt = built.start, built.state, built.assembled, built.receipt
    log = run.output.terminal.log
    assert run.checkpoints is not None
    saves = run.checkpoints.saves
    if saves.ranks.apart:
        saves.wait()  # it sends files to rank 0, and a best checkpoint's go the other way
    exported = weights_to_export(start.recipe, assembled, state, saves.ranks)
    unchanged = refuse_unchanged(trained_checksums(assembled), state.start_checksums)
    receipt.add("change", {"unchanged_tensors": unchanged})
    log(describe_change(unchanged, state.start_checksums))
    write_samples(start, run, assembled, when="after", step=state.step)
    folder = export(start.recipe, assembled, start.tokenizer, write=start.writes)
    if not start.writes:
        return
    memory = memory_facts(plan_request(start), measured, run.parts.accelerator.device)
    receipt.add("memory", memory)
    log(describe_memory(memory))
    receipt.add("export", exported.as_json())
    mark_run(start.run_dir, "finished", step=state.step, exported=exported.as_json())
    log(describe_exported(exported, state))
    if start.recipe.lora is None:
        for line in untrained_in_words(start.recipe.model, decoder_parts(assembled.unwrapped_model)):
            log(line)
    if start.recipe.preferences is not None:
        facts = read_run(start.run_dir, start.recipe)
        rows = start.recipe.training.global_batch_size
        log("\n".join(warnings_of(facts.trained(), facts.exported_eval(), rows)))
    run_dir = str(start.run_dir)
    log(f"finished: {folder}\ntalk to it: {shlex.join(['finetune', 'chat', run_dir])}")
    log(f"how good is it, and what was forgotten: {shlex.join(['finetune', 'eval', run_dir, '--general'])}")
    log(f"serve it: {shlex.join(['finetune', 'export', run_dir, '--for', 'ollama'])}")
