"""Everything that is known about a run before its first process group: checked, chosen and prepared.

The first refusal ends the start. Only rank 0 writes, and only at the end, when it claims the run folder.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.architecture import attention
from finetune.closed_form.recomputation import Chosen, choose_recomputation
from finetune.files import write_json, write_text
from finetune.hub.around_training import check_before_training
from finetune.hub.start_adapter import StartAdapter, find_start_adapter
from finetune.launch.launcher import Launch, continue_command
from finetune.launch.signals import StopRequest
from finetune.measure.environment import environment
from finetune.measure.out_of_memory import memory_of
from finetune.model.base_identity import at_recorded_commit, base_identity, recorded_base
from finetune.model.build import attention_name, load_tokenizer
from finetune.model.optimizer import learning_rate_schedule
from finetune.model.packaged import folder_of
from finetune.output_stream import wrapped
from finetune.probe.probe import probe
from finetune.recipe.gpus import Gpus
from finetune.recipe.mixed_precision import ChosenFormats
from finetune.recipe.resolved import LoadedRecipe, resolved_yaml
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.engine_keys import engine_notes
from finetune.recipe.strategy import Strategy
from finetune.run_folder.folder import BASE, Claim, claim_run_folder, curve_identity
from finetune.run_folder.longer import Asked
from finetune.strategies.accelerator import check_launch, device_of, launch_notes
from finetune.tokens.conversation import CONVERSATION
from finetune.tokens.dataset import Prepared, prepare
from finetune.tokens.encoder import Encoder
from finetune.tokens.second_model import refuse_other_tokens
from finetune.training.batch_notes import batch_notes
from finetune.training.batch_plan import BatchPlan, one_width, plan_batches
from finetune.training.formats import choose_formats, slow_formats_note
from finetune.training.run import check_best
from finetune.training.scored_answers import ScoredSet, held_out_set
from finetune.training.trackers import check_trackers
from finetune.untrusted.model_code import trust_code


@dataclass(frozen=True)
class Start:
    """The facts before the first process group. They do not change."""

    recipe: Recipe
    launch: Launch
    strategy: Strategy
    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared
    plan: BatchPlan
    adapter: StartAdapter | None  # that a new run starts from
    claim: Claim | None  # rank 0's alone
    stop: StopRequest
    probed: dict[str, Any]  # the probe's result for the model
    recomputation: dict[str, Any]  # what `auto` chose, with its reason; empty if the recipe names it
    formats: ChosenFormats  # what `auto` chose
    scored: ScoredSet | None = None  # rows whose answers are scored in training

    @property
    def run_dir(self) -> Path:
        return Path(self.recipe.run_dir)

    @property
    def writes(self) -> bool:
        """Whether this rank writes the run's folder: rank 0, unless the run is finished."""
        return self.claim is not None and self.claim.status != "finished"


def prepare_start(loaded: LoadedRecipe, launch: Launch) -> Start:
    """Refuse what would not run as asked, prepare the data, and claim the run folder. Raises FinetuneError."""
    loaded, formats = choose_formats(loaded, launch)
    recipe = loaded.recipe
    command = continue_command(launch, resume=recipe.training.resume)
    device = device_of(launch)

    strategy = check_launch(recipe, launch)
    check_trackers(recipe)
    notes = [
        *launch_notes(launch, strategy),
        *strategy.notes,
        *engine_notes(strategy.section("deepspeed_config"), recipe.training.mixed_precision),
        *check_before_training(recipe),
    ]
    if launch.is_main:
        if slow := slow_formats_note(recipe, device):
            notes.append(slow)
        for note in notes:
            print(wrapped(note, sys.stderr), file=sys.stderr)
    # A resumed run goes on with its own base, also if the Hub's branch has moved. A new one keeps to one commit.
    asked = recipe.model.revision
    recorded = recorded_base(Path(recipe.run_dir)) if recipe.training.resume != "never" else None
    recipe = at_recorded_commit(recipe, recorded)
    tokenizer = load_tokenizer(recipe)
    base = base_identity(recipe.model)
    if launch.is_main and recipe.model.revision != asked:
        branch = folder_of(recipe.model.name_or_path, asked)
        if branch is not None and branch.name != recipe.model.revision:
            print(
                f"model.revision: {asked} is {branch.name[:12]} now; this run goes on with its own base, "
                f"{recipe.model.revision[:12]}",
                file=sys.stderr,
            )
    recipe = at_recorded_commit(recipe, base)

    recomputation = own_recomputation(recipe, launch)
    recipe = recomputation.recipe
    probed = probe(recipe, device)
    adapter = find_start_adapter(recipe)
    prepared = prepare(recipe, tokenizer)
    for note in refuse_other_tokens(recipe, tokenizer, [store.tokens for store in prepared.pool.stores]):
        if launch.is_main:
            print(wrapped(note, sys.stderr), file=sys.stderr)
    scored = None
    if recipe.eval.generate.every is not None:
        scored = held_out_set(recipe, Encoder(tokenizer, recipe.data, recipe.model), prepared)

    # This rank's share of every step. The stages of a pipeline share one, in micro-batches of one width.
    width = None
    if strategy.schedule is not None:
        sets = [rows for rows in (prepared.train, prepared.eval) if rows is not None]
        width = one_width(recipe.training.per_device_batch_size, sets)
    plan = plan_batches(
        recipe,
        len(prepared.train),
        world_size=launch.world_size,
        rank=launch.rank,
        flat=attention_name(recipe) == attention.NAME,
        stages=strategy.stage_count(launch.world_size),
        width=width,
    )
    learning_rate_schedule(recipe.training, plan.total_steps)  # raises before the folder is made
    check_best(recipe, plan.total_steps)
    claim = None
    if launch.is_main:
        claim = _claim(loaded, prepared, adapter, base, command)
        if claim.status != "finished":
            print(*(wrapped(note, sys.stdout) for note in batch_notes(recipe, prepared, plan)), sep="\n", flush=True)
    return Start(
        recipe=recipe,
        launch=launch,
        strategy=strategy,
        tokenizer=tokenizer,
        prepared=prepared,
        plan=plan,
        adapter=adapter,
        claim=claim,
        stop=StopRequest(),
        probed=probed.as_json(),
        recomputation=recomputation.facts,
        formats=formats,
        scored=scored,
    )


def own_recomputation(recipe: Recipe, launch: Launch) -> Chosen:
    """`auto`'s choice for this rank's device. training/session.py takes the most that any rank chose."""
    device, gpus = device_of(launch), None
    if device.type == "cuda":
        gpus = Gpus(launch.local_world_size, memory_of(device).total, "GPU", launch.nodes)
    return choose_recomputation(recipe, gpus, ranks=launch.local_world_size)


def _claim(
    loaded: LoadedRecipe, prepared: Prepared, adapter: StartAdapter | None, base: Mapping[str, Any], command: str
) -> Claim:
    """Rank 0 locks the run's folder and writes the facts known at the start."""
    recipe = loaded.recipe
    identity = curve_identity(recipe) | {"data fingerprint": prepared.fingerprint, BASE: dict(base)}
    if adapter is not None:
        identity |= {"adapter fingerprint": adapter.sha256}
    claim = claim_run_folder(
        Path(recipe.run_dir),
        resume=recipe.training.resume,
        identity=identity,
        command=command,
        asked=Asked(recipe.training, len(prepared.train)),
    )
    for note in claim.notes:
        print(wrapped(note, sys.stderr), file=sys.stderr)
    if claim.status != "finished":
        folder = Path(recipe.run_dir)
        write_text(folder / "recipe.yaml", resolved_yaml(loaded))
        write_json(folder / "environment.json", environment())
        write_json(folder / CONVERSATION, prepared.conversation.as_json())
    if recipe.model.trust_remote_code:
        trust_code(recipe.model.name_or_path, recipe.model.revision)
    return claim
