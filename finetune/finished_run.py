"""Load a finished run's model again: the base as in training, quantised if it was, and the trained weights."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from finetune.architecture.attention import use_librarys
from finetune.architecture.families import refuse_unsuitable
from finetune.architecture.own_layers.compute import compute_layers
from finetune.architecture.own_layers.lora_linear import own_adapters
from finetune.base.identity import with_the_runs_base
from finetune.base.location import folder_of
from finetune.data.cells import BadRow
from finetune.errors import DoesNotFit, FinetuneError, NotFinite
from finetune.generation.settings import stop_on
from finetune.library_errors import library_errors, words_of
from finetune.model.adapter_targets import has_experts
from finetune.model.adapters import experts_as_parameters, silenced_peft, take_new_rows_into_loss
from finetune.model.build import configuration, decoder_parts, load_base
from finetune.model.new_tokens import add_rows, load_tokenizer
from finetune.model.quantization import unpacked_weight
from finetune.recipe.loader import recipe_from_resolved
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import strategy_of
from finetune.run_folder.facts import MOST_RECORD_BYTES, RunFacts, not_finished_yet, read_run, require_run_folder
from finetune.run_folder.tensor_checks import first_not_finite
from finetune.tokens.conversation import Conversation, read_conversation
from finetune.tokens.encoder import Encoder
from finetune.untrusted.json_files import read_object
from finetune.untrusted.model_code import refuse_other_code, refuse_unknown_code
from finetune.untrusted.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, look_at_adapter, patterns_of
from finetune.untrusted.programs import look_at_tokenizer, refuse_slow_patterns
from finetune.untrusted.safetensors_header import read_header

BOTH = ("base", "tuned")  # a run's models


@dataclass(frozen=True)
class FinishedRun:
    """A run's folder with something to load in it."""

    folder: Path
    recipe: Recipe
    trained: bool = True  # False: a recipe's base, before any training; the folder need not exist

    @cached_property
    def conversation(self) -> Conversation:
        """How chats are written and answers end: recorded by the training, or found again for an earlier release's run.

        Raises FinetuneError for a damaged record.
        """
        if self.trained and (recorded := read_conversation(self.folder)):
            return recorded
        data = self.recipe.data
        with suppress(FinetuneError, BadRow):  # a tokenizer or a template that does not load; its users say so
            return self.encoder.conversation()
        return Conversation({}, data.date_string, data.chat_template_kwargs, {})

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The run's exported tokenizer. Raises FinetuneError if it is not usable."""
        if not self.trained:
            return load_tokenizer(self.recipe)
        look_at_tokenizer(self.product)
        with library_errors(f"{self.product}: the tokenizer could not be loaded", "resume the run"):
            # False refuses code beside the tokenizer. None would ask a question on the terminal.
            trust = self.recipe.model.trust_remote_code
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.product, trust_remote_code=trust)
            return tokenizer

    @cached_property
    def encoder(self) -> Encoder:
        """Tokenises rows and prompts as the training did."""
        return Encoder(self.tokenizer, self.recipe.data, self.recipe.model)

    @cached_property
    def facts(self) -> RunFacts:
        """The training's records in the folder."""
        return read_run(self.folder, self.recipe)

    @property
    def product(self) -> Path:
        """adapter/ or model/, with the tokenizer."""
        return self.folder / ("adapter" if self.recipe.lora else "model")


def finished_run(run_dir: Path, overrides: Sequence[str] = ()) -> FinishedRun:
    """Open a run's folder. Raises FinetuneError if it holds no finished run."""
    hide_bars()
    run = FinishedRun(run_dir, recipe_of_run(require_run_folder(run_dir), overrides))
    if not run.product.is_dir():
        raise not_finished_yet(run_dir)
    section = run.recipe.model
    if section.trust_remote_code:
        refuse_other_code(run.product, folder_of(section.name_or_path, section.revision), section.name_or_path)
    return run


def hide_bars() -> None:
    """Where no terminal shows them: bars are for eyes."""
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


def recipe_of_run(resolved: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a run's folder, for a verb that loads its model. Raises FinetuneError."""
    recipe = recipe_from_resolved(resolved, overrides)
    recorded = read_conversation(resolved.parent)
    if recipe.data.chat_template and recorded is not None:  # the file that it names may have changed, or be gone
        data = recipe.data.model_copy(update={"chat_template": recorded.templates["default"]})
        recipe = recipe.model_copy(update={"data": data})
    # recipe.yaml may be a stranger's. Code that this user never accepted must not run.
    if recipe.model.trust_remote_code:
        refuse_unknown_code(resolved.parent, recipe.model.name_or_path, recipe.model.revision)
    return with_the_runs_base(recipe, resolved.parent)


def best_device() -> torch.device:
    """The device for a loaded model: the first GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_adapted(run: FinishedRun, device: torch.device, *, with_loss: bool = False) -> PeftModel:
    """Base and adapter, in evaluation mode. `disable_adapter` gives the base.

    With `with_loss` the forward knows packed rows and `shift_labels`, as in training. Else it is the library's.
    """
    settings = look_at_adapter(run.product)
    if bad := first_not_finite(run.product / ADAPTER_WEIGHTS):
        raise NotFinite(f"{run.product / ADAPTER_WEIGHTS}: not finite: {bad}; export an earlier step: finetune export")
    base = load_whole(run, device, tuned=False, with_loss=with_loss)
    # A stranger's pattern may take exponential time on these paths. Refuse it before peft tries it.
    paths = [path for path, _ in base.named_modules()]
    refuse_slow_patterns(str(run.product / ADAPTER_CONFIG), patterns_of(settings), paths)
    with experts_as_parameters(base), silenced_peft(), library_errors(lambda error: _no_adapter(run, error)):
        adapted = PeftModel.from_pretrained(base, str(run.product)).eval()
    # peft passes over missing tensors, and the model would answer like its base. Refuse such a file.
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    if missing := sorted(expected.keys() - read_header(run.product / ADAPTER_WEIGHTS).keys()):
        problem = f"{ADAPTER_WEIGHTS} lacks {len(missing)} of its tensors, first {missing[0]}"
        raise _no_adapter(run, ValueError(problem))
    if with_loss:
        take_new_rows_into_loss(adapted.get_base_model())
        compute_layers(adapted, unpacked_weight)
    return adapted


def answer_with_fewer_kernels(model: nn.Module) -> None:
    """Change adapters for answering, where the result stays the same up to rounding. The held-out loss comes before.

    Over 16 bits an adapter takes the base's number format, as under training's autocast: a token then takes 51 kernels
    in a layer of Llama, not 80. Over float32 it is merged: 38, not 51. In 16 bits merging would round small changes
    away. Over 4 and 8 bits nothing changes.
    """
    embedding = decoder_parts(model).get_input_embeddings().weight
    for layer in own_adapters(model):
        weight = layer.base_layer.weight
        if weight.dtype == torch.float32 and weight is not embedding and not layer.merged:
            layer.merge()
        elif weight.dtype in (torch.bfloat16, torch.float16):
            layer.lora_A.to(weight.dtype)
            layer.lora_B.to(weight.dtype)


def _no_adapter(run: FinishedRun, error: Exception) -> FinetuneError:
    return FinetuneError(
        f"{run.product}: the adapter could not be loaded onto {run.recipe.model.name_or_path}: {words_of(error)}; "
        "resume the run, which exports it again"
    )


def load_whole(run: FinishedRun, device: torch.device, *, tuned: bool, with_loss: bool = False) -> nn.Module:
    """The base, or the model of a run that trained all weights, in `model.dtype` and evaluation mode."""
    recipe, path = run.recipe, str(run.product) if tuned else None
    _refuse_experts_of_earlier_runs(run)
    if not with_loss:
        # Answers and comparisons have no packed rows to isolate, and answers need a key-value cache.
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"attention": "eager"})})
    with fitting(device, run):
        model = load_base(recipe, device, dtype=getattr(torch, recipe.model.dtype), path=path)
        add_rows(model, recipe.model, fill=path is None)  # a tuned model's file has the new tokens' rows
        stop_on(model, run.conversation.stops.values())
        if with_loss:
            refuse_unsuitable(model, recipe).taught_to(model)
        else:
            use_librarys(model)
        moved: nn.Module = model.to(device)  # type: ignore[arg-type]  # its annotation lacks devices
        return moved.eval()


def _refuse_experts_of_earlier_runs(run: FinishedRun) -> None:
    """Raise FinetuneError for a mixture that an earlier release trained over 4-bit layers and experts in 16 bits."""
    quantization, receipt = run.recipe.quantization, run.folder / "receipt.json"
    if not run.trained or quantization is None or not quantization.load_in_4bit or not receipt.is_file():
        return
    if "experts" not in read_object(receipt, MOST_RECORD_BYTES) and has_experts(configuration(run.recipe)):
        raise FinetuneError(
            f"{run.folder}: an earlier release trained this run with its experts in 16 bits, and they would be in 4 "
            "now; add quantization=null, which takes the whole base in 16 bits"
        )


@contextmanager
def fitting(device: torch.device, run: FinishedRun, ranks: int = 1) -> Iterator[None]:
    """Turn a full GPU into one line. `ranks` share the model."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        remedies = ["CUDA_VISIBLE_DEVICES= takes the CPU", "--endpoint URL asks a server"]
        strategy, budget = strategy_of(run.recipe), run.recipe.budget
        if strategy.shards_parameters or strategy.schedule is not None:
            more = max(2 * ranks, budget.gpus * budget.nodes)
            remedies.insert(0, f"--processes {more} spreads it over GPUs")
        raise DoesNotFit(f"the model does not fit into the memory of {device}; {'; '.join(remedies)}") from error


def models_of(
    run: FinishedRun, device: torch.device, *, with_loss: bool, names: Sequence[str] = BOTH
) -> Iterator[tuple[str, nn.Module]]:
    """("base", ...), then ("tuned", ...), those in `names`. Use each before you take the next: one is on the device at
    a time."""
    if run.recipe.lora is None or "tuned" not in names:
        for name in names:
            yield name, load_whole(run, device, tuned=name == "tuned", with_loss=with_loss)
            gc.collect()  # models refer to themselves in circles, and the next one needs the memory
        return
    adapted: Any = load_adapted(run, device, with_loss=with_loss)
    if "base" in names:
        with adapted.disable_adapter():  # one model serves as both
            yield "base", adapted
    yield "tuned", adapted
