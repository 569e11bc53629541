"""A model of the same making, small: two layers, a few heads, random weights, a tokenizer of the recipe's own rows.

For rehearsals, which download no weights. What decides how a model is sharded, quantised and adapted stays: the
architecture, grouped-query heads, tied embeddings, RoPE and window settings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.formats import Chat
from finetune.data.row_reader import RowReader
from finetune.data.sources import resolve
from finetune.errors import EnvironmentMismatch
from finetune.model.known_configs import decoder_config
from finetune.recipe.schema import Data

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


LAYERS = 2
BLOCK = 64  # bitsandbytes' smallest block: matrices whose rows are whole blocks quantise as large ones do
LARGEST = 30_000_000  # parameters; what stays larger than this was not understood
VOCABULARY = 1024
# Of a mixture, and how many of them a token goes to.
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 2),
}
# Widths of MLPs. Many architectures have several; GPT-2's may be missing, and then is four times the hidden size.
INNER = (
    *("intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("n_inner", "ffn_dim", "ffn_hidden_size"),
)
SAMPLED_ROWS = 300  # that the tokenizer learns from

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_TOKENS = {
    "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
    "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
}
CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['reasoning_content'] %}{{- '<think>' + message['reasoning_content'] + '</think>' }}{% endif %}"
    "{{- message['content'] or '' }}"
    "{%- if message['tool_calls'] %}{{- message['tool_calls'] | tojson }}{% endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# What the tokenizer learns from where the rows are not on this machine.
BUILT_IN = (
    "Question: which river runs past the old mill? Answer: the one that turns its wheel.",
    "Please write the numbers from one to ten, then say which of them are prime: 2, 3, 5 and 7.",
    "You are a patient assistant. The user asks; the assistant answers briefly and says when it does not know.",
)


@dataclass(frozen=True)
class Shrunk:
    """A small model in a folder, and the real model that it replaces."""

    folder: Path
    architecture: str
    source: str  # where the full configuration was read
    full: Mapping[str, int]  # layers and hidden_size of the real model, 0 where it has other names
    small: Mapping[str, int]
    parameters: int
    vocabulary: int


def shrunken_config(config: Mapping[str, Any], vocabulary: int, layers: int = LAYERS) -> dict[str, Any]:
    """The configuration with so many layers and a few heads; what is not a size stays as it was.

    The number of query heads to a key-value head stays, and so does hidden_size to heads x head_dim, so that each
    matrix has the shape that it has in the real model: square, wide or tall.
    """
    small = dict(config)
    heads, groups, head_dim = _heads(config)
    ratio = heads // groups
    small_groups = 1 if groups == 1 or ratio >= 8 else 2
    small_heads = ratio * small_groups
    small_dim = BLOCK // math.gcd(BLOCK, small_heads)  # so that heads x head_dim is whole blocks
    small_dim = max(small_dim, 8)
    hidden = _blocks(small_heads * small_dim * config["hidden_size"] / (heads * head_dim))
    small |= {
        "num_hidden_layers": layers,
        "num_attention_heads": small_heads,
        "num_key_value_heads": small_groups,
        "head_dim": small_dim,
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "bos_token_id": None,
        **END_TOKENS,
    }
    small |= {key: min(config[key], most) for key, most in EXPERTS.items() if config.get(key)}
    for key in INNER:
        if config.get(key):
            small[key] = _blocks(hidden * config[key] / config["hidden_size"])
    if config.get("rotary_dim"):  # GPT-J's, of a head's widths
        small["rotary_dim"] = small_dim * config["rotary_dim"] // head_dim
    if config.get("vocab_size_per_layer_input"):
        small["vocab_size_per_layer_input"] = vocabulary
    if config.get("num_kv_shared_layers"):  # of two layers none has another of its kind before it
        small["num_kv_shared_layers"] = 0
    if "max_window_layers" in config:
        small["max_window_layers"] = min(layers, config["max_window_layers"])
    if config.get("layer_types"):
        small["layer_types"] = _every_kind(config["layer_types"], layers)
    for key in ("quantization_config", "dtype", "torch_dtype", "auto_map", "_name_or_path"):
        small.pop(key, None)
    return small


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, key-value heads, head_dim."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    return heads, groups, config.get("head_dim") or config["hidden_size"] // heads


def _blocks(size: float) -> int:
    return BLOCK * max(1, round(size / BLOCK))


def _every_kind(kinds: list[str], layers: int) -> list[str]:
    """Layers that show each kind of attention that there is, of two."""
    distinct = list(dict.fromkeys(kinds))
    return (distinct * layers)[:layers]


def shrink_model(
    name_or_path: str, revision: str, data: Data, folder: Path, new_tokens: Iterable[str] = (), layers: int = LAYERS
) -> Shrunk:
    """Write a small model of random float32 weights and its tokenizer, which knows no new token, into `folder`.

    Args:
        layers: Of the small model; where its architecture is made small by the probe, as many as that one has.

    Raises EnvironmentMismatch for a model that is not known here or cannot be made small, DataError for rows that are
    not there.
    """
    config, source = decoder_config(name_or_path, revision)
    texts = (without(new_tokens, text) for text in sample_texts(data))
    tokenizer = train_tokenizer(texts, template_variables(data))
    reason = ""
    for make in (partial(_by_blocks, layers), _by_probe):
        try:
            model, small = make(config, len(tokenizer), folder)
        except Exception as error:  # whatever a library raises of sizes that do not go together
            missing = isinstance(error, KeyError)
            reason = reason or (
                f"its configuration has no {error.args[0]}" if missing else " ".join(str(error).split())[:200]
            )
        else:
            break
    else:
        raise _cannot_shrink(name_or_path, reason)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = sum(parameter.numel() for parameter in model.parameters())
    return Shrunk(folder, type(model).__name__, source, _facts(config), _facts(small), size, len(tokenizer))


def _by_blocks(
    layers: int, config: Mapping[str, Any], vocabulary: int, _: Path
) -> tuple[PreTrainedModel, dict[str, Any]]:
    small = shrunken_config(config, vocabulary, layers)
    return _that_runs(small), small


def _by_probe(config: Mapping[str, Any], vocabulary: int, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The probe's small model, whose sizes go together in any architecture, but are not whole blocks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.probe.shrink import small_models  # with torch

    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    failed: Exception | None = None
    for found in small_models(whole, folder):
        small = json.loads((found.folder / "config.json").read_text("utf-8"))
        sizes = {name: vocabulary for name in ("vocab_size", "vocab_size_per_layer_input") if name in small}
        tokens = {name: 0 for name in small if name.endswith("token_id") and isinstance(small[name], int)}
        small |= sizes | tokens | {name: id for name, id in END_TOKENS.items() if name in small}
        try:
            return _that_runs(small), small
        except Exception as error:  # the next ones are larger
            failed = error
    assert failed is not None, "small_models yields or raises"
    raise failed


def _that_runs(config: Mapping[str, Any]) -> PreTrainedModel:
    """A model with random float32 weights, after a forward of a few tokens. Raises what the library does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = AutoConfig.for_model(**config)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(kind).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters are left")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
        model(input_ids=torch.arange(3, 11)[None], use_cache=False)
    return model


def _cannot_shrink(name: str, reason: str) -> EnvironmentMismatch:
    return EnvironmentMismatch(
        f"model.name_or_path: {name}: this architecture cannot be made small: {reason}; rehearse with a small local "
        "model of its kind: model.name_or_path=FOLDER"
    )


def _facts(config: Mapping[str, Any]) -> dict[str, int]:
    layers, hidden = config.get("num_hidden_layers", 0), config.get("hidden_size", 0)
    return {"layers": layers, "hidden_size": hidden}


def sample_texts(data: Data) -> list[str]:
    """Text of the recipe's own training rows, as far as they are on this machine. Raises DataError."""
    sources = [resolve(entry) for entry in data.train]
    local = [source for source in sources if source.kind != "hub"]
    rows = (row for source in local for row in islice(source.rows(), SAMPLED_ROWS // max(1, len(local))))
    texts = [" ".join(_strings(row.values)) for row in rows]  # a bad row has none; training says what is wrong
    return [*texts, *BUILT_IN]


def without(tokens: Iterable[str], text: str) -> str:
    """The text without these: a token that it learned from them would not be new."""
    for token in tokens:
        text = text.replace(token, " ")
    return text


def template_variables(data: Data) -> list[str]:
    """Variables that the data sets and the first of their rows give the chat template. Raises DataError."""
    names = [name for entry in data.sets for name in entry.chat_template_kwargs]
    for source in map(resolve, data.sets):
        if source.kind != "hub":
            read = (row.read for row in islice(RowReader(source).rows(), SAMPLED_ROWS))
            names += [name for row in read if isinstance(row, Chat) for name in row.template_kwargs]
    return list(dict.fromkeys(names))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)


def train_tokenizer(texts: Iterable[str], variables: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most 1,024 tokens, with a template in the manner of ChatML; pad and eos differ.

    `variables`: names that the template has, as the model's own has them, and does not use.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template="".join(f"{{#- {name} #}}" for name in variables) + CHAT_TEMPLATE,
        model_max_length=2048,
    )
