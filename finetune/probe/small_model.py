"""A large model made small: narrow, with few layers and random weights.

Two kinds of small models are needed:

    small_models     for the probe. It has two layers of each kind, and finds the kinds in the model itself. All widths
                     are divided by common factors, so that sizes still fit together in code that nobody here knows.
    shrunken_model   for a rehearsal, which chooses the number of layers. All widths are whole blocks of 64, so that
                     matrices are quantised as the large ones are. Where it does not know the names of the sizes, it
                     takes the first of `small_models` that runs.

Both keep the parts that decide how a model is sharded, quantised and adapted: the architecture, grouped-query heads,
tied embeddings, RoPE and window settings. No family's name occurs here.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from finetune.library_errors import class_and_words
from finetune.model.stored_structure import NOT_OF_STRUCTURE

LARGEST_SMALL = 8_000_000  # parameters: 32 MB, and twice as much with gradients and the library's model

ModelClass = Callable[[PreTrainedConfig], PreTrainedModel]


class CannotShrink(Exception):
    """No small model of this architecture can be built; the text gives the reason."""


@dataclass(frozen=True)
class SmallModel:
    """A small model in a folder, as `model.name_or_path` takes it."""

    folder: Path
    name: str  # the class
    layers: int
    kinds: int  # different kinds among them
    parameters: int
    special: frozenset[int]  # tokens of the vocabulary that are no text


# Layers.
#
# Two layers are of one kind when their modules, parameters and settings have equal names, classes and values. Their
# place in the model and their widths are not compared.

LAYERS_OF_EACH_KIND = 2
DEPTHS = re.compile(r"^(num_)?(hidden_|decoder_)?(n_)?(layers?|blocks)$|^depth$")
LAYER_NUMBERS = re.compile(r"idx|idxs|index|indices|layer_id|layer_number|_ids$|(^|_)layers$")


def decoder_layers(model: nn.Module, depth: int | None) -> list[nn.Module]:
    """The repeated layers: the first list of `depth` modules, else the longest list."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    of_depth = [layers for layers in lists if len(layers) == depth]
    return max(of_depth or lists, key=len, default=[])


def kinds_of(layers: Sequence[nn.Module]) -> list[int]:
    """The kind of each layer, as a number: equal where layers are alike."""
    signatures = [layer_signature(layer) for layer in layers]
    order = list(dict.fromkeys(signatures))
    return [order.index(signature) for signature in signatures]


def layer_signature(layer: nn.Module) -> tuple[Any, ...]:
    """A value that is equal for two layers of one kind."""
    signature = []
    for name, module in layer.named_modules():
        settings = {}
        for key, value in vars(module).items():
            if key.startswith("_") or LAYER_NUMBERS.search(key):
                continue
            if isinstance(value, float):  # a factor may depend on the layer; compare only whether there is one
                settings[key] = repr(bool(value))
            elif value is None or isinstance(value, bool | int | str):
                settings[key] = repr(value)
        parameters = tuple(key for key, _ in module.named_parameters(recurse=False))
        signature.append((name, type(module), tuple(sorted(settings.items())), parameters))
    return tuple(signature)


def chosen_layers(kinds: Sequence[int]) -> list[int]:
    """The positions of the first two layers of each kind, in order."""
    return [place for place, kind in enumerate(kinds) if kinds[:place].count(kind) < LAYERS_OF_EACH_KIND]


def first_layers(kinds: Sequence[int]) -> list[int]:
    """The fewest layers, counted from the first, that have two of each kind, or as many as there are."""
    return list(range(max(chosen_layers(kinds), default=-1) + 1))


def with_layers_alone(config: Mapping[str, Any], depth: int, chosen: Sequence[int]) -> dict[str, Any]:
    """The configuration of a model that has the layers `chosen` and no others.

    A list with an entry for each layer keeps the entries of `chosen`. A list of layer numbers keeps the chosen ones,
    renumbered. Other settings stay, even if they say which layer is of which kind (every n-th, the first n). So the
    caller must look at the built model to see whether its layers are the wanted ones.
    """
    small: dict[str, Any] = {}
    for name, value in config.items():
        if name == "num_hidden_layers" or (value == depth and DEPTHS.search(name)):
            small[name] = len(chosen)
        elif isinstance(value, list) and len(value) == depth and "token" not in name:
            small[name] = [value[index] for index in chosen]
        elif (
            isinstance(value, list)
            and LAYER_NUMBERS.search(name)
            and all(type(entry) is int and 0 <= entry < depth for entry in value)
        ):
            small[name] = [chosen.index(place) for place in value if place in chosen]
        else:
            small[name] = value
    return small


# Sizes, for the probe.
#
# A width that is counted by heads is a product: the number of heads times their width. The product stands in the
# configuration or in the model's code. So all widths of a head are divided by one number, all counts of heads by
# another number, and all other widths by the product of both. Sizes that were equal before are equal afterwards.
# Numbers that stand alone (experts, windows, states) have their own limits. Everything else keeps its value.
#
# Llama 3.1 8B as an example:
#
#                          real   divided by                            small
#     query heads            32   heads = gcd(32, 8) / 2 = 4                8
#     key-value heads         8   heads = 4                                 2
#     head_dim              128   head_width = 16, see below                8
#     hidden_size          4096   width = heads x head_width = 64          64 = 8 heads of 8
#     intermediate_size   14336   width = 64                              224
#
# `heads` is halved so that two key-value heads stay. `head_width` is the largest divisor of gcd(128) that leaves a head
# at least 8 wide. If that model cannot be built, the next divisors are tried: 8, 4, 2, 1.

SMALL_VOCABULARY = 160
WINDOW = 6  # tokens that an attention sees: fewer than the longer of the probe's documents have
NARROW = 128  # hidden_size of a model that is small already
HEAD_WIDTH = 8
LARGE = 64  # an integer from here on may be a width, whatever its name is

HEADS = re.compile(r"(^|_)(heads?|ngroups|n_groups|query_groups|o_groups)(_per_layer)?$")
HEAD_WIDTHS = re.compile(r"head_?dim|dim_head|d_head|head_size|kv_channels|rotary_n?dims?$|pre_attn_scalar")
WIDTHS = re.compile(
    r"hidden_size|intermediate|ffn|(^|_)d?_?ff$|feed_forward|d_model|n_embd|n_inner|d_inner|emb(ed|edding)?_(dim|size)"
    r"|_rank$|width$|_ssm$|proj_(dim|size)"
)
VOCABULARY_NAMES = re.compile(r"(^|_)vocab(ulary)?(_size|$)")
# Names, and the largest value that stays.
LIMITS: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"experts?(_num)?$"), 8),
    (re.compile(r"per_tok(en)?$|top_?k$|moe_k$"), 2),
    (re.compile(r"^topk_group$"), 1),
    (re.compile(r"^n_group$|expert_groups?$"), 2),
    (re.compile(r"window(_size|_len)?$|^attention_chunk_size$|^local_attention$"), WINDOW),
    (re.compile(r"(^|_)(chunk|block)_(size|length)$"), 8),
    (re.compile(r"state(_size)?$"), 8),
)
RANDOM = re.compile(r"dropout|pdrop|drop_prob|layerdrop|jitter")  # these draw numbers in each forward
TOKEN = re.compile(r"token_(id|index)$")
NO_SIZE = re.compile(r"token|vocab|position|max_|seq|context|window|length|theta|layer|seed|image|patch")


@dataclass(frozen=True)
class Factors:
    """The numbers that sizes are divided by."""

    heads: int
    head_width: int
    by_name: bool = True  # False: divide every large integer by `head_width`, for configurations with unknown names

    @property
    def width(self) -> int:
        return self.heads * self.head_width


def factors(sizes: Mapping[str, Any]) -> Iterator[Factors]:
    """Factors to try, the largest first; the last one keeps widths as they are.

    Args:
        sizes: A configuration, or a section of one, by transformers' names or the model's own.
    """
    hidden = next((sizes[name] for name in ("hidden_size", "n_embd", "d_model") if _is_count(sizes.get(name))), 0)
    if hidden > NARROW:
        counts = [value for name, value in sizes.items() if HEADS.search(name) and _is_count(value)]
        heads = math.gcd(*counts) or 1  # gcd() of nothing is 0
        if heads % 2 == 0:
            heads //= 2  # two key-value heads show more than one
        widths = [value for name, value in sizes.items() if HEAD_WIDTHS.search(name) and _is_count(value)]
        queries = max(counts, default=1)
        if not widths and hidden % queries == 0:
            widths.append(hidden // queries)
        common = math.gcd(*widths) or 1
        for divisor in range(common, 0, -1):
            leaves_enough = divisor == 1 or min(widths) // divisor >= HEAD_WIDTH
            if common % divisor == 0 and leaves_enough:
                yield Factors(heads, divisor)
    if not hidden or hidden > NARROW:
        for divisor in (64, 32, 16, 8, 4):
            yield Factors(1, divisor, by_name=False)
    yield Factors(1, 1)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def with_small_sizes(
    config: Mapping[str, Any], divisors: Factors, *, hidden: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """The configuration with small sizes, in its sections too; depth and lists of layers stay.

    Args:
        hidden: Widths of another section and their small values, for the sizes that join the two sections.
    """
    small: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            if "rope" in name:
                small[name] = _smaller_rope(value, divisors)
            elif all(isinstance(key, str) for key in value):
                small[name] = with_small_sizes(value, divisors, hidden=hidden)
            else:  # labels by number
                small[name] = value
        elif hidden and _is_count(value) and value in hidden and re.search(r"out|text|proj", name):
            small[name] = hidden[value]
        elif isinstance(value, list | tuple):
            small[name] = [_smaller_value(name, entry, divisors) for entry in value]
        else:
            small[name] = _smaller_value(name, value, divisors)
    # Tokens that the small vocabulary lacks get different numbers, counted down from its end.
    free = SMALL_VOCABULARY - 1
    for name, value in small.items():
        is_list = isinstance(value, list)
        tokens = value if is_list else [value]
        if TOKEN.search(name) and any(_is_count(token) and token >= SMALL_VOCABULARY for token in tokens):
            small[name] = [free] if is_list else free
            free -= 1
    return small


def _smaller_value(name: str, value: Any, divisors: Factors) -> Any:
    if isinstance(value, float) and RANDOM.search(name):
        return 0.0
    if not _is_count(value) or TOKEN.search(name):
        return value
    if VOCABULARY_NAMES.search(name):
        return min(value, SMALL_VOCABULARY)
    for pattern, limit in LIMITS:
        if pattern.search(name):
            return min(value, limit)
    if not divisors.by_name:
        is_width = value >= LARGE and not NO_SIZE.search(name)
        return value // divisors.head_width if is_width else value
    if HEADS.search(name):
        return max(1, value // divisors.heads)
    if HEAD_WIDTHS.search(name):
        return max(1, value // divisors.head_width)
    if WIDTHS.search(name) and value > HEAD_WIDTH:
        return max(1, -(-value // divisors.width))  # rounded up
    return value


def _smaller_rope(rope: Mapping[str, Any], divisors: Factors) -> dict[str, Any]:
    """Settings of rotary positions.

    A `..._factor` list has one number for each pair of a head's widths, so it keeps every `head_width`-th. A list of
    counts shares the pairs out, so it gets a smaller total.
    """
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, Mapping):
            small[name] = _smaller_rope(value, divisors)
        elif isinstance(value, list) and name.endswith("_factor"):
            small[name] = value[:: divisors.head_width]
        elif isinstance(value, list) and all(map(_is_count, value)):
            small[name] = _scaled_parts(value, sum(value) // divisors.head_width)
        else:
            small[name] = value
    return small


def _scaled_parts(parts: list[int], total: int) -> list[int]:
    """The parts scaled to another total, in whole numbers: the largest remainders are rounded up.

    [16, 24, 24] scaled to 4: the shares are 1.0, 1.5 and 1.5. Rounded down they are 1, 1 and 1, which lacks one. The
    first of the two with remainder 0.5 gets it: [1, 2, 1].
    """
    shares = [part * total / sum(parts) for part in parts]
    rounded = [int(share) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda index: rounded[index] - shares[index])
    for index in by_remainder[: total - sum(rounded)]:
        rounded[index] += 1
    return rounded


def special_tokens(config: Mapping[str, Any]) -> set[int]:
    """The tokens that the configuration and its sections name. They stand for something else than text."""
    tokens: set[int] = set()
    for name, value in config.items():
        if isinstance(value, Mapping):
            tokens |= special_tokens({key: inner for key, inner in value.items() if isinstance(key, str)})
        elif TOKEN.search(name):
            named = value if isinstance(value, list) else [value]
            tokens |= {token for token in named if isinstance(token, int)}
    return tokens


# The probe's small models.


def small_models(model: PreTrainedModel, folder: Path) -> Iterator[SmallModel]:
    """Small models of `model`'s architecture, the smallest first, each with its weights in `folder`.

    `model` may be on meta. The caller takes the first one that runs. Raises CannotShrink after the last.
    """
    model_class, reason = type(model), "it has too many weights"
    for divisors in factors(model.config.get_text_config().to_dict()):
        try:
            config, on_meta = _shallow(model_class, _narrow(model.config, model.config.get_text_config(), divisors))
            size = sum(parameter.numel() for parameter in on_meta.parameters())
            if size > LARGEST_SMALL:
                continue
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)  # decays and steps of state-space layers stay what they begin as
                small = model_class(config)
            draw_weights(small)
        except Exception as error:  # the model's own code raises anything when sizes do not fit together
            reason = class_and_words(error)
            continue
        shutil.rmtree(folder, ignore_errors=True)
        small.save_pretrained(folder)
        _copy_code(model, folder)
        kinds = kinds_of(decoder_layers(small, getattr(config.get_text_config(), "num_hidden_layers", None)))
        tokens = frozenset(special_tokens(config.to_dict()))
        yield SmallModel(folder, model_class.__name__, len(kinds), len(set(kinds)), size, tokens)
    raise CannotShrink(f"it cannot be made small ({reason})")


def _narrow(config: PreTrainedConfig, text: PreTrainedConfig, divisors: Factors) -> PreTrainedConfig:
    """The configuration with small sizes; a section that is not the text's has its own factors."""
    if text is config:
        return _config_like(config, with_small_sizes(config.to_dict(), divisors))
    inner = with_small_sizes(text.to_dict(), divisors)
    hidden = {text.hidden_size: inner["hidden_size"]} if "hidden_size" in inner else None
    small: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        section = getattr(config, name, None)
        if section is text:
            small[name] = inner
        elif isinstance(section, PreTrainedConfig):
            small[name] = with_small_sizes(value, next(factors(value)), hidden=hidden)
        else:
            small[name] = with_small_sizes({name: value}, divisors)[name]
    return _config_like(config, small)


def _shallow(model_class: ModelClass, config: PreTrainedConfig) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """The configuration with two layers of each kind, if a shorter model has them all, and its model on meta.

    Try the chosen layers first. Where the kinds follow from a period (every fourth layer), a shorter model has other
    kinds at those places. So try the first layers next, which keep their places.
    """
    text, content = config.get_text_config(), config.to_dict()
    whole = _on_meta(model_class, config)
    deep = decoder_layers(whole, getattr(text, "num_hidden_layers", None))
    signatures, kinds = [layer_signature(layer) for layer in deep], kinds_of(deep)
    for chosen in (chosen_layers(kinds), first_layers(kinds)):
        if not 0 < len(chosen) < len(deep):
            continue
        try:
            if text is config:
                small = with_layers_alone(content, len(deep), chosen)
            else:
                section = next(name for name in content if getattr(config, name, None) is text)
                small = content | {section: with_layers_alone(content[section], len(deep), chosen)}
            shallow = _config_like(config, small)
            short = _on_meta(model_class, shallow)
            layers = decoder_layers(short, len(chosen))
        except Exception:  # a list that belongs to layers and was not known as one
            continue
        if [layer_signature(layer) for layer in layers] == [signatures[index] for index in chosen]:
            return shallow, short
    return config, whole


def _config_like(config: PreTrainedConfig, content: dict[str, Any]) -> PreTrainedConfig:
    kept = {name: value for name, value in content.items() if name not in NOT_OF_STRUCTURE}
    made: PreTrainedConfig = type(config).from_dict(kept)
    made.architectures = config.architectures
    made._attn_implementation = "eager"  # as from_config sets it; the recipe's own is set where the model is built
    return made


def _on_meta(model_class: ModelClass, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return model_class(copy.deepcopy(config))


def draw_weights(model: nn.Module, *, trained_alone: bool = False) -> None:
    """Draw weights that are large enough for attention, gates and biases to matter.

    Parameters that begin at 0 or 1 are drawn too. Each call draws equal numbers. They are numbers of bfloat16, so that
    loading them in 16 bits changes none.

    Args:
        trained_alone: Draw adapters, at half the size: their product is then about as large as the matrix they adapt.
    """
    generator = torch.Generator().manual_seed(0)
    size = 0.5 if trained_alone else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if trained_alone and not parameter.requires_grad:
                continue
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:  # norms and biases: around what they begin as
                weight = parameter.cpu().float() + 0.3 * drawn
            elif isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding):
                weight = 0.5 * drawn
            else:  # a product of `columns` terms is then as large as its input
                weight = drawn * parameter.shape[-1] ** -0.5
            parameter.copy_((size * weight).bfloat16())


def _copy_code(model: PreTrainedModel, folder: Path) -> None:
    """Copy the code that came with the model (trust_remote_code), so that the small one is loaded by it too."""
    sources: set[Path] = set()
    for loaded_class in (type(model), type(model.config)):
        if loaded_class.__module__.startswith("transformers_modules"):
            sources |= set(Path(inspect.getfile(loaded_class)).parent.glob("*.py"))
    sources = {source for source in sources if source.name != "__init__.py"}
    if not sources:
        return
    for source in sources:
        shutil.copy(source, folder / source.name)
    file = folder / "config.json"
    content = json.loads(file.read_text("utf-8"))
    known = getattr(model.config, "auto_map", None) or {}
    content["auto_map"] = {name: _local_reference(reference) for name, reference in known.items()}
    file.write_text(json.dumps(content), "utf-8")


def _local_reference(reference: Any) -> Any:
    """A reference to a class, "repository--module.Class", as it is written within the repository itself."""
    if isinstance(reference, str):
        return reference.rpartition("--")[2]
    return [_local_reference(entry) for entry in reference]


# A rehearsal's small model.

BLOCK = 64  # bitsandbytes' smallest block: matrices whose rows are whole blocks quantise as large ones do
LARGEST = 30_000_000  # parameters; a model that stays larger than this was not understood
# A mixture's experts, and how many of them a token goes to.
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 2),
}
# Widths of MLPs. Many architectures have several; GPT-2's may be missing, and then is four times the hidden size.
INNER = (
    *("intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("n_inner", "ffn_dim", "ffn_hidden_size"),
)


def shrunken_model(
    config: Mapping[str, Any], folder: Path, *, layers: int, vocabulary: int, end_tokens: Mapping[str, int]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A small model that ran once, and its configuration.

    Args:
        folder: A place for files of models that are tried.
        layers: The small model's number of layers. A model that `small_models` makes keeps its own number.
        end_tokens: eos_token_id and pad_token_id.

    Raises CannotShrink.
    """
    try:
        small = shrunken_config(config, vocabulary, layers) | dict(end_tokens)
        return _build_and_run(small), small
    except KeyError as error:
        reason = f"its configuration has no {error.args[0]}"
    except Exception as error:  # libraries raise anything when sizes do not fit together
        reason = " ".join(str(error).split())[:200]
    with suppress(Exception):
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        for candidate in small_models(whole, folder):
            small = json.loads((candidate.folder / "config.json").read_text("utf-8"))
            for name, value in small.items():
                if name in ("vocab_size", "vocab_size_per_layer_input"):
                    small[name] = vocabulary
                elif name in end_tokens:
                    small[name] = end_tokens[name]
                elif name.endswith("token_id") and isinstance(value, int):
                    small[name] = 0
            with suppress(Exception):  # the next ones are larger
                return _build_and_run(small), small
    raise CannotShrink(reason)


def shrunken_config(config: Mapping[str, Any], vocabulary: int, layers: int = 2) -> dict[str, Any]:
    """The configuration with `layers` layers and a few heads; settings that are not sizes stay as they were.

    Two ratios stay: query heads to key-value heads, and hidden_size to heads x head_dim. So each matrix has the shape
    that it has in the real model: square, wide or tall. Two examples:

        Llama 3.1 8B      32 heads of 128, 8 key-value heads, hidden 4096, inner 14336
            ratio 32 / 8 = 4, so 2 key-value heads and 8 heads. head_dim = 64 / gcd(64, 8) = 8: 8 x 8 is one block.
            hidden = 64 x 4096 / (32 x 128) = 64; inner = 64 x 14336 / 4096 = 224, rounded to blocks: 256
        Qwen 2.5 0.5B     14 heads of 64, 2 key-value heads, hidden 896, inner 4864
            ratio 7, so 2 key-value heads and 14 heads. head_dim = 64 / gcd(64, 14) = 32: 14 x 32 is seven blocks.
            hidden = 448 x 896 / (14 x 64) = 448; inner = 448 x 4864 / 896 = 2432, which is 38 blocks

    Raises KeyError with the name of a size that is missing.
    """

    def in_blocks(size: float) -> int:
        return BLOCK * max(1, round(size / BLOCK))

    small = dict(config)
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    ratio = heads // groups
    small_groups = 1 if groups == 1 or ratio >= 8 else 2
    small_heads = ratio * small_groups
    small_dim = max(8, BLOCK // math.gcd(BLOCK, small_heads))
    hidden = in_blocks(small_heads * small_dim * config["hidden_size"] / (heads * head_dim))
    small |= {
        "num_hidden_layers": layers,
        "num_attention_heads": small_heads,
        "num_key_value_heads": small_groups,
        "head_dim": small_dim,
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        # The large vocabulary's tokens may lie outside of the small one.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    small |= {key: min(config[key], most) for key, most in EXPERTS.items() if config.get(key)}
    for key in INNER:
        if config.get(key):
            small[key] = in_blocks(hidden * config[key] / config["hidden_size"])
    if config.get("rotary_dim"):  # GPT-J's: a part of a head's widths
        small["rotary_dim"] = small_dim * config["rotary_dim"] // head_dim
    if config.get("vocab_size_per_layer_input"):
        small["vocab_size_per_layer_input"] = vocabulary
    if config.get("num_kv_shared_layers"):  # a layer shares with an earlier one of its kind, and two have no such one
        small["num_kv_shared_layers"] = 0
    if "max_window_layers" in config:
        small["max_window_layers"] = min(layers, config["max_window_layers"])
    if config.get("layer_types"):  # in turn, so that few layers cover every kind of attention
        kinds = list(dict.fromkeys(config["layer_types"]))
        small["layer_types"] = (kinds * layers)[:layers]
    for key in (*NOT_OF_STRUCTURE, "auto_map"):
        small.pop(key, None)
    return small


def _build_and_run(config: Mapping[str, Any]) -> PreTrainedModel:
    """A model with random float32 weights, after a forward of eight tokens. Raises what the library does."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    size = sum(parameter.numel() for parameter in whole.parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters are left")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
        model(input_ids=torch.arange(3, 11)[None], use_cache=False)
    return model
