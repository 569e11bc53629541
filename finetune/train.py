"""The trainer entrypoint: `accelerate launch finetune/train.py RECIPE [key=value ...]`.

Reads the recipe, refuses what would not run as asked, prepares the data before any process group waits, builds, and
hands over to the loop. Every path out of here leaves the run's folder telling how it ended.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # run as a file: this folder must not be the first place to import from
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from finetune.errors import FinetuneError, Stopped
from finetune.recipe import Recipe
from finetune.recipe_file import LoadedRecipe, load_recipe, resolved_yaml

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from finetune.batches import Prepared
    from finetune.launcher import Launch
    from finetune.loop import Plan, Run, TrainState
    from finetune.metrics import Terminal
    from finetune.run_folder import Claim
    from finetune.runtime import Strategy
    from finetune.signals import StopRequest

USAGE = "usage: accelerate launch finetune/train.py RECIPE [key=value ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Train the recipe named first, with overrides after it. Returns the exit code (0, 2, 3, 4 or 130)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    try:
        return run_recipe(load_recipe(arguments[0], arguments[1:]))
    except FinetuneError as error:
        if int(os.environ.get("RANK", "0")) == 0:  # the ranks fail alike; one of them speaks
            print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def run_recipe(loaded: LoadedRecipe) -> int:
    """Train to the end, or to a signal; returns 0 or 130. Raises FinetuneError."""
    from finetune.launcher import continue_command, read_launch
    from finetune.runtime import check_launch, hush_libraries

    recipe, launch = loaded.recipe, read_launch()
    hush_libraries(launch)
    from finetune.batches import prepare
    from finetune.model import load_tokenizer
    from finetune.run_folder import claim_run_folder, curve_identity
    from finetune.signals import StopRequest, die_with_launcher

    command = continue_command(launch, resume=recipe.training.resume)
    strategy = check_launch(recipe, launch)
    die_with_launcher()
    tokenizer = load_tokenizer(recipe)
    prepared = prepare(recipe, tokenizer)
    claim = None
    if launch.is_main:
        identity = curve_identity(recipe) | {"data fingerprint": prepared.fingerprint}
        claim = claim_run_folder(
            Path(recipe.run_dir), resume=recipe.training.resume, identity=identity, command=command
        )
        _write_start(loaded, claim)
    return _train_claimed(Start(loaded, launch, strategy, tokenizer, prepared, claim, StopRequest()))


@dataclass(frozen=True)
class Start:
    """What is known before the first process group."""

    loaded: LoadedRecipe
    launch: Launch
    strategy: Strategy
    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared
    claim: Claim | None  # of rank 0 alone
    stop: StopRequest

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def run_dir(self) -> Path:
        return Path(self.recipe.run_dir)


def _write_start(loaded: LoadedRecipe, claim: Claim) -> None:
    from finetune.durable import write_json, write_text
    from finetune.run_folder import environment

    for note in claim.notes:
        print(note, file=sys.stderr)
    if claim.status != "finished":
        folder = Path(loaded.recipe.run_dir)
        write_text(folder / "recipe.yaml", resolved_yaml(loaded))
        write_json(folder / "environment.json", environment())


def _train_claimed(start: Start) -> int:
    from finetune.runtime import build_accelerator, use_all_cores
    from finetune.signals import stop_on_signals

    accelerator = build_accelerator(start.recipe, start.strategy, start.launch)
    use_all_cores(start.launch, accelerator.device)
    with stop_on_signals(start.stop, announce=start.launch.is_main):
        return _train_together(start, accelerator)


def _train_together(start: Start, accelerator: Accelerator) -> int:
    from finetune.run_folder import mark_failed

    resumed_step = _agree_on_start(accelerator, start.claim)
    if resumed_step is None:
        if start.launch.is_main:
            print(
                f"{start.run_dir}: this run is finished; to train again: training.resume=never, or another output_dir"
            )
        return 0
    progress = Progress()
    try:
        return _train(start, accelerator, resumed_step, progress)
    except BaseException as error:
        mark_failed(start.run_dir, error, phase=progress.phase, rank=start.launch.rank, step=progress.step)
        raise
    finally:
        accelerator.end_training()


@dataclass
class Progress:
    """Where a run is, for the record of a failure."""

    phase: str = "load"
    step: int = 0


def _agree_on_start(accelerator: Accelerator, claim: Claim | None) -> int | None:
    """The step that every rank starts from: rank 0 knows. None when the run is finished."""
    import torch

    position = -1
    if claim is not None and claim.status != "finished":
        position = claim.checkpoint.step if claim.checkpoint else 0
    told = torch.tensor(position if claim is not None else 0, device=accelerator.device)
    agreed = int(accelerator.reduce(told, reduction="sum"))
    return None if agreed < 0 else agreed


def _train(start: Start, accelerator: Accelerator, first_step: int, progress: Progress) -> int:
    from finetune.loop import train
    from finetune.run_folder import mark_run

    run, state = _build(start, accelerator, first_step, progress)
    if first_step == 0:
        progress.phase = "looking before"
        _look_before(start, run)
    progress.phase = "training"
    if not train(run, state):
        command = mark_run(start.run_dir, "stopped", step=state.step) if start.launch.is_main else ""
        run.terminal.say(f"stopped and saved at step {state.step}; continue with:\n  {command}")
        accelerator.wait_for_everyone()
        return Stopped.exit_code
    progress.phase = "export"
    if start.launch.is_main:
        model = accelerator.unwrap_model(run.model)
        _write_samples(start, model, "after", state.step)
        folder = _export(start, model)
        mark_run(start.run_dir, "finished", step=state.step)
        run.terminal.say(f"finished: {folder}\ntalk to it: finetune chat {start.run_dir}")
    accelerator.wait_for_everyone()
    return 0


def _build(start: Start, accelerator: Accelerator, first_step: int, progress: Progress) -> tuple[Run, TrainState]:
    from finetune.loop import Run
    from finetune.metrics import Terminal
    from finetune.model import build_model
    from finetune.optimizer import make_optimizer
    from finetune.phases import Phases
    from finetune.runtime import prepare_quietly
    from finetune.schedule import learning_rate_schedule

    recipe, prepared = start.recipe, start.prepared
    plan = _make_plan(start, accelerator)
    learning_rate = learning_rate_schedule(recipe.training, plan.total_steps)
    phases = Phases(accelerator.device, recipe.measure_phases)
    with phases("load"):
        model: Any = build_model(recipe, accelerator.device)
        check_vocabulary(prepared, model)
        model, optimizer = prepare_quietly(accelerator, model, make_optimizer(model, recipe))
        state = _restore(start, accelerator.unwrap_model(model), optimizer, first_step)
    terminal = Terminal(plan.total_steps, silent=not start.launch.is_main)
    _write_receipt(start, accelerator, model, plan, terminal)
    run = Run(
        recipe=recipe,
        accelerator=accelerator,
        model=model.train(),
        optimizer=optimizer,
        train_rows=prepared.train,
        eval_rows=prepared.eval,
        plan=plan,
        learning_rate=learning_rate,
        terminal=terminal,
        phases=phases,
        stop_requested=lambda: bool(start.stop),
        write_metrics=_metrics_writer(start, progress),
        save=lambda state: _save(start, accelerator.unwrap_model(model), optimizer, state),
    )
    return run, state


def _make_plan(start: Start, accelerator: Accelerator) -> Plan:
    from finetune import attention
    from finetune.loop import make_plan
    from finetune.model import attention_name

    return make_plan(
        start.recipe,
        len(start.prepared.train),
        world_size=accelerator.num_processes,
        rank=accelerator.process_index,
        flat=attention_name(start.recipe) == attention.NAME,
    )


def _metrics_writer(start: Start, progress: Progress) -> Callable[[dict[str, Any]], None]:
    from finetune.durable import append_lines

    def write(line: dict[str, Any]) -> None:
        progress.step = line["step"]
        if start.launch.is_main:
            append_lines(start.run_dir / "metrics.jsonl", [line])

    return write


def check_vocabulary(prepared: Prepared, model: nn.Module) -> None:
    """Refuse token ids that the embedding has no row for. Raises FinetuneError."""
    from finetune.model import decoder_parts

    embeddings: Any = decoder_parts(model).get_input_embeddings()
    rows, largest = embeddings.weight.shape[0], prepared.facts["largest_token_id"]
    if largest >= rows:
        raise FinetuneError(
            f"model.name_or_path: the tokenizer makes token {largest}, the model has {rows} embeddings; "
            "use the tokenizer that belongs to the model"
        )


def _write_receipt(start: Start, accelerator: Accelerator, model: nn.Module, plan: Plan, terminal: Terminal) -> None:
    from finetune.durable import write_json
    from finetune.receipt import write_receipt

    receipt = write_receipt(start.recipe, accelerator, model, start.strategy.name)
    batch, facts = plan.facts(), start.prepared.facts
    receipt |= {"batch": batch, "data": {"fingerprint": start.prepared.fingerprint, **facts}}
    if start.launch.is_main:
        write_json(start.run_dir / "receipt.json", receipt)
    terminal.say(describe(receipt))


def describe(receipt: dict[str, Any]) -> str:
    """The run in three lines, before its first step: what is trained, on what, in which batches."""
    parameters, batch, data, dtypes = (receipt[key] for key in ("parameters", "batch", "data", "dtypes"))
    share = parameters["trained"] / (parameters["trained"] + parameters["frozen"])
    return (
        f"{receipt['architecture']}: {parameters['trained']:,} parameters trained ({share:.2%}) in {dtypes['master']}, "
        f"computed in {dtypes['compute']}, {receipt['strategy']} on {receipt['world_size']} x {receipt['device']}\n"
        f"data: {data['documents']:,} documents, {data['tokens']:,} tokens in {batch['rows']:,} rows, "
        f"{data['fill']:.0%} full, {data['supervised_tokens']:,} tokens learned\n"
        f"batch: {batch['global_batch_size']} rows a step = {batch['world_size']} ranks x {batch['micro_steps']} "
        f"micro-steps x {batch['per_device_batch_size']}; {batch['total_steps']:,} steps"
    )


def _look_before(start: Start, run: Run) -> None:
    from finetune.loop import evaluate
    from finetune.metrics import eval_line

    if start.launch.is_main:
        _write_samples(start, run.accelerator.unwrap_model(run.model), "before", 0)
    if run.eval_rows is not None:
        line = eval_line(0, evaluate(run.accelerator, run.model, run.eval_rows, run.plan))
        run.write_metrics(line)
        run.terminal.say(f"before training: held-out loss {line['loss']:.4f}, perplexity {line['perplexity']:.2f}")


def _write_samples(start: Start, model: nn.Module, when: str, step: int) -> None:
    """Answers to the fixed prompts, appended to samples.jsonl."""
    from finetune.answers import answer, answering
    from finetune.durable import append_lines

    wanted = start.recipe.samples
    with answering(model):
        for sample in start.prepared.prompts:
            text = answer(model, start.tokenizer, sample.prompt_ids, max_new_tokens=wanted.max_new_tokens)
            line = {"when": when, "step": step, "prompt": sample.prompt, "answer": text, "reference": sample.reference}
            append_lines(start.run_dir / "samples.jsonl", [line])


def _save(start: Start, model: nn.Module, optimizer: Any, state: TrainState) -> None:
    """A checkpoint, by rank 0; the others meet it again at the next step's reduction."""
    from finetune.checkpoint import model_tensors, optimizer_tensors, write_checkpoint

    if start.launch.is_main:
        tensors = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
        keep = start.recipe.save_total_limit
        write_checkpoint(start.run_dir, state.step, tensors, state.as_json(), keep=keep)


def _restore(start: Start, model: nn.Module, optimizer: Any, step: int) -> TrainState:
    """The state to go on from; weights and optimizer are filled in place, on every rank from the same files."""
    from finetune.checkpoint import examine, load_model, load_optimizer, read_checkpoint, step_folder
    from finetune.loop import TrainState

    if step == 0:
        return TrainState()
    checkpoint = start.claim.checkpoint if start.claim else examine(step_folder(start.run_dir, step))
    if checkpoint is None or isinstance(checkpoint, str):
        raise FinetuneError(f"{step_folder(start.run_dir, step)}: {checkpoint}; every rank must see the run folder")
    tensors, saved = read_checkpoint(checkpoint)
    load_model(model, tensors["model"])
    load_optimizer(model, optimizer, tensors["optimizer"])
    return TrainState.from_json(saved)


def _export(start: Start, model: nn.Module) -> Path:
    """The adapter in PEFT's layout, or the whole model."""
    import torch

    from finetune.embedded import published_name
    from finetune.export import export_adapter, export_model

    section = start.recipe.model
    if start.recipe.lora is not None:
        base = published_name(section.name_or_path)
        return export_adapter(cast("Any", model), start.tokenizer, start.run_dir, base=base)
    return export_model(cast("Any", model), start.tokenizer, start.run_dir, dtype=getattr(torch, section.dtype))


if __name__ == "__main__":
    sys.exit(main())
