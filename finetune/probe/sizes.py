"""Every size in a configuration made small, whatever the model is called.

A width that is counted by heads is their number times their width, in the configuration or in the model's code. So all
widths of one head are divided by one number, all numbers of heads by another, and all other widths by the product of
both: what was equal before is equal afterwards. Numbers that stand alone (experts, windows, states) have a limit of
their own. What is not known as a size keeps its value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SMALL_VOCABULARY = 160
WINDOW = 6  # tokens that an attention sees: fewer than the longer of the documents have
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
    """What sizes are divided by."""

    heads: int
    head_width: int
    by_name: bool = True  # False: every large integer by `head_width`, for configurations with names of their own

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
        heads = math.gcd(*counts) if counts else 1
        heads //= 2 if heads % 2 == 0 else 1  # two key-value heads show more than one
        widths = [value for name, value in sizes.items() if HEAD_WIDTHS.search(name) and _is_count(value)]
        queries = max(counts, default=1)
        if not widths and hidden % queries == 0:
            widths.append(hidden // queries)
        common = math.gcd(*widths) if widths else 1
        for width in sorted(_divisors(common), reverse=True):
            if min(widths, default=1) // width >= HEAD_WIDTH or width == 1:
                yield Factors(heads, width)
    if not hidden or hidden > NARROW:
        for divisor in (64, 32, 16, 8, 4):
            yield Factors(1, divisor, by_name=False)
    yield Factors(1, 1)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def with_small_sizes(
    config: Mapping[str, Any], by: Factors, *, hidden: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """The configuration with small sizes, its own sections too; depth and lists of layers stay.

    Args:
        hidden: Widths of another section and what became of them: what joins the two has both.
    """
    small: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            rope = "rope" in name
            named = all(isinstance(key, str) for key in value)  # else labels by number
            small[name] = (
                _smaller_rope(value, by) if rope else with_small_sizes(value, by, hidden=hidden) if named else value
            )
        elif hidden and _is_count(value) and value in hidden and re.search(r"out|text|proj", name):
            small[name] = hidden[value]
        else:
            small[name] = _each(lambda one, name=name: _smaller_value(name, one, by), value)  # type: ignore[misc]
    _renumber_tokens(small)
    return small


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    return [change(one) for one in value] if isinstance(value, list | tuple) else change(value)


def _smaller_value(name: str, value: Any, by: Factors) -> Any:
    if isinstance(value, float):
        return 0.0 if RANDOM.search(name) else value
    if not _is_count(value) or TOKEN.search(name):
        return value
    if VOCABULARY_NAMES.search(name):
        return min(value, SMALL_VOCABULARY)
    for pattern, limit in LIMITS:
        if pattern.search(name):
            return min(value, limit)
    if not by.by_name:
        return value // by.head_width if value >= LARGE and not NO_SIZE.search(name) else value
    if HEADS.search(name):
        return max(1, value // by.heads)
    if HEAD_WIDTHS.search(name):
        return max(1, value // by.head_width)
    if WIDTHS.search(name) and value > HEAD_WIDTH:
        return max(1, -(-value // by.width))
    return value


def _smaller_rope(rope: Mapping[str, Any], by: Factors) -> dict[str, Any]:
    """Settings of rotary positions: lists with a number for each pair of a head's widths, or that share pairs out."""
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, Mapping):
            small[name] = _smaller_rope(value, by)
        elif isinstance(value, list) and name.endswith("_factor"):
            small[name] = value[:: by.head_width]
        elif isinstance(value, list) and all(map(_is_count, value)):
            small[name] = _shared_out(value, sum(value) // by.head_width)
        else:
            small[name] = value
    return small


def _shared_out(parts: list[int], total: int) -> list[int]:
    """Parts in the same proportions, as far as whole numbers allow, of another total."""
    shares = [part * total / sum(parts) for part in parts]
    rounded = [int(share) for share in shares]
    by_rest = sorted(range(len(parts)), key=lambda index: rounded[index] - shares[index])
    for index in by_rest[: total - sum(rounded)]:
        rounded[index] += 1
    return rounded


def _renumber_tokens(small: dict[str, Any]) -> None:
    """Give tokens that the small vocabulary lacks numbers from its end, different ones."""
    free = SMALL_VOCABULARY - 1
    for name, value in small.items():
        if not TOKEN.search(name):
            continue
        values = value if isinstance(value, list) else [value]
        if any(_is_count(one) and one >= SMALL_VOCABULARY for one in values):
            small[name] = free if not isinstance(value, list) else [free]
            free -= 1


def special_tokens(small: Mapping[str, Any]) -> set[int]:
    """The tokens that the small configuration names, its sections too: in text they stand for something."""
    found: set[int] = set()
    for name, value in small.items():
        if isinstance(value, Mapping):
            found |= special_tokens({key: inner for key, inner in value.items() if isinstance(key, str)})
        elif TOKEN.search(name):
            found |= {one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)}
    return found
