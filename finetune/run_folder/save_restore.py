"""Between a run and its folder: checkpoints written and read, and the export at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from finetune.base.identity import BASE_CONTENT, base_identity, recorded_base
from finetune.base.location import base_file, own_end_tokens, published_name
from finetune.errors import FinetuneError, NotFinite
from finetune.files import TEMPORARY_PREFIX, publish_folder, remove_folder, write_json
from finetune.generation.settings import stop_on, without_penalties
from finetune.library_errors import library_errors
from finetune.model.build import decoder_parts
from finetune.model.dtypes import dtype_name
from finetune.model.text_part import name_for_both, names_in_whole
from finetune.recipe.adapter_config import WEIGHTS
from finetune.recipe.schema import ModelSection, Recipe
from finetune.run_folder.background import Saves
from finetune.run_folder.checkpoint import Checkpoint, act_on_every_rank, examine, read_state_of, step_folder
from finetune.run_folder.facts import GENERATION
from finetune.run_folder.tensor_checks import not_finite
from finetune.run_folder.train_state import TrainState
from finetune.run_folder.trained_tensors import load_model, load_optimizer, model_tensors, optimizer_tensors
from finetune.strategies.assemble import Assembled
from finetune.strategies.pieces import Ranks, all_ranks, reshard
from finetune.tokens.conversation import read_conversation
from finetune.untrusted.json_files import read_object
from finetune.untrusted.safetensors_header import add_metadata
from finetune.wording import metric_in_words

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def save(
    recipe: Recipe, parts: Assembled, state: TrainState, saves: Saves, then: Callable[[], None] | None = None
) -> None:
    """Write a checkpoint, or begin to. Every rank calls it and writes its own pieces.

    `then` is called when the checkpoint exists.
    """
    run_dir, tensors, keep = Path(recipe.run_dir), checkpoint_tensors(parts), recipe.save_total_limit
    # Pruning keeps the best evaluation's checkpoint too, because its weights are exported at the end.
    best = state.best_step if recipe.training.exports_best else None
    saves.save(run_dir, state.step, tensors, state.as_json(), keep=keep, best=best, then=then)


@contextmanager
def on_every_machine(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Within the block, `ranks.apart` have a copy of rank 0's checkpoint in `folder`, each machine its own.

    Args:
        folder: The checkpoint's in rank 0's folder, or in the rank's machine's own.

    Raises EnvironmentMismatch, on every rank, if a machine has no room for it.
    """
    if not ranks.apart:
        yield
        return
    from finetune.ranks.transfers import move_files

    receivers = sorted(set(ranks.apart.values()))
    temporary = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}")

    def list_files() -> dict[str, int]:
        if ranks.rank == 0:
            return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        if ranks.rank in receivers:
            temporary.mkdir(parents=True, exist_ok=True)
        return {}

    def bring() -> None:
        moves = [(name, size, 0, receiver) for name, size in sizes.items() for receiver in receivers]
        move_files(folder if ranks.rank == 0 else temporary, moves, ranks)
        if ranks.rank in receivers:
            publish_folder(temporary, folder)

    with library_errors(writing=folder, kept="the checkpoint is intact on rank 0's machine; "):
        sizes = act_on_every_rank(ranks, folder, list_files)[0]
        act_on_every_rank(ranks, folder, bring)
    yield
    ranks.gather(None)  # every rank has read it
    if ranks.rank in receivers:
        remove_folder(folder)


def restore(recipe: Recipe, parts: Assembled, step: int, ranks: Ranks) -> TrainState:
    """Fill weights and optimizer in place, on every rank from the same files. Returns the state to resume from.

    Raises FinetuneError if this rank does not see the checkpoint, or it does not fit the model.
    """
    if step == 0:
        return TrainState()
    # Rank 0 verified the hash of every byte when it claimed the run folder. Copies of it are verified here.
    folder, is_copy = step_folder(Path(recipe.run_dir), step), ranks.rank in ranks.apart
    with on_every_machine(folder, ranks), library_errors(f"{folder}: cannot be resumed from"):
        return TrainState.from_json(fill_from(parts, folder, hashes=is_copy))


def load_weights(parts: Assembled, checkpoint: Checkpoint) -> None:
    """Load trained weights from a checkpoint, in place, on every rank. The optimizer's state stays unchanged."""
    if parts.engine is not None:
        from finetune.strategies.zero_state import load_masters_from

        load_masters_from(parts.engine, checkpoint.groups["model"])
    else:
        # After an evaluation FSDP2's head is still gathered. Its parameters are then not the optimizer's, but copies.
        reshard(parts.unwrapped_model)
        load_model(parts.unwrapped_model, parts.of_this_stage(checkpoint.groups["model"]))


def checkpoint_tensors(parts: Assembled) -> dict[str, Any]:
    """This rank's part of a checkpoint: group -> name -> tensor or piece."""
    if parts.engine is not None:
        from finetune.strategies.zero_state import trained_pieces

        return trained_pieces(parts.engine)
    # Save the optimizer's shards, not gathered copies in the compute format.
    reshard(parts.unwrapped_model)
    named = {
        "model": model_tensors(parts.unwrapped_model),
        "optimizer": optimizer_tensors(parts.unwrapped_model, parts.optimizer),
    }
    return {group: parts.to_write(tensors) for group, tensors in named.items()}


def fill_from(parts: Assembled, folder: Path, *, hashes: bool) -> dict[str, Any]:
    """Fill weights and optimizer from a checkpoint, in place. Returns its state.json."""
    checkpoint = examine(folder, hashes=hashes)
    if isinstance(checkpoint, str):
        raise FinetuneError(f"{folder}: {checkpoint}; every rank must see the run folder")
    saved_model, saved_optimizer = checkpoint.groups["model"], checkpoint.groups["optimizer"]
    if parts.engine is not None:
        from finetune.strategies.zero_state import load_pieces

        load_pieces(parts.engine, saved_model, saved_optimizer)
    else:
        reshard(parts.unwrapped_model)
        load_model(parts.unwrapped_model, parts.of_this_stage(saved_model))
        load_optimizer(parts.unwrapped_model, parts.optimizer, parts.of_this_stage(saved_optimizer))
    return read_state_of(checkpoint)


def export(recipe: Recipe, parts: Assembled, tokenizer: PreTrainedTokenizerBase, *, write: bool) -> Path | None:
    """Write the adapter in PEFT's layout, or the whole model, on the rank with `write`. Every rank takes part.

    Returns the folder. Raises NotFinite, on every rank, if a number does not fit the export's number format.
    """
    # Gathering is collective. Only the writing rank keeps the unsharded weights, in host memory.
    weights = parts.trained_weights(dtype=export_dtype(recipe), keep=write)
    bad: list[str] = []
    if write:
        bad = not_finite(weights, 0)
    refuse_unexportable(recipe, all_ranks().gather(bad)[0])
    if write:
        return export_weights(recipe, parts.unwrapped_model, weights, tokenizer)
    return None


def export_dtype(recipe: Recipe) -> torch.dtype | None:
    """The exported weights' number format; None: an adapter's training format."""
    if recipe.lora:
        return None
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    return dtype


def refuse_unexportable(recipe: Recipe, bad: list[str]) -> None:
    """Raise NotFinite if `bad` names weights that are not finite in the export's number format."""
    if bad:
        dtype = recipe.model.dtype
        raise NotFinite(
            f"export: not finite in {dtype}: {len(bad)} of the weights, first {bad[0]}; nothing is exported, "
            "checkpoints are intact; export in another model.dtype (bfloat16 has float32's range)"
        )


def export_weights(
    recipe: Recipe, model: torch.nn.Module, weights: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase
) -> Path:
    """Write adapter/ or model/ into the recipe's run folder, and return it.

    Args:
        model: Unwrapped, maybe sharded or on meta. Its weights are not read.
        weights: The trained weights by the model's own names, unsharded and in `export_dtype`.
    """
    folder, dtype, any_model = Path(recipe.run_dir), export_dtype(recipe), cast("Any", model)
    decoder = decoder_parts(model)
    conversation = read_conversation(folder)
    stops: list[int] = []
    if conversation is not None:
        tokenizer, stops = conversation.applied_to(tokenizer), [*conversation.stops.values()]
        stop_on(decoder, stops)
    if dtype is None:
        base = published_name(recipe.model.name_or_path)
        rests_on = recorded_base(folder) or base_identity(recipe.model)
        return export_adapter(
            any_model,
            weights,
            tokenizer,
            folder,
            base=base,
            section=recipe.model,
            rests_on=rests_on,
            settings=_settings_with(stops, recipe, decoder),
        )
    return export_model(any_model, weights, tokenizer, folder, dtype=dtype, section=recipe.model)


def _settings_with(stops: Sequence[int], recipe: Recipe, decoder: PreTrainedModel) -> dict[str, Any] | None:
    """The base's generation settings with the training's stops, without penalties; None if they equal the base's."""
    own, file = own_end_tokens(recipe.model), base_file(recipe.model, GENERATION)
    listed = read_object(file) if file else cast("Any", decoder).generation_config.to_diff_dict()
    settings = without_penalties(listed)
    if set(stops) <= set(own) and settings == listed:
        return None
    return settings | {"eos_token_id": [*own, *(stop for stop in stops if stop not in own)]}


def export_adapter(
    model: PeftModel,
    weights: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path,
    *,
    base: str,
    rests_on: Mapping[str, Any] = MappingProxyType({}),
    section: ModelSection | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Write run_dir/adapter, complete or not at all. Plain `PeftModel.from_pretrained` loads it.

    If a multimodal model's text part was trained, the adapter loads onto the whole model too.

    Args:
        model: Unwrapped, maybe sharded.
        weights: Its trained weights by its own names, unsharded.
        base: The base model's name as others can load it, for adapter_config.json.
        section: The base, whose spelling of the tokenizer's settings stays; None: the library's.
        rests_on: The base's identity. Its commit becomes adapter_config.json's `revision`; its content goes into the
            weight file's metadata, where readers of adapters look for nothing.
        settings: generation_config.json for engines that answer with the adapter; None: the base's holds.
    """
    from finetune.run_folder.base_parts import save_tokenizer

    config = model.peft_config["default"]
    config.base_model_name_or_path, config.revision = base, rests_on.get("commit")
    whole_names = names_in_whole(decoder_parts(model))

    def write(folder: Path) -> None:
        # "auto" would ask the Hub whether the vocabulary grew. Trained embeddings are in `weights` anyway.
        own = ["default"]
        model.save_pretrained(str(folder), selected_adapters=own, state_dict=weights, save_embedding_layers=False)
        if whole_names is not None:
            name_for_both(folder, model, whole_names)
        # peft writes these names as sets, and a set's order changes from process to process. Sort them.
        config_file = folder / "adapter_config.json"
        saved = json.loads(config_file.read_text(encoding="utf-8"))
        for key in ("target_modules", "target_parameters", "exclude_modules"):
            if isinstance(saved.get(key), list):
                saved[key] = sorted(saved[key])
        write_json(config_file, saved)
        if rests_on.get("content"):
            add_metadata(folder / WEIGHTS, {BASE_CONTENT: str(rests_on["content"])})
        if settings is not None:
            write_json(folder / GENERATION, settings)
        save_tokenizer(tokenizer, folder, section)

    return _publish(run_dir / "adapter", write)


def export_model(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path,
    *,
    dtype: torch.dtype,
    section: ModelSection | None = None,
) -> Path:
    """Write run_dir/model as safetensors, complete or not at all.

    Args:
        model: Unwrapped, maybe sharded.
        weights: All its weights by its own names, unsharded and in `dtype`. Tied ones are one tensor.
        dtype: The weights' format.
        section: The base, whose spelling of all settings stays, and whose untrained tensors are copied; None: the
            library's spelling.
    """
    from finetune.run_folder.base_parts import add_untrained, buffers_of_base, save_tokenizer, write_model_settings

    def write(folder: Path) -> None:
        buffers = {} if section is None else buffers_of_base(section, model)
        model.save_pretrained(str(folder), state_dict=buffers | weights)
        # save_pretrained states the dtype of the model in memory. Others would load the weights in that dtype.
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_json(folder / "config.json", config | {"dtype": dtype_name(dtype)})
        if section is not None:
            write_model_settings(folder, model, section, dtype)
            add_untrained(folder, section, model)
        save_tokenizer(tokenizer, folder, section)

    return _publish(run_dir / "model", write)


def _publish(target: Path, write: Callable[[Path], None]) -> Path:
    # The result appears under its name when all files are complete and synced.
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}")
    remove_folder(temporary)  # from a process that was killed during an export
    with library_errors(writing=target, kept="checkpoints are intact; "):
        try:
            write(temporary)
            publish_folder(temporary, target)
        except BaseException:
            remove_folder(temporary)  # half an export would keep a full disk full
            raise
    return target


@dataclass(frozen=True)
class Exported:
    """The step whose weights are exported, and their held-out loss, score or reward.

    Evaluations from step 1 on count, by training.metric_for_best_model. Each has a checkpoint.
    """

    step: int
    best: bool  # the best evaluation's step; else the last one
    metric: str
    loss: float | None  # the value of `metric`; None if no rows are held out

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def forget_lost_best(recipe: Recipe, state: TrainState) -> str:
    """Let a resumed run forget the best evaluation so far if its checkpoint is lost.

    Returns a line that says so, or an empty text. Every rank calls it, and rank 0 examines the checkpoint.
    """
    if state.best_step is None or not recipe.training.exports_best:
        return ""
    folder, ranks = step_folder(Path(recipe.run_dir), state.best_step), all_ranks()
    # Rank 0 decides for all: ranks that disagree about the best step would export different weights.
    problem = None
    if ranks.rank == 0:
        examined = examine(folder, hashes=False)
        problem = None if isinstance(examined, Checkpoint) else examined
    problem = ranks.gather(problem)[0]
    if problem is None:
        return ""
    lost, state.best_step, state.best_eval_loss = state.best_step, None, math.inf
    return f"{folder}: the best evaluation so far, of step {lost}, cannot be exported ({problem}); later ones count"


def weights_to_export(recipe: Recipe, parts: Assembled, state: TrainState, ranks: Ranks) -> Exported:
    """Load the weights to export into the model. Every rank calls it.

    Raises FinetuneError, on every rank, if the best evaluation's checkpoint is damaged.
    """
    metric, step = recipe.training.metric_for_best_model, state.best_step
    if not recipe.training.exports_best or step is None:
        return Exported(state.step, False, metric, state.last_eval_loss)
    if step != state.step:  # else the model has these weights already
        folder = step_folder(Path(recipe.run_dir), step)
        with on_every_machine(folder, ranks):
            # Rank 0, and ranks with a copy, verify the hash over every byte.
            checkpoint = examine(folder, hashes=ranks.rank == 0 or ranks.rank in ranks.apart)
            problem = checkpoint if isinstance(checkpoint, str) else None
            # All ranks raise together: one that raised alone would leave the others in load_weights' collectives.
            if problem := next(filter(None, ranks.gather(problem)), None):
                raise FinetuneError(
                    f"{folder}: the best evaluation's checkpoint cannot be exported: {problem}; the last step's "
                    "weights can: start again with training.load_best_model_at_end=false"
                )
            assert isinstance(checkpoint, Checkpoint)
            load_weights(parts, checkpoint)
    return Exported(step, True, metric, state.best_eval_loss)


def describe_exported(exported: Exported, state: TrainState) -> str:
    """A line for the terminal: the exported step, and its loss if known."""
    if exported.loss is None:
        return f"exported: the weights of step {exported.step}, the last"
    text = f"exported: the weights of step {exported.step}, {metric_in_words(exported.metric, exported.loss)}"
    if not exported.best or state.last_eval_loss is None:
        return f"{text}, the last"
    if exported.step == state.step:
        return f"{text}, the last and the best"
    last = metric_in_words(exported.metric, state.last_eval_loss).rpartition(" ")[2]
    return f"{text}, the best evaluation; of step {state.step}, the last, it is {last}"
