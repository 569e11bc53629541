"""The first three of a training's five parts, before any process group: `refuse`, `choose` and `prepare`.

    refuse    settings, then machine and launch; storage, Hub     -> Checked
    choose    base, tokenizer, configuration, auto; the probe     -> Choices
    prepare   rows, steps, and rank 0's claim on the run folder   -> Start

The first refusal ends the start. Only rank 0 writes, and only at the end, when it claims the run folder. `build` and
`train` follow in training/session.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from finetune.architecture import attention
from finetune.base.identity import at_recorded_commit, base_identity
from finetune.base.location import folder_of
from finetune.errors import RecipeError
from finetune.files import write_json, write_text
from finetune.launch.launcher import Launch, continue_command
from finetune.launch.signals import STARTED_AT, StopRequest
from finetune.measure.environment import environment
from finetune.measure.phases import memory_of
from finetune.model.adapter_targets import has_experts
from finetune.model.build import attention_name
from finetune.model.dtypes import COMPUTE, dtype_name
from finetune.model.known_configs import config_if_known
from finetune.model.new_tokens import load_tokenizer
from finetune.model.optimizer import Schedule
from finetune.output_stream import wrapped
from finetune.probe.probe import checked_configuration, probe
from finetune.recipe.mixed_precision import (
    BASE_FORMAT,
    MUCH_SLOWER,
    PRECISION,
    ChosenFormats,
    FastestFormat,
    in_float32,
)
from finetune.recipe.resolved import LoadedRecipe, resolved_yaml
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.recipe.strategy_fit import refuse_recipe
from finetune.run_folder.checkpoint import read_state_of
from finetune.run_folder.facts import MOST_RECORD_BYTES, read_state
from finetune.run_folder.folder import (
    BASE,
    Claim,
    RunIdentity,
    RunLength,
    claim_run_folder,
    curve_identity,
    keys_at_default,
    lock_run_folder,
)
from finetune.strategies.machine import device_of, fastest_on, launch_notes, refuse_machine
from finetune.tokens import dataset
from finetune.tokens.conversation import CONVERSATION
from finetune.tokens.encoder import Encoder
from finetune.training.batch_notes import batch_notes, positions_of
from finetune.training.batch_plan import BatchPlan, one_width, plan_batches
from finetune.untrusted.json_files import read_object

if TYPE_CHECKING:
    from finetune.generation.held_out import ScoredSet
    from finetune.recipe.gpus import Gpus
    from finetune.storage.mirror import Mirror
    from finetune.training.start_adapter import StartAdapter


@dataclass(frozen=True)
class Checked:
    """A recipe that this launch and machine can train. Only number formats are chosen, because checks need them."""

    loaded: LoadedRecipe
    launch: Launch
    strategy: Strategy
    device: torch.device
    formats: ChosenFormats
    command: str  # continues the run


@dataclass(frozen=True)
class Choices:
    """The recipe with every `auto` decided, and what it names: base, tokenizer, adapter."""

    checked: Checked
    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    base: Mapping[str, Any]  # the base's identity
    config: PreTrainedConfig  # the base's, from its files
    known: Mapping[str, Any] | None  # the configuration that memory is counted by; None: not known
    recomputation: Mapping[str, Any]  # the choice of `auto`, with its reason; empty if the recipe names it
    rows: Mapping[str, Any]  # likewise, for the rows of a micro-batch
    probed: Mapping[str, Any]  # the probe's result for the model
    adapter: StartAdapter | None  # a new run starts from it
    gpus: Gpus | None  # with the memory that `auto` counts on; None: a CPU
    data_before: Any  # the data's figures in the receipt of the run that is resumed


@dataclass(frozen=True)
class Start:
    """This rank's own facts before the first process group."""

    choices: Choices
    prepared: dataset.Prepared
    plan: BatchPlan
    schedule: Schedule  # of the learning rate
    stop: StopRequest
    scored: ScoredSet | None  # rows whose answers are scored in training
    claim: Claim | None  # rank 0's alone
    mirror: Mirror | None  # rank 0's copy of the run on its storage

    @property
    def writes(self) -> bool:
        """Whether this rank writes the run's folder: rank 0, unless the run is finished."""
        return self.claim is not None and self.claim.status != "finished"


def refuse(loaded: LoadedRecipe, launch: Launch) -> Checked:
    """Refuse settings that this launch or machine cannot train. Reads no data and no weights. Raises FinetuneError."""
    loaded, formats = choose_formats(loaded, launch)
    recipe, device = loaded.recipe, device_of(launch)
    strategy = refuse_recipe(recipe)
    refuse_machine(recipe, strategy, launch)
    notes = [*launch_notes(launch, strategy), *strategy.notes]
    if recipe.hub.push:
        from finetune.hub.around_training import check_before_training

        notes += check_before_training(recipe)
    if recipe.storage is not None:
        from finetune.storage.restart import check_storage

        check_storage(recipe)
    if launch.is_main and (slow := slow_formats_note(recipe, device)):
        notes.append(slow)
    _note(launch, *notes)
    command = continue_command(launch, resume=recipe.training.resume)
    return Checked(loaded, launch, strategy, device, formats, command)


def choose(checked: Checked) -> Choices:
    """Decide what `auto` leaves open, and find what the recipe names. Probes the model. Raises FinetuneError."""
    recipe, launch = checked.loaded.recipe, checked.launch
    # A resumed run goes on with its own base, also if the Hub's branch has moved. A new one keeps to one commit.
    receipt, branch = receipt_of_run(recipe), recipe.model.revision
    recipe = at_recorded_commit(recipe, receipt.get("base"))
    tokenizer = load_tokenizer(recipe)
    base = base_identity(recipe.model)
    if recipe.model.revision != branch:
        folder = folder_of(recipe.model.name_or_path, branch)
        if folder is not None and folder.name != recipe.model.revision:
            moved = f"model.revision: {branch} is {folder.name[:12]} now"
            _note(launch, f"{moved}; this run goes on with its own base, {recipe.model.revision[:12]}")
    recipe = at_recorded_commit(recipe, base)

    config, known = checked_configuration(recipe), config_if_known(recipe.model)
    if recipe.quantization is not None:
        from finetune.model.mixtures import refuse_mixture

        refuse_mixture(recipe, checked.strategy, config.to_dict())
    gpus = own_gpus(launch, receipt)
    recomputation: Mapping[str, Any] = {}
    rows: dict[str, Any] = {}
    if "auto" in (recipe.training.activation_checkpointing, recipe.training.per_device_batch_size):
        from finetune.closed_form.recomputation import choose_recomputation

        batch = receipt.get("batch")
        before = batch.get("per_device_batch_size") if isinstance(batch, dict) else None
        before = before if type(before) is int else 0
        chosen = choose_recomputation(recipe, known, gpus, ranks=launch.local_world_size, rows_before=before)
        recipe, recomputation, rows = chosen.recipe, chosen.facts, chosen.rows_facts
    if recipe.training.activation_offloading:
        from finetune.closed_form.states_on_host import check_host_memory

        _note(launch, *check_host_memory(recipe, known, launch.local_world_size, pinned=gpus is not None))
    probed = probe(recipe, checked.device, config).as_json()
    adapter = None
    if recipe.model.adapter is not None:
        from finetune.training.start_adapter import find_start_adapter

        adapter = find_start_adapter(recipe)
    return Choices(
        checked, recipe, tokenizer, base, config, known, recomputation, rows, probed, adapter, gpus, receipt.get("data")
    )


def prepare(choices: Choices) -> Start:
    """Tokenise the data, plan every step, and claim the run folder. Raises FinetuneError."""
    checked, recipe, tokenizer = choices.checked, choices.recipe, choices.tokenizer
    launch, strategy = checked.launch, checked.strategy
    prepared = dataset.prepare(recipe, tokenizer)
    if recipe.preferences is not None:
        from finetune.tokens.second_model import refuse_other_tokens

        used = [store.tokens for store in prepared.pool.stores]
        _note(launch, *refuse_other_tokens(recipe, tokenizer, used))
    scored = None
    if recipe.eval.generate.every is not None:
        from finetune.generation.held_out import held_out_set

        scored = held_out_set(recipe, Encoder(tokenizer, recipe.data, recipe.model), prepared)

    # This rank's share of every step. The stages of a pipeline share one, in micro-batches of one width.
    width = None
    if strategy.schedule is not None:
        sets = [rows for rows in (prepared.train, prepared.eval) if rows is not None]
        width = one_width(recipe.training.rows_at_once, sets)
    plan = plan_batches(
        recipe,
        len(prepared.train),
        world_size=launch.world_size,
        rank=launch.rank,
        flat=attention_name(recipe) == attention.NAME,
        stages=strategy.stage_count(launch.world_size),
        width=width,
    )
    schedule = Schedule(recipe.training, plan.total_steps)
    if unsaved := recipe.unsaved_evaluations(plan.total_steps):  # a best evaluation without a checkpoint to export
        raise RecipeError([f"save_steps: {'; '.join(unsaved)}"])
    claim, mirror, due = None, None, None
    if launch.is_main:
        if recipe.run.stop_after is not None:
            from finetune.recipe.stop_time import stop_time

            due = stop_time(recipe.run.stop_after, STARTED_AT)
        claim, mirror = _claim(choices, prepared)
        if claim.status != "finished":
            notes = batch_notes(recipe, prepared, plan, positions_of(recipe, choices.config))
            print(*(wrapped(note, sys.stdout) for note in notes), sep="\n", flush=True)
    return Start(choices, prepared, plan, schedule, StopRequest(stop_time=due), scored, claim, mirror)


def own_gpus(launch: Launch, receipt: Mapping[str, Any]) -> Gpus | None:
    """The GPUs that this launch runs on, each with the memory that this rank may count on; None: a CPU.

    A desktop or another program holds a part of it. A resumed run counts as its first start did, so its choices stay.

    Args:
        receipt: The resumed run's; empty for a new one.
    """
    device = device_of(launch)
    if device.type != "cuda":
        return None
    from finetune.closed_form.constants import CUDA_CONTEXT
    from finetune.recipe.gpus import Gpus

    memory = memory_of(device)
    # This process has a context already, which the closed form counts too. Runs of 1.0 counted the whole memory.
    counted = memory.total if receipt else memory.total - max(0, memory.others - CUDA_CONTEXT)
    recorded = receipt.get("counted_memory")
    if type(recorded) is int:
        counted = min(memory.total, recorded)
    return Gpus(launch.local_world_size, counted, "GPU", launch.nodes)


def receipt_of_run(recipe: Recipe) -> Mapping[str, Any]:
    """The receipt of the run that is resumed; empty for a new one. Raises FinetuneError for a damaged one."""
    file = _recorded_in(recipe) / "receipt.json"
    if recipe.training.resume == "never" or not file.is_file():
        return {}
    return read_object(file, MOST_RECORD_BYTES)


def _recorded_in(recipe: Recipe) -> Path:
    """The folder with the records of the run that this start continues: the run folder, or the storage's copy."""
    if recipe.storage is None:
        return Path(recipe.run_dir)
    from finetune.storage.restart import recorded_folder

    return recorded_folder(recipe)


def _claim(choices: Choices, prepared: dataset.Prepared) -> tuple[Claim, Mirror | None]:
    """Rank 0 locks the run's folder, takes over the run on its storage, and writes the facts known at the start."""
    # The recipe as the user wrote it: `auto` stays, and so does a branch's name.
    loaded, adapter = choices.checked.loaded, choices.adapter
    recipe = loaded.recipe
    inputs: dict[str, Any] = {"data fingerprint": prepared.fingerprint, BASE: dict(choices.base)}
    if adapter is not None:
        inputs |= {"adapter fingerprint": adapter.sha256}
    if recipe.lora is not None and has_experts(choices.config):
        # Settings of a mixture that mean something else than in earlier releases, whose runs have none of these words.
        # There 4 bits left routed experts in 16, and all-linear gave them adapters.
        packed = recipe.quantization is not None and recipe.quantization.load_in_4bit
        by_name = recipe.lora.target_modules == "all-linear" and recipe.lora.target_parameters is None
        if experts := ["in 4 bits"] * packed + ["without adapters"] * by_name:
            inputs["experts"] = ", ".join(experts)
    # The data's fingerprint as earlier releases computed it, if the run's receipt has the same figures.
    also, before = {}, choices.data_before
    figures = ("documents", "tokens", "supervised_tokens", "rows", "eval_tokens", "largest_token_id")
    if isinstance(before, dict) and all(before.get(figure) == prepared.facts.get(figure) for figure in figures):
        also = {"data fingerprint": prepared.earlier_fingerprints}
    identity = RunIdentity(curve_identity(recipe) | inputs, keys_at_default(recipe), also)
    launch, mirror = choices.checked.launch, None
    folder = lock_run_folder(Path(recipe.run_dir))
    if recipe.storage is not None:
        from finetune.storage.restart import take_over

        try:
            mirror = take_over(recipe, launch, identity, partial(_note, launch))
        except BaseException:
            folder.give_up()
            raise
    try:
        claim = claim_run_folder(
            folder,
            resume=recipe.training.resume,
            identity=identity,
            command=choices.checked.command,
            length=RunLength(recipe.training, len(prepared.train)),
        )
    except BaseException:
        if mirror is not None:
            mirror.give_back()
        raise
    _note(launch, *claim.notes)
    if claim.status == "finished":
        if mirror is not None:
            mirror.give_back()
    else:
        if mirror is not None and claim.checkpoint is not None:
            best = read_state_of(claim.checkpoint).get("best_step") if recipe.training.exports_best else None
            mirror.push_missing(claim.checkpoint.step, best)
        write_text(folder.run_dir / "recipe.yaml", resolved_yaml(loaded))
        write_json(folder.run_dir / "environment.json", environment())
        write_json(folder.run_dir / CONVERSATION, prepared.conversation.as_json())
    if recipe.model.trust_remote_code:
        from finetune.untrusted.model_code import trust_code

        trust_code(recipe.model.name_or_path, recipe.model.revision)
    return claim, mirror


def _note(launch: Launch, *lines: str) -> None:
    """Print lines about the start on rank 0."""
    if launch.is_main:
        for line in lines:
            print(wrapped(line, sys.stderr), file=sys.stderr)


BASE_FORMATS = ("bfloat16", "float16", "float32")


def choose_formats(loaded: LoadedRecipe, launch: Launch) -> tuple[LoadedRecipe, ChosenFormats]:
    """Settle `auto` for this rank's device, before anything is built. An existing run keeps its formats.

    Raises FinetuneError if the run's state cannot be read.
    """
    if not loaded.auto_formats:
        return loaded.formats_for(FastestFormat("bf16", ""))  # nothing is auto, so this is not used
    recipe = loaded.recipe
    if recipe.training.resume == "auto" and (state := read_state(_recorded_in(recipe))):
        began_with = {key: state["identity"].get(key) for key in (PRECISION, BASE_FORMAT)}
        if began_with[PRECISION] in COMPUTE and began_with[BASE_FORMAT] in BASE_FORMATS:  # older runs record none
            return loaded.with_formats(began_with, f"the run in {Path(recipe.run_dir)} began with it", kept=True)
    return loaded.formats_for(fastest_on(device_of(launch)))


def slow_formats_note(recipe: Recipe, device: torch.device) -> str:
    """One line if this CPU emulates a format that the recipe computes in; otherwise empty, also on a GPU."""
    if device.type != "cpu":
        return ""
    formats: set[torch.dtype | None] = {COMPUTE[recipe.training.mixed_precision]}
    if recipe.lora is not None:
        formats.add(getattr(torch, recipe.model.dtype))
    if recipe.quantization is not None and recipe.quantization.load_in_4bit:
        formats.add(getattr(torch, recipe.quantization.bnb_4bit_compute_dtype))
    narrow = [dtype for dtype in (torch.bfloat16, torch.float16) if dtype in formats]
    if not narrow:
        return ""
    from finetune.measure.product_speed import product_seconds

    *seconds, in_32_bits = product_seconds([*narrow, torch.float32])
    slowest = max(seconds)
    if slowest < MUCH_SLOWER * in_32_bits:
        return ""
    name = dtype_name(narrow[seconds.index(slowest)])
    return (
        f"this CPU emulates {name}: small products take {1e3 * slowest:.3g} ms in it and {1e3 * in_32_bits:.3g} in "
        f"float32; a new run is faster with {' '.join(in_float32(recipe))}"
    )
