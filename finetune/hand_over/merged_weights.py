"""Merge a run's adapter into its base: safetensors that plain transformers loads, written one shard at a time.

One base tensor is read at a time and merged by peft in float32. It is kept in the result's number format until its
shard is full. Nothing else is kept in memory, so a model larger than this machine's memory can be merged.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from finetune.errors import FinetuneError
from finetune.files import write_json
from finetune.hand_over.parameter_deltas import FileTensors, adapted_parameters, packed_parameters, parameter_deltas
from finetune.hand_over.weight_files import (
    INDEX,
    SINGLE,
    AdapterFile,
    BaseWeights,
    open_adapter,
    open_base,
    read_settings,
)
from finetune.library_errors import library_errors
from finetune.model.adapters import experts_as_parameters
from finetune.model.build import structure_alone
from finetune.model.quantization import as_quantized, quantized_layers
from finetune.model.stored_structure import stored_structure
from finetune.model.text_part import WholeNames, names_in_whole
from finetune.recipe.schema import Recipe
from finetune.run_folder.base_parts import (
    PROCESSOR_FILES,
    copy_code,
    own_config,
    untrained_in_words,
    write_settings,
)
from finetune.run_folder.facts import GENERATION, not_finished_yet
from finetune.wording import counted

SHARD_BYTES = 2 * 10**9  # in one file; a larger tensor has a file of its own
NOT_THE_MODELS = ("adapter_config.json", "adapter_model.safetensors", "README.md")


@dataclass(frozen=True)
class Merge:
    """The parts to merge. Everything is on disk except the names."""

    recipe: Recipe
    base: BaseWeights
    adapter: AdapterFile
    quantized: frozenset[str]  # layers with weights that training had quantised
    embedding: str  # the embeddings' tensor
    head: str
    tied: bool  # the base's head is its embeddings
    two_in_files: bool  # the files hold two matrices, although config.json ties them
    device: torch.device
    deltas: FileTensors  # for parameters that are not a layer's weight
    packed: FileTensors  # experts that training had quantised
    names: WholeNames  # the trained model's names in the whole model
    untrained: Collection[str] = ()  # tensors that transformers does not load, and that keep their bits

    @property
    def changed(self) -> set[str]:
        """The tensors in the base's files that the adapter changes."""
        layers = (f"{layer}.weight" for layer in self.adapter.layers)
        return {*self.adapter.replaced, *layers, *self.deltas.names, *self.adapter.new_rows}

    @property
    def unties(self) -> bool:
        """Whether head and embeddings are two matrices now, although the base's config.json ties them."""
        # Tied matrices both get the same new rows, which leaves them equal.
        changed = self.changed - self.adapter.new_rows.keys()
        return self.two_in_files or (self.tied and bool(changed & {self.embedding, self.head}))

    @property
    def vocabulary(self) -> int:
        """Rows in the embeddings, including new tokens'."""
        return self.shapes()[self.embedding][0]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The merged model's tensors, in the order of the base's files."""
        shapes = dict(self.base.shapes)
        if self.tied:
            shapes.pop(self.head, None)
        if self.unties:
            shapes[self.head] = shapes[self.embedding]
        for name, (_, rows) in self.adapter.new_rows.items():
            if name in shapes:
                shapes[name] = (max(shapes[name][0], max(rows) + 1), *shapes[name][1:])
        return shapes

    def tensor(self, name: str, dtype: torch.dtype, *, dequantized: bool) -> Tensor:
        """One tensor for the merged model, on the host.

        Args:
            dtype: For floating-point tensors. Others keep theirs.
            dequantized: If training had a quantised weight, dequantise that one instead of using the base's own.
        """
        if name in self.adapter.replaced:
            return self.adapter.read(self.adapter.replaced[name]).to(dtype, copy=True)
        stored = self.base.read(self.embedding if self.tied and name == self.head else name)
        if not stored.is_floating_point() or name in self.untrained:
            return stored.clone()
        # Training saw the weight in the recipe's number format, and computed initialisations from it.
        weight = stored.to(self.device, getattr(torch, self.recipe.model.dtype), copy=True)
        layer, adapter = name.removesuffix(".weight"), self.adapter
        # First the weight as training had it, frozen; then the adapter's sum; then new tokens' rows.
        if layer in self.quantized:
            # PiSSA and OLoRA subtract their start s B0 A0 from the dequantised weight D, and quantise the remainder R:
            #     dequantized   Q(R): the bits that training had
            #     own           W + (R - D) = W - s B0 A0
            assert self.recipe.quantization is not None
            rounded = as_quantized(weight, self.recipe.quantization)
            if layer in adapter.layers and adapter.moves_the_base:
                remainder = adapter.start(layer, rounded.float())  # peft subtracts in float32
                if dequantized:
                    weight = as_quantized(remainder, self.recipe.quantization)
                else:
                    weight = weight.float() + (remainder - rounded.float())
                del remainder  # float32, as large as the weight
            elif dequantized:
                weight = rounded
            del rounded
        elif layer in adapter.layers:
            weight = adapter.start(layer, weight)
        elif dequantized and name in self.packed.names:
            weight = self.packed.of(name).to(self.device)
        if name in self.deltas.names:
            weight = weight.float() + self.deltas.of(name).to(self.device)
        if layer in adapter.layers:
            weight = adapter.merged(layer, weight.float())
        weight = weight.to("cpu", dtype)
        if name not in adapter.new_rows:
            return weight
        # [the base's rows, hidden] grows to [rows with the new tokens', hidden].
        key, rows = adapter.new_rows[name]
        grown = weight.new_zeros(self.shapes()[name])
        grown[: len(weight)] = weight
        grown[rows] = adapter.read(key).to(dtype)
        return grown


def plan_merge(recipe: Recipe, run_dir: Path, device: torch.device) -> Merge:
    """Read names and settings, no weights. Raises FinetuneError if the run has nothing to merge."""
    if recipe.lora is None:
        raise FinetuneError(f"{run_dir}: all weights were trained: {run_dir / 'model'} is the whole model already")
    if not (run_dir / "adapter").is_dir():
        raise not_finished_yet(run_dir)
    base = open_base(recipe.model)  # this fetches the files that decide the structure
    stored, structure = stored_structure(recipe.model), structure_alone(recipe)
    whole = names_in_whole(structure) or WholeNames({}, structure)
    adapter = open_adapter(run_dir / "adapter", whole)
    names = {id(module): name for name, module in structure.named_modules()}
    head, embedding = (
        f"{base.layer(names[id(module)], whole)}.weight"
        for module in (structure.get_output_embeddings(), structure.get_input_embeddings())
    )
    quantized = frozenset(base.layer(names[id(layer)], whole) for layer in quantized_layers(structure))
    # Only the structure says whether a model is tied: configurations state it for models without such weights too.
    tied = bool(getattr(structure.config, "tie_word_embeddings", False))
    two_in_files = stored is not None and stored.is_at_odds
    if tied and embedding not in base.files and head in base.files:  # transformers uses the one for both
        base = base.renamed(head, embedding)
    with experts_as_parameters(structure):
        parameters = adapted_parameters(structure, adapter.layers, list(adapter.target_parameters))

    def in_base(name: str) -> str:
        return whole.in_file(name, base.files)

    deltas = parameter_deltas(structure, parameters.values(), adapter.settings_of, adapter.read, in_base)
    packed = packed_parameters(structure, recipe, base.read, in_base)
    paths = {base.layer(layer, whole): layer for layer in adapter.layers if layer not in parameters}
    layers = {layer: adapter.layers[path] for layer, path in paths.items()}
    replaced = {whole.in_file(name, base.files): key for name, key in adapter.replaced.items()}
    adapter = replace(adapter, layers=layers, replaced=replaced, trained_as=paths)
    untrained = {} if stored is None else stored.unread
    merge = Merge(
        recipe, base, adapter, quantized, embedding, head, tied, two_in_files, device, deltas, packed, whole, untrained
    )
    if missing := sorted(merge.changed - merge.shapes().keys()):
        tensors = counted(len(missing), "tensor")
        raise FinetuneError(
            f"{recipe.model.name_or_path}: the adapter changes {tensors} that the base's files do "
            f"not have, first {missing[0]}; save the base once by transformers' save_pretrained and name that folder"
        )
    return merge


def write_merged(
    merge: Merge, folder: Path, dtype: torch.dtype, *, dequantized: bool, say: Callable[[str], None]
) -> None:
    """Write weights, config and tokenizer into `folder`, which is created."""
    folder.mkdir(parents=True)
    # Fill each shard up to SHARD_BYTES, in the order of the base's files.
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, shape in merge.shapes().items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and shard_bytes + nbytes > SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += nbytes
    places: dict[str, str] = {}
    total, section = 0, merge.recipe.model
    with library_errors(writing=folder):
        for number, names in enumerate(shards, start=1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors = {name: merge.tensor(name, dtype, dequantized=dequantized) for name in names}
            save_file(tensors, folder / file, metadata={"format": "pt"})
            total += sum(tensor.nbytes for tensor in tensors.values())
            places |= dict.fromkeys(names, file)
            say(f"{file}: {counted(len(names), 'tensor')}")
            tensors.clear()  # now: else two shards would be in memory while the next one is filled
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            write_json(folder / INDEX, index)
        # The base's keys stay in its files, because inference servers read keys that transformers has renamed.
        for name in ("config.json", GENERATION, *PROCESSOR_FILES):
            settings = read_settings(section, name)
            if settings is not None and name == "config.json":
                vocabulary, scaling = merge.vocabulary if merge.adapter.new_rows else None, section.rope_scaling
                settings = own_config(
                    settings, dtype=dtype, unties=merge.unties, vocabulary=vocabulary, rope_scaling=scaling
                )
            if settings is not None:
                write_settings(folder / name, settings)
        copy_code(folder, section)
        # The adapter's folder has the tokenizer, with the chat template of the training.
        adapter = merge.adapter.path.parent
        for path in sorted(adapter.rglob("*")):
            if path.is_file() and path.name not in NOT_THE_MODELS:
                target = folder / path.relative_to(adapter)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
    for line in untrained_in_words(section):
        say(line)
