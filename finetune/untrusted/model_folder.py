"""Checks a model's or an adapter's folder before a library opens anything in it.

transformers 5.24 and peft 0.21 would follow these without being asked: an index that names pickles or files elsewhere,
an adapter beside a model (its own base is loaded instead), and integer weights, which are cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from finetune.output_stream import one_line
from finetune.untrusted.config_sizes import read_config
from finetune.untrusted.json_files import kind_of_value, read_object, unreadable
from finetune.untrusted.safetensors_header import FLOATS, TensorFacts, read_header

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_INDEX = 256 * 2**20
LONGEST_NAME = 255  # bytes of a file's name, on every file system in use


def look_at_model(folder: Path, *, whole: bool = False) -> None:
    """Check a folder's config, index and weight headers, as far as they are there. `whole`: weights must be there.

    Raises FinetuneError, in one line that begins with the file, if a library would load other contents or never end.
    """
    config = look_at_config(folder)
    if whole and not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        raise unreadable(
            folder,
            f"has no {SINGLE}, and pickles are never read",
            "save the model once by transformers' save_pretrained",
        )
    files = weight_files(folder)
    headers = {file: read_header(file) for file in files if file.exists()}
    if not config.get("quantization_config"):
        for file, header in headers.items():
            _refuse_integers(file, header)
    if (folder / INDEX).exists() and not (folder / SINGLE).exists():  # its files must have the tensors that it lists
        for tensor, name in read_object(folder / INDEX, MOST_INDEX)["weight_map"].items():
            if (folder / name) not in headers:
                raise unreadable(folder / name, f"is not there, and {INDEX} names it")
            if tensor not in headers[folder / name]:
                problem = f"names {name} for {one_line(tensor, 80)}, which is not in that file"
                raise unreadable(folder / INDEX, problem)


def look_at_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json; {} without one. Raises FinetuneError as `look_at_model` does."""
    if (folder / ADAPTER_CONFIG).exists() and (folder / CONFIG).exists():
        raise unreadable(
            folder / ADAPTER_CONFIG,
            "is beside a model's config.json: transformers would load the adapter, and its base in place of this model",
            "move it into a folder of its own, which model.adapter may name",
        )
    if (folder / CONFIG).exists():
        return read_config(folder / CONFIG)
    return {}


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read weights from: model.safetensors, or the index's files.

    Raises FinetuneError for an index with a name other than a safetensors file in the folder.
    """
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return [folder / SINGLE]
    index = read_object(folder / INDEX, MOST_INDEX, unique=True)
    return [folder / name for name in sorted({*plain_names(folder / INDEX, index.get("weight_map")).values()})]


def plain_names(path: Path, weight_map: Any) -> Mapping[str, str]:
    """An index's map of tensors to files. Raises FinetuneError."""
    if not isinstance(weight_map, dict) or not weight_map:
        raise unreadable(path, "has no weight_map of tensors to files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise unreadable(path, f"weight_map: {one_line(tensor, 80)} is {kind_of_value(name)}, not a file's name")
        if not is_plain_name(name):
            raise unreadable(
                path,
                f"weight_map names {one_line(name, 80)!r}, which is not a safetensors file of this folder",
                "pickles and files elsewhere are never read; save the model once by transformers' save_pretrained",
            )
    return weight_map


def is_plain_name(name: str) -> bool:
    """Whether this names a safetensors file inside the folder, and nothing outside it."""
    plain = name.endswith(".safetensors") and not name.startswith(".") and name.isprintable()
    return plain and len(name.encode()) <= LONGEST_NAME and Path(name).name == name


def _refuse_integers(file: Path, header: Mapping[str, TensorFacts]) -> None:
    for name, facts in header.items():
        if facts.dtype not in FLOATS and not _is_a_buffer(name, facts):
            raise unreadable(
                file,
                f"stores {one_line(name, 80)} as {facts.dtype}, and config.json names no quantization_config: "
                "the numbers would be cast and mean something else",
                "name the model in 16 bits, or correct its config.json",
            )


def _is_a_buffer(name: str, facts: TensorFacts) -> bool:
    """Masks, counters and positions in checkpoints from earlier releases: GPT-2's causal masks are bytes."""
    last = name.rpartition(".")[2]
    return last in ("bias", "masked_bias", "position_ids", "num_batches_tracked", "mask", "attn_mask") or (
        facts.dtype in ("I64", "I32") and last != "weight"
    )


# The kind of each value in adapter_config.json.
ADAPTER_KINDS: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (
    (("r",), (int,), "a whole number"),
    (("lora_alpha", "lora_dropout"), (int, float), "a number"),
    (("rank_pattern", "alpha_pattern"), (dict, type(None)), "a section"),
    (("target_modules", "exclude_modules", "layers_pattern"), (str, list, type(None)), "text or a list of names"),
    (("layers_to_transform",), (int, list, type(None)), "a number or a list of numbers"),
    (("target_parameters", "modules_to_save"), (list, type(None)), "a list of names"),
    (("trainable_token_indices",), (dict, list, type(None)), "a section or a list"),
    (("base_model_name_or_path", "bias", "task_type", "peft_type"), (str, type(None)), "text"),
)
MOST_RANK = 2**16


def look_at_adapter(folder: Path) -> dict[str, Any]:
    """An adapter's settings, after a check of its header. Raises FinetuneError as `look_at_model` does."""
    # An adapter_config.json whose values have the kinds that peft expects.
    path = folder / ADAPTER_CONFIG
    config = read_object(path)
    if (kind := config.get("peft_type")) != "LORA":
        raise unreadable(path, f"is of an adapter of kind {one_line(kind, 40)}", "name a LoRA adapter")
    if config.get("alora_invocation_tokens") is not None:  # where documents share a row, peft finds one start alone
        raise unreadable(path, "is of an adapter that begins at certain tokens (aLoRA)", "name a LoRA adapter")
    for names, kinds, words in ADAPTER_KINDS:
        for name in names:
            if name in config and (not isinstance(config[name], kinds) or type(config[name]) is bool):
                raise unreadable(path, f"{name} is {kind_of_value(config[name])}, and must be {words}")
    for name in ("target_modules", "exclude_modules", "layers_pattern", "target_parameters", "modules_to_save"):
        if isinstance(config.get(name), list) and not _are_texts(config[name]):
            raise unreadable(path, f"{name} is not a list of names")
    if not 1 <= config.get("r", 1) <= MOST_RANK or not _are_texts(config.get("rank_pattern") or {}):
        raise unreadable(path, f"r is {one_line(config['r'], 40)}, and must be from 1 to {MOST_RANK:,}")
    ranks = (config.get("rank_pattern") or {}).values()
    if not all(type(rank) is int and 1 <= rank <= MOST_RANK for rank in ranks):
        raise unreadable(path, f"rank_pattern has a rank that is not a whole number from 1 to {MOST_RANK:,}")
    if not (folder / ADAPTER_WEIGHTS).exists():
        raise unreadable(folder, f"has no {ADAPTER_WEIGHTS}; pickles are never read", "save it as safetensors")
    _refuse_integers(folder / ADAPTER_WEIGHTS, read_header(folder / ADAPTER_WEIGHTS))
    return config


def patterns_of(config: Mapping[str, Any]) -> list[str]:
    """The regular expressions in an adapter's settings, as peft takes them."""
    texts = [config.get(name) for name in ("target_modules", "exclude_modules")]
    patterns = [text for text in texts if isinstance(text, str) and text != "all-linear"]
    layers = config.get("layers_pattern") or []
    patterns += [*([layers] if isinstance(layers, str) else layers), *(config.get("modules_to_save") or [])]
    return [*patterns, *(key for name in ("rank_pattern", "alpha_pattern") for key in config.get(name) or {})]


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
