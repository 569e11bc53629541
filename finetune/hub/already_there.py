"""A repository that holds something already: an earlier model's files go, its owner's files and card stay."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from finetune.errors import FinetuneError
from finetune.hub.upload_files import RUN, TOKENIZER, Outgoing
from finetune.library_errors import words_of

# Files in a repository's top folder that a reader takes for the model: transformers, peft, vLLM, MLX and converters to
# GGUF. All `*.safetensors`, because vLLM reads every one that the index does not exclude.
WEIGHTS = (
    "*.safetensors *.safetensors.index*.json adapter_model* pytorch_model* consolidated*.pth tf_model* flax_model*"
).split()
SETTINGS = (
    "adapter_config.json config.json generation_config.json quantize_config.json quant_config.json "
    "hf_quant_config.json quantization_config.json tokenizer.json tokenizer_config.json tokenizer*.model* "
    "special_tokens_map.json added_tokens.json vocab.json vocab.txt vocab.bpe merges.txt spiece.model "
    "sentencepiece*.model tekken.json *.tiktoken chat_template.jinja chat_template.json additional_chat_templates/*"
).split()
# Conversions of a model and settings that this kit never pushes. Those of this very run stay.
MADE_FROM = (
    "*.gguf */*.gguf onnx/*.onnx* openvino_model* "
    "preprocessor_config.json processor_config.json video_preprocessor_config.json"
).split()
RECORD_OF_RUN = "metrics.jsonl"  # equal in two pushes of one run

# The owner's words about the repository win over the kit's.
OWNERS_KEYS = ("license", "license_name", "license_link", "language", "pipeline_tag")
OWN_TAGS = frozenset("finetune sft dpo kto lora full-fine-tuning dora qlora transformers".split())
OWN_RESULTS = "held-out rows of "

_BEGIN = "<!-- finetune writes this part anew with each push, down to its end mark. Write above or below it. {} {} -->"
_END = "<!-- finetune: end -->"
_PART = re.compile(
    re.escape(_BEGIN).replace(r"\{\}", "(?P<text>[0-9a-f]{16})", 1).replace(r"\{\}", "(?P<data>[0-9a-f]{16})", 1)
    + f"(?P<part>.*){re.escape(_END)}",
    re.DOTALL,
)


def obsolete_files(on_hub: Mapping[str, str], sent: Mapping[str, Outgoing], card: str) -> tuple[list[str], list[str]]:
    """The files of an earlier model to delete, and files that stay although a reader may take them for this model.

    Args:
        there: The repository's files: path -> hash.
        sent: This push's files by path.
        card: The README.md that is there; empty if there is none.
    """

    def matching(patterns: Sequence[str]) -> list[str]:
        # fnmatch's * also matches a slash. Readers look into the top folder, so a pattern has as many as its path.
        return [
            path
            for path in sorted(on_hub.keys() - sent.keys())
            if any(fnmatchcase(path, one) and path.count("/") == one.count("/") for one in patterns)
        ]

    gone, made = matching([*WEIGHTS, *SETTINGS, *TOKENIZER]), matching(MADE_FROM)
    same_run = False
    if RECORD_OF_RUN in sent:
        # The Hub names a small file by git's hash of "blob SIZE\0" and its content, and a large one by SHA-256.
        content = sent[RECORD_OF_RUN].read()
        small, large = hashlib.sha1(b"blob %d\0" % len(content) + content), hashlib.sha256(content)
        same_run = on_hub.get(RECORD_OF_RUN) in (small.hexdigest(), large.hexdigest())
    held_a_model = any(fnmatchcase(path, one) for path in on_hub for one in WEIGHTS if "/" not in path)
    if _PART.search(card.replace("\r\n", "\n")):  # reports and pictures of an earlier run of the kit
        gone += matching(RUN)
    if same_run:
        return gone, []
    if held_a_model:
        return gone + made, []
    return gone, made


def marked_card(card: str) -> str:
    """A new card whose text lies between the kit's marks. The marks hold hashes, so that a later edit is noticed."""
    parsed = parsed_card(card, "the new card")
    text = parsed.text.strip()
    return _card(parsed.data, f"{_BEGIN.format(_digest(text), _digest(parsed.data.to_dict()))}\n{text}\n{_END}")


def merged_card(on_hub: str, new: str) -> tuple[str, list[str]]:
    """The README.md to push over `there`, and notes about the owner's words in it.

    `new` comes from `marked_card`. The owner's metadata and all text outside the kit's marks stay. Raises FinetuneError
    if the metadata there cannot be read.
    """
    old, kit = (
        parsed_card(on_hub.removeprefix("\ufeff").replace("\r\n", "\n"), "README.md on the Hub"),
        parsed_card(new, "the new card"),
    )
    part, ours = kit.text.strip(), _PART.search(kit.text)
    assert ours is not None
    before, after, notes = old.text, "", []
    mark = _PART.search(old.text)
    if mark is not None:
        before, after = old.text[: mark.start()], old.text[mark.end() :]
        if _digest(mark["part"].strip()) != mark["text"]:
            if mark["text"] == ours["text"]:  # the same run again: the edit is all that is new
                part = f"{_BEGIN.format(mark['text'], ours['data'])}{mark['part']}{_END}"
                notes.append("README.md: was edited between finetune's marks; it stays as edited")
            else:
                after = f"{mark['part']}\n{after}"
                notes.append("README.md: was edited between finetune's marks; the edited text stands below the new")
    elif old.text.strip():
        notes.append("README.md: the text that is there stays, above this run's part")
    data = kit.data
    if mark is None or _digest(old.data.to_dict()) != mark["data"]:
        data, kept = _merged_metadata(old.data, kit.data)
        if kept:
            notes.append(f"README.md: its owner's metadata stay: {', '.join(kept)}")
    return _card(data, before, part, after), notes


def _merged_metadata(old: Any, kit: Any) -> tuple[Any, list[str]]:
    """The owner's metadata with the kit's facts about the weights, and the owner's entries that win over the kit's."""
    from huggingface_hub import ModelCardData

    owners, own = old.to_dict(), kit.to_dict()
    data = owners | own | {key: owners[key] for key in OWNERS_KEYS if owners.get(key)}
    if "base_model" not in own:  # the owner's word for the base may stay, but not how an earlier model came from it
        data.pop("base_model_relation", None)
    if "license" in owners:  # a name or link of the base's licence says nothing about the owner's
        data = {key: value for key, value in data.items() if not key.startswith("license_") or key in owners}
    for key, dropped in (("datasets", frozenset[str]()), ("tags", OWN_TAGS)):
        listed = owners.get(key) or []
        listed = [listed] if isinstance(listed, str) else listed
        if both := list(dict.fromkeys([*(one for one in listed if one not in dropped), *own.get(key, [])])):
            data[key] = both
    kept = [f"{key}: {owners[key]}" for key in OWNERS_KEYS if owners.get(key) not in (None, own.get(key))]
    merged = ModelCardData(**data)
    results = [one for one in old.eval_results or () if not str(one.dataset_name).startswith(OWN_RESULTS)]
    if results:
        merged.eval_results = [*results, *(kit.eval_results or ())]
        merged.model_name = merged.model_name or kit.model_name
        kept.append("results of its own")
    elif not kit.eval_results:
        merged.eval_results = None
    return merged, kept


def parsed_card(card: str, place: str) -> Any:
    """huggingface_hub's ModelCard. Raises FinetuneError, in one line, if its metadata cannot be read."""
    import yaml
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if not re.match(r"\s*---\s*\n", card):
        card = f"---\n{{}}\n---\n{card}"
    try:
        parsed: Any = ModelCard(card)
        block = REGEX_YAML_BLOCK.search(card)
        tags = (yaml.safe_load(block.group(2)) or {}).get("tags") if block else None
        if isinstance(tags, str):  # huggingface_hub 1.5 makes a list of its letters
            parsed.data.tags = [tags]
        return parsed
    except Exception as error:  # YAML's, or the card's own about a field
        raise FinetuneError(f"{place}: its metadata cannot be read: {words_of(error)}; correct them there") from None


def _card(data: Any, *parts: str) -> str:
    texts = [text.strip() for text in parts]
    return "\n\n".join([f"---\n{data.to_yaml(line_break=chr(10))}\n---", *filter(None, texts)]) + "\n"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
