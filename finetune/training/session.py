"""The last two of a training's five parts: `build` makes model, optimizer and receipt, and `train` takes the steps.

    session       meets the other ranks and agrees with them, turns stop signals into a flag, runs watchdog and saves
      build       model, optimizer, receipt, schedule and output, as of the first step           -> Built
      train       worst step, reference, answers before, the loop, export and answers after      -> exit code

`refuse`, `choose` and `prepare` come before (training/start.py). finetune/train.py calls all five.
"""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

from finetune.architecture.compiled.layers import CompiledLayers, compile_as_asked
from finetune.architecture.flash_kernels import FlashKernel, choose_flash_kernel, widest_head
from finetune.base.identity import COVERS, base_identity
from finetune.errors import EnvironmentMismatch, Stopped
from finetune.generation.settings import penalties_of, stop_on
from finetune.launch.cpu_memory import give_back_freed_memory
from finetune.launch.determinism import deterministic_algorithms
from finetune.launch.launcher import repeat_after_launcher
from finetune.launch.plan_request import PlanRequest
from finetune.launch.rendezvous import rendezvous
from finetune.launch.signals import grace_period, stop_on_signals
from finetune.measure.phases import Phase, Phases, give_back_cached_memory, peak_of
from finetune.model.optimizer import call_after_first_step, unwrap_optimizer
from finetune.ranks.heartbeat import clear_heartbeats
from finetune.recipe.optimizers import checkpoint_bytes
from finetune.recipe.sections.base import steps_between
from finetune.recipe.sections.preferences import warnings_of
from finetune.run_folder.background import Saves, saves_in_background
from finetune.run_folder.checkpoint import checkpoint_steps
from finetune.run_folder.facts import read_run
from finetune.run_folder.folder import mark_run, record_base
from finetune.run_folder.save_restore import (
    describe_exported,
    export,
    forget_lost_best,
    restore,
    weights_to_export,
)
from finetune.run_folder.train_state import TrainState
from finetune.run_folder.trained_tensors import describe_change, refuse_unchanged, trained_checksums
from finetune.strategies.accelerator import build_accelerator, load_scaler_state, use_all_cores
from finetune.strategies.assemble import Assembled, assemble, check_vocabulary
from finetune.strategies.pieces import all_ranks
from finetune.strategies.receipt import Receipt, computed_layers, describe, receipt_content
from finetune.training.agreement import Agreed, own_choices, refuse_apart, settle_choices
from finetune.training.cast_weights import cast_weights
from finetune.training.held_state import planned_save
from finetune.training.loop import take_steps
from finetune.training.memory_report import describe_memory, memory_facts, out_of_memory_explained
from finetune.training.objectives import objective_of
from finetune.training.run import Checkpoints, Forwards, Run, StepParts, steps_of
from finetune.training.run_output import RunOutput
from finetune.training.samples import look_before, write_samples
from finetune.training.start import Start
from finetune.training.watchdog import Progress, watchdog
from finetune.training.worst_step import compare_fast_paths, worst_step_first
from finetune.wording import GIB


@dataclass(frozen=True)
class Session:
    """What lives as long as the process group."""

    agreed: Agreed
    accelerator: Accelerator
    output: RunOutput
    progress: Progress
    phases: Phases
    request: PlanRequest  # the worst step, as the planner needs it
    saves: Saves


@dataclass(frozen=True)
class Built:
    """A training that is ready for its first step."""

    agreed: Agreed
    assembled: Assembled
    run: Run
    state: TrainState
    receipt: Receipt
    kernel: FlashKernel  # that computes the steps' packed attention
    compiled: CompiledLayers
    request: PlanRequest  # the worst step, as the planner needs it
    loading: Mapping[str, Phase]  # measured while the model was loaded


@contextmanager
def session(start: Start, output: RunOutput) -> Iterator[Session | None]:
    """Everything around `build` and `train`. None: this run is finished, and a line says so.

    Every rank enters it. A failure is written to run_state.json. Too little memory becomes DoesNotFit.
    """
    recipe, launch = start.choices.recipe, start.choices.checked.launch
    with process_group(start) as accelerator:
        if start.writes and launch.world_size > 1:
            clear_heartbeats(Path(recipe.run_dir))
        everyone = all_ranks().gather(own_choices(start))
        first_step = everyone[0].first_step
        if first_step is None:
            again = "to train again: training.resume=never, or another output_dir"
            output.terminal.say(f"{Path(recipe.run_dir)}: this run is finished; {again}")
            yield None
            return
        device, progress = accelerator.device, Progress(step=first_step)
        output.terminal.memory_of = peak_of(device)
        # Loading and the worst step are always measured. On CUDA this is free, because the allocator counts its peak.
        # On other devices each operation is watched.
        phases = Phases(device, enabled=True, watch=recipe.measure_phases or device.type != "cuda")
        with watchdog(recipe, launch, progress) as meeting:
            agreed = settle_choices(start, everyone, str(meeting.run_dir) if meeting.apart else recipe.run_dir)
            if meeting.apart:
                refuse_apart(agreed, meeting.apart)
                output.terminal.say(
                    f"{len(meeting.apart)} of {launch.world_size} ranks do not see {meeting.run_dir.absolute()}: "
                    "their checkpoint pieces come here over the network"
                )
            with (
                out_of_memory_explained(agreed, progress, phases) as request,
                saves_in_background(recipe, output.terminal.say, meeting.apart) as saves,
            ):
                yield Session(agreed, accelerator, output, progress, phases, request, saves)
                accelerator.wait_for_everyone()


@contextmanager
def process_group(start: Start) -> Iterator[Accelerator]:
    """The Accelerator, once the ranks have met. While the block runs, a signal to stop sets `start.stop`."""
    recipe, launch, strategy = start.choices.recipe, start.choices.checked.launch, start.choices.checked.strategy
    with rendezvous(launch):
        accelerator = build_accelerator(recipe, strategy, launch)
    use_all_cores(launch, accelerator.device, offloaded=strategy.offloaded)
    with stop_on_signals(start.stop, announce=launch.is_main):
        try:
            yield accelerator
        finally:
            if strategy.uses_engine:
                from finetune.strategies.zero import release_engine

                release_engine(accelerator)
            accelerator.end_training()
            if start.writes and strategy.uses_engine:
                from finetune.strategies.zero import remove_swap

                remove_swap(recipe)


def refuse_without_room(agreed: Agreed, size: int) -> None:
    """Raise EnvironmentMismatch, on every rank, if rank 0's disk has no room for checkpoints of `size` bytes.

    All pieces go there. While one is written, as many are there as the run keeps.
    """
    problem = None
    if agreed.writes:
        recipe, total = agreed.recipe, agreed.plan.total_steps
        kept = len(checkpoint_steps(agreed.run_dir))
        saves = math.ceil(total / steps_between(recipe.save_steps, total))
        most = min(recipe.save_total_limit + recipe.training.exports_best + 1, kept + saves)
        needed, free = max(1, most - kept) * size, shutil.disk_usage(agreed.run_dir).free
        if needed > free:
            problem = (
                f"output_dir: checkpoints take {needed / GIB:,.3f} GiB more on rank 0's disk, where {free / GIB:,.3f} "
                "are free, because other machines do not see that folder and send their pieces; put output_dir on "
                "storage that every machine mounts, or keep fewer: save_total_limit=1, and run.storage for a copy"
            )
    problem = all_ranks().gather(problem)[0]
    if problem is not None:
        raise EnvironmentMismatch(problem)


def build(opened: Session) -> Built:
    """Model, optimizer and receipt as of the first step. Every rank calls it."""
    agreed, accelerator, output, phases = opened.agreed, opened.accelerator, opened.output, opened.phases
    recipe, first_step, say = agreed.recipe, opened.progress.step, opened.output.terminal.say
    if recipe.preferences is not None:
        from finetune.training.reference import keep_second_model

        keep_second_model(agreed, accelerator, output.terminal, phases)
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
        strategy=agreed.strategy,
        weights=cast_weights(recipe, agreed.strategy, assembled.unwrapped_model),
        pipeline=assembled.pipeline,
    )
    scorer = None
    if agreed.scored is not None:
        from finetune.training.row_scorer import RowScorer

        scorer = RowScorer(agreed, parts, assembled, output)
    run = Run(
        recipe=recipe,
        plan=agreed.plan,
        parts=parts,
        train_rows=agreed.prepared.train,
        eval_rows=agreed.prepared.eval,
        eval_sets=agreed.prepared.eval_sets,
        schedule=agreed.schedule,
        output=output,
        stop=agreed.stop,
        progress=opened.progress,
        checkpoints=Checkpoints(recipe, assembled, opened.saves, output),
        scorer=scorer,
    )
    receipt = _begin_receipt(agreed, accelerator, assembled, output)
    loading = dict(phases.seen)
    if recipe.measure_phases:
        for line in phases.lines(state.step):
            output.write_metrics(line)
    phases.take()
    phases.enabled = recipe.measure_phases

    opened.progress.phase = "worst step first"
    call_after_first_step(assembled.optimizer, receipt.add_optimizer_state)
    decoder, device, optimizer = assembled.decoder, accelerator.device, unwrap_optimizer(assembled.optimizer)
    compiled = compile_as_asked(recipe, agreed.strategy, decoder, device, say)
    computes: torch.dtype = getattr(torch, receipt.content["dtypes"]["compute"].partition(",")[0])
    kernel = choose_flash_kernel(recipe, device, computes, widest_head(decoder.config))
    receipt.add("flash_kernel", kernel.facts())
    say(str(kernel))
    with deterministic_algorithms(recipe.training.deterministic, device):
        if device.type == "cuda" and recipe.training.compile is not False and computes != torch.float32:
            from finetune.architecture.compiled.loss_kernel import use_loss_kernel

            words = decoder.config.get_text_config().vocab_size
            receipt.add("loss_kernel", use_loss_kernel(recipe, words, device, computes))
        if hasattr(optimizer, "update_range"):  # an optimizer of the kit's own
            from finetune.model.optimizers.fused_update import choose_update

            update = choose_update(recipe, optimizer, device)
            if update is not None:
                update.agree(partial(accelerator.reduce, reduction="sum"), device)
                receipt.add("optimizer_update", update.facts())
                say(str(update))
    return Built(agreed, assembled, run, state, receipt, kernel, compiled, opened.request, loading)


def _load(opened: Session) -> tuple[Assembled, TrainState]:
    """The model as of the first step, and the state that the loop goes on from."""
    agreed, accelerator, first_step = opened.agreed, opened.accelerator, opened.progress.step
    recipe, say = agreed.recipe, opened.output.terminal.say
    assembled = assemble(recipe, agreed.strategy, accelerator, launch=agreed.launch)
    check_vocabulary(assembled.decoder, agreed.prepared.facts["largest_token_id"])
    stops = agreed.prepared.conversation.stops
    if penalties := penalties_of(assembled.decoder):
        words = ", ".join(f"{name}: {value}" for name, value in penalties.items())
        say(f"the base's {words} would change greedy answers: samples, scores and exports leave that out")
    if lacking := stop_on(assembled.decoder, stops.values()):
        names = ", ".join(token for token, number in stops.items() if number in lacking)
        say(f"answers end with {names}: the base's own settings do not stop there; samples, scores and exports do")
    if agreed.adapter is not None and first_step == 0:
        from finetune.training.start_adapter import start_from

        start_from(assembled, agreed.adapter)
    state = restore(recipe, assembled, first_step, opened.saves.ranks)
    load_scaler_state(accelerator, state.loss_scaler)
    say(forget_lost_best(recipe, state))
    if first_step == 0:
        state.start_checksums = trained_checksums(assembled)
    return assembled, state


def _begin_receipt(agreed: Agreed, accelerator: Accelerator, assembled: Assembled, output: RunOutput) -> Receipt:
    """Write and print the receipt for the built run. Optimizer state is added after the first update."""
    content = receipt_content(agreed.recipe, accelerator, assembled, agreed.strategy)
    content |= {
        "nodes": agreed.launch.nodes,
        "local_world_size": agreed.launch.local_world_size,
        "batch": agreed.plan.facts(agreed.prepared.train) | steps_of(agreed.recipe, agreed.plan.total_steps),
    }
    if agreed.gpus is not None:
        content["counted_memory"] = agreed.gpus.memory  # of this rank's GPU, by `auto`
    if agreed.adapter is not None:
        content["adapter"] = agreed.adapter.facts()
    if agreed.writes:
        content["base"] = base_identity(agreed.recipe.model) | {"covers": COVERS}
        record_base(agreed.run_dir, content["base"])
    content |= {
        "probe": agreed.probed,
        "recomputation": agreed.recomputation,
        "rows": agreed.rows,
        "reduction": agreed.reduction,
        "formats": agreed.formats.facts,
        "data": {"fingerprint": agreed.prepared.fingerprint, **agreed.prepared.facts},
    }
    receipt = Receipt(agreed.recipe, agreed.strategy, content, writes=agreed.writes)
    receipt.write()
    lines = [describe(content)]
    if agreed.formats.line:
        lines.append(agreed.formats.line)
    lines += [facts["line"] for facts in (agreed.rows, agreed.recomputation, agreed.reduction) if facts]
    if agreed.adapter is not None:
        lines.append(agreed.adapter.note(agreed.recipe))
    output.terminal.say("\n".join([*lines, *agreed.prepared.notes]))
    return receipt


def train(built: Built) -> int:
    """Train a built run, and export it if no signal stops it. Every rank calls it. Returns the exit code."""
    agreed, run, state, progress = built.agreed, built.run, built.state, built.run.progress
    assembled, receipt, recipe = built.assembled, built.receipt, agreed.recipe
    say, device = run.output.terminal.say, run.parts.accelerator.device
    measured = dict(built.loading) | try_worst_step(built)
    if recipe.preferences is not None and recipe.preferences.needs_reference:
        from finetune.training.reference import find_reference

        progress.phase, began = "reference", time.monotonic()
        with built.kernel.active(), deterministic_algorithms(recipe.training.deterministic, device):
            facts = find_reference(run, agreed, assembled, state.step, built.compiled)
        receipt.add("reference", facts | {"seconds": round(time.monotonic() - began, 1)})
    if state.step == 0:
        progress.phase = "looking before"
        look_before(agreed, run, assembled, built.kernel)
    progress.phase = "training"
    deterministic = deterministic_algorithms(recipe.training.deterministic, device)
    with built.kernel.active(), deterministic, agreed.stop.finishes_step():
        reached_end = take_steps(run, state)
    receipt.add("compiled", built.compiled.facts())
    if not reached_end:
        reason, command = agreed.stop.reason, ""
        if agreed.writes:
            command = mark_run(agreed.run_dir, "stopped", step=state.step, reason=reason)
        line = f"stopped and saved at step {state.step} ({reason}); continue with:\n  {command}"
        say(line)
        if agreed.launch.is_main:
            repeat_after_launcher(line)
        return Stopped.exit_code

    progress.phase = "export"
    assert run.checkpoints is not None
    saves = run.checkpoints.saves
    if saves.ranks.apart:
        saves.wait()  # it sends files to rank 0, and a best checkpoint's go the other way
    exported = weights_to_export(recipe, assembled, state, saves.ranks)
    unchanged = refuse_unchanged(trained_checksums(assembled), state.start_checksums)
    receipt.add("change", {"unchanged_tensors": unchanged})
    say(describe_change(unchanged, state.start_checksums))
    write_samples(agreed, run, assembled, when="after", step=state.step)
    folder = export(recipe, assembled, agreed.tokenizer, write=agreed.writes)
    if agreed.writes:
        memory = memory_facts(built.request, measured, device)
        receipt.add("memory", memory)
        say(describe_memory(memory))
        receipt.add("export", exported.as_json())
        mark_run(agreed.run_dir, "finished", step=state.step, exported=exported.as_json())
        say(describe_exported(exported, state))
        if recipe.lora is None:
            from finetune.run_folder.base_parts import untrained_in_words

            for line in untrained_in_words(recipe.model, assembled.decoder):
                say(line)
        if recipe.preferences is not None:
            result, rows = read_run(agreed.run_dir, recipe), recipe.training.global_batch_size
            say("\n".join(warnings_of(result.trained(), result.exported_eval(), rows)))
        run_dir = str(agreed.run_dir)
        say(f"finished: {folder}\ntalk to it: {shlex.join(['finetune', 'chat', run_dir])}")
        say(f"how good is it, and what was forgotten: {shlex.join(['finetune', 'eval', run_dir, '--general'])}")
        say(f"serve it: {shlex.join(['finetune', 'export', run_dir, '--for', 'ollama'])}")
    return 0


def try_worst_step(built: Built) -> dict[str, Phase]:
    """Compare the parts chosen for speed with the library's modules, then try the step that takes most memory.

    It leaves weights and optimizer as they were. Layers are compiled during that step. Returns its phases' costs.
    """
    agreed, run, receipt, compiled = built.agreed, built.run, built.receipt, built.compiled
    accelerator, say = run.parts.accelerator, run.output.terminal.say
    assert run.checkpoints is not None
    ranks = run.checkpoints.saves.ranks
    device, deterministic = accelerator.device, agreed.recipe.training.deterministic

    with deterministic_algorithms(deterministic, device), run.parts.phases.measured() as measured:
        guard = compare_fast_paths(Forwards.of(run), built.assembled, compiled, built.kernel)
    receipt.add("guard", guard.facts())
    saved = checkpoint_bytes(agreed.recipe.training, receipt.content["parameters"]["trained"])
    if ranks.apart:
        refuse_without_room(agreed, saved)
    if guard.left_off:
        receipt.add("flash_kernel", built.kernel.facts())
        for name, facts in computed_layers(accelerator, built.assembled).items():
            receipt.add(name, facts)

    with built.kernel.active(), deterministic_algorithms(deterministic, device):
        worst = worst_step_first(run, built.assembled, ranks)
    measured |= worst.phases
    give_back_freed_memory()
    give_back_cached_memory(device)
    say(str(worst))
    if agreed.writes and (grace := grace_period()) is not None:
        planned = planned_save(agreed.run_dir, saved, *grace)
        say(planned.warning)
        receipt.add("stop", planned.facts())
    receipt.add("worst_step_first", worst.facts())
    compiled.agree(partial(accelerator.reduce, reduction="sum"), device)
    say(str(compiled))
    receipt.add("compiled", compiled.facts())
    receipt.add("memory", memory_facts(built.request, {**built.loading, **measured}, device))
    return measured
