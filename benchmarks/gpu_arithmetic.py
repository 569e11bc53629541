"""A training step's milliseconds by arithmetic, from shapes, counts and a card's measured rates, beside measurements.

    python benchmarks/gpu_arithmetic.py [FILE ...]     (gpu.py's records; benchmarks/results/gpu.json and gpu_h100.json)

For each recipe that a record has, and each set of counts below: where a micro-batch's time goes, and the tokens a
second that follow. Then the decode steps of an evaluation by the tokens that its batches hold.

RATES has what counting cannot tell: the share of one large product's rate that a layer's products reach, the seconds
of a small kernel, the passes over memory. `finetune plan --gpus` has an upper bound from vendors' peaks instead.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from benchmarks.gpu_recipes import find_way
from finetune.model.known_configs import full_config
from finetune.recipe.schema import Recipe


@dataclass(frozen=True)
class Counts:
    """Counts that follow from the code, such as the products in a layer."""

    name: str
    products_a_layer: int = 56  # of a Llama layer with adapters: 14 by W, the others by A and B
    head_chunk: int = 512  # tokens between two touches of the head's float32 gradient
    accumulates_inside: bool = False  # gradients of 16-bit weights are added inside the product
    fused_update: bool = True  # RoundedAdamW as one kernel
    recomputes: bool | None = None  # every layer; None: as the recipe says
    float8: bool = False  # the frozen base's products


TODAY = Counts("as measured")
COUNTS = (
    TODAY,
    Counts("44 products a layer, head by 2,048", products_a_layer=44, head_chunk=2048),
    Counts("the same, gradients added inside the product", 44, 2048, accumulates_inside=True),
    Counts("the same, nothing recomputed", 44, 2048, accumulates_inside=True, recomputes=False),
    Counts("the same, frozen base in float8", 44, 2048, accumulates_inside=True, recomputes=False, float8=True),
)
LARGE_PRODUCTS = 14  # by W: seven forward, seven of the input's gradient; adapters' are the others
JOINED = 7  # of those: B's products, which add to W's and are part of their pass


@dataclass(frozen=True)
class Rates:
    """Rates that were measured, not computed."""

    product_share: float = 0.83  # of the rate of one product of 8192^3: what a layer's products reach
    attention: float = 350e12  # FLOP/s of torch's FlashAttention-2, forward and backward
    small_product: float = 20e-6  # seconds of a product with an adapter's factor
    # Passes over a hidden state [tokens, hidden] in bfloat16 in all other kernels of a layer. Fitted to the H200's and
    # H100's runs by the first arithmetic: 17, 55 and 30 ms a micro-batch.
    passes_compiled: float = 81.0
    passes_eager: float = 188.0
    passes_full: float = 109.0  # compiled and recomputed
    head_passes: float = 9.0  # over logits [tokens, vocabulary] in float32
    fused_update: float = 12.1e-12  # seconds a weight, measured on an H100
    written_update: float = 211.3e-12
    float8_share: float = 1.65  # times the bfloat16 rate; an assumption that nobody has measured
    float8_passes: float = 30.0  # to quantise inputs and output gradients and to transpose weights; assumed, too


RATES = Rates()


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    layers: int
    hidden: int
    heads_width: int  # query heads times their width
    keys_width: int
    ffn: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, recipe: Recipe) -> Shape:
        config, _ = full_config(recipe.model.name_or_path, recipe.model.revision)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        width = config.get("head_dim") or hidden // heads
        keys = config.get("num_key_value_heads", heads) * width
        return cls(
            config["num_hidden_layers"], hidden, heads * width, keys, config["intermediate_size"],
            config["vocab_size"], bool(config.get("tie_word_embeddings")),
        )  # fmt: skip

    @property
    def layer_weights(self) -> int:
        return self.hidden * (2 * self.heads_width + 2 * self.keys_width + 3 * self.ffn)

    @property
    def down_share(self) -> float:
        """The share of a layer's weights that is in its last product. Recomputation leaves that product out."""
        return self.hidden * self.ffn / self.layer_weights

    @property
    def weights(self) -> int:
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (self.layer_weights + 2 * self.hidden) + ends + self.hidden


@dataclass(frozen=True)
class Card:
    """A card, as gpu.py measured it."""

    name: str
    product: float  # FLOP/s
    copy: float  # bytes/s


@dataclass(frozen=True)
class Run:
    """A training's sizes."""

    shape: Shape
    full: bool  # all weights are trained
    recomputed: bool
    compiled: bool
    tokens: float  # of a micro-batch
    document: float  # tokens of a document
    micro_steps: float  # of a step


def micro_batch(run: Run, card: Card, counts: Counts = TODAY, rates: Rates = RATES) -> dict[str, float]:
    """Milliseconds of a micro-batch by part; the update's share of it too."""
    shape, tokens = run.shape, run.tokens
    recomputed = run.recomputed if counts.recomputes is None else counts.recomputes
    product = card.product * rates.product_share
    passes = (6 if run.full else 4) + (2 * (1 - shape.down_share) if recomputed else 0)
    large = passes * shape.layers * shape.layer_weights * tokens / product
    # Causal: half of [document, document] for each head. Backward is two and a half times forward.
    forward = 4 * tokens * run.document * shape.heads_width / 2 * shape.layers
    attention = forward * (3.5 + recomputed) / rates.attention
    hidden_states = rates.passes_full if run.full else rates.passes_compiled
    if not run.compiled:
        hidden_states = rates.passes_eager
    if run.full and not recomputed:
        hidden_states *= 2 / 3
    if counts.float8 and not run.full:
        large /= rates.float8_share
        hidden_states += rates.float8_passes
    traffic = hidden_states * 2 * shape.hidden * tokens * shape.layers / card.copy
    head_weights = shape.hidden * shape.vocabulary
    logits = rates.head_passes * 4 * tokens * shape.vocabulary / card.copy
    head = (6 if run.full else 4) * head_weights * tokens / product + logits
    small = head_gradient = accumulated = 0.0
    if run.full:
        head_gradient = math.ceil(tokens / counts.head_chunk) * 2 * 4 * head_weights / card.copy
        accumulated = 0.0 if counts.accumulates_inside else 3 * 2 * shape.weights / card.copy
    else:
        small = (counts.products_a_layer - LARGE_PRODUCTS - JOINED) * shape.layers * rates.small_product
        if recomputed:
            small *= 8 / 5  # a recomputation has three of the five small products of a layer's adapter again
    update = 0.0
    if run.full:
        each = rates.fused_update if counts.fused_update else rates.written_update
        update = (each * shape.weights + 2 * shape.weights / card.copy) / run.micro_steps
    parts = {
        "large products": large,
        "attention": attention,
        "adapters' products": small,
        "other traffic in layers": traffic,
        "head": head,
        "head's float32 gradient": head_gradient,
        "gradient accumulation": accumulated,
        "norm and update": update,
    }
    return {name: 1e3 * seconds for name, seconds in parts.items()}


def cards_and_runs(record: Mapping[str, Any]) -> Iterator[tuple[str, Card, Run, Mapping[str, Any]]]:
    """Each training that a record of gpu.py has measured, by its step's name."""
    checks = record["steps"].get("environment", {}).get("checks", ())
    rates = next((each["rates"] for each in checks if "rates" in each), None)
    if rates is None:
        return
    card = Card(record["device"], 1e12 * float(rates["product_tflops"]), 1e12 * float(rates["copy_tb_per_second"]))
    for name, row in record["steps"].items():
        way = find_way(name) if "tokens_per_second" in row else None
        if way is None or way.recipe.preferences is not None:
            continue
        recipe = way.recipe
        micro_steps = recipe.training.global_batch_size / recipe.training.rows_at_once
        tokens = row["tokens_per_second"] * row["step_seconds"] / micro_steps
        # gpu.py's rows: documents of a sixth to four ninths of `max_length` words, more tokens than words.
        document = min(tokens, recipe.data.max_length) * 0.9
        compiled = bool((row["receipt"].get("compiled") or {}).get("layers"))
        recomputed = bool(recipe.training.activation_checkpointing)
        run = Run(Shape.of(recipe), recipe.lora is None, recomputed, compiled, tokens, document, micro_steps)
        yield name, card, run, row


def lines_of(record: Mapping[str, Any]) -> Iterator[str]:
    """The record's trainings: measured, and by each set of counts."""
    for name, card, run, row in cards_and_runs(record):
        measured = 1e3 * row["step_seconds"] / run.micro_steps
        fused = (row["receipt"].get("optimizer_update") or {}).get("fused", False)
        yield f"\n{name} on {card.name}: {run.tokens:,.0f} tokens a micro-batch, {run.micro_steps:.0f} a step"
        sets = [replace(TODAY, fused_update=fused), *COUNTS[1:]]
        columns = [micro_batch(run, card, counts) for counts in sets]
        # A set that changes nothing here is left out.
        kept = [at for at, column in enumerate(columns) if at == 0 or column != columns[at - 1]]
        sets, columns = [sets[at] for at in kept], [columns[at] for at in kept]
        for part in columns[0]:
            yield f"  {part:<28}" + "".join(f"{column[part]:>9.1f}" for column in columns)
        sums = [sum(column.values()) for column in columns]
        yield f"  {'sum, ms':<28}" + "".join(f"{total:>9.1f}" for total in sums)
        yield f"  {'tokens a second':<28}" + "".join(f"{1e3 * run.tokens / total:>9,.0f}" for total in sums)
        yield (
            f"  measured: {measured:.1f} ms, {row['tokens_per_second']:,.0f} tokens a second; "
            f"{sums[0] / measured:.0%} explained"
        )
        yield "  columns: " + "; ".join(each.name for each in sets)


PROMPTS, SHORTEST, LONGEST = 1000, 60, 400  # tokens of a prompt
DECODE_SECONDS = 0.030  # of a step of 8B, bound by the host
HELD = (2_048, 16_384, 65_536)  # tokens that a batch holds


def decode_lines() -> Iterator[str]:
    """Decode steps of an evaluation's answers, by new tokens and tokens that a batch holds, with seconds at 8B."""
    from finetune.model.generate import prompt_batches

    draw = random.Random(0)
    lengths = sorted(draw.randint(SHORTEST, LONGEST) for _ in range(PROMPTS))
    words = f"{PROMPTS:,} prompts of {SHORTEST} to {LONGEST} tokens, and minutes at {1e3 * DECODE_SECONDS:.0f} ms"
    yield f"\ndecode steps of {words}"
    yield f"  {'new tokens':<12}" + "".join(f"{most:>20,} held" for most in HELD)
    for new in (64, 256, 512, 1024):
        steps = [new * len(prompt_batches(lengths, new, most)) for most in HELD]
        yield f"  {new:<12,}" + "".join(f"{each:>16,}{each * DECODE_SECONDS / 60:>7.1f} m" for each in steps)


def main(words: Sequence[str] | None = None) -> int:
    names = list(sys.argv[1:] if words is None else words)
    records = ROOT / "benchmarks" / "results"
    files = [Path(name) for name in names] or [records / "gpu.json", records / "gpu_h100.json"]
    for file in files:
        if file.is_file():
            print("\n".join(lines_of(json.loads(file.read_text("utf-8")))))
    print("\n".join(decode_lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
