"""Tiny models of every architecture in the table of docs/families.md, and what the kit makes of them.

Held against the library's own eager forward, one document at a time. Weights are drawn so large that what a family has
of its own (sinks, biases, convolutions, windows, states) moves the loss by far more than the bound.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from finetune.errors import FinetuneError
from finetune.model.build import build_model, decoder_parts, refuse_early
from finetune.probe.compare import AllInFloat64, widen
from finetune.recipe.schema import Recipe
from finetune.tokens.batches import micro_batches
from tests.support.runs.recipes import least_recipe

# Settings by transformers' names; an architecture takes those that it knows.
SMALL: dict[str, Any] = {
    **{"vocab_size": 97, "vocab_size_per_layer_input": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "mamba_d_ssm"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim", "linear_key_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim", "mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("num_heads", "mamba_chunk_size", "chunk_size", "block_size", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "linear_num_value_heads", "rotary_dim"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", "num_dense_layers", "num_mem_blocks"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention"), 6),
    # Drawn anew in every forward, so that no two would agree.
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout", "activation_dropout", "residual_dropout"), 0.0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "layerdrop"), 0.0),
    **dict.fromkeys(("attention_probs_dropout_prob", "router_jitter_noise", "input_jitter_noise"), 0.0),
}
LATENT: dict[str, Any] = {"num_key_value_heads": 4}  # latent attention has as many as heads
LATENT_ATTENTION = """
    axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text glm4_moe_lite glm_moe_dsa longcat_flash minicpm3
    sarvam_mla youtu
"""
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
UNPADDED = {"unpadded_vocab_size": 97, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
ROTARY = {"rope_type": "default", "rope_theta": 1e4}
PATCHED = {"hidden_size": 32, "hidden_size_global": 32, "intermediate_size": 64}
PATCHED |= {"num_attention_heads": 4, "num_hidden_layers": 2}
# What an architecture needs beside SMALL.
NEEDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(LATENT_ATTENTION.split(), LATENT),
    **dict.fromkeys("cohere2 laguna mellum".split(), WINDOWS),
    **dict.fromkeys("lfm2 lfm2_moe".split(), CONVOLUTIONS),
    **dict.fromkeys("inkling2_text inkling2_loop_text".split(), UNPADDED),
    "bamba": {"attn_layer_indices": [1, 3]},
    # Four decoders in one: bytes, patches, and the model that finds the patches.
    "blt": {
        "encoder_hash_byte_group_vocab": 32,
        "patch_in_forward": False,
        **{f"{part}_config": PATCHED for part in ("encoder", "decoder", "global", "patcher")},
    },
    "cohere_compass_text": {**WINDOWS, "rope_parameters": dict.fromkeys(WINDOWS["layer_types"], ROTARY)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {**LATENT, "use_sliding_window": False},
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 24},  # a scale that is not that of its head's width
    "gemma3n_text": {**WINDOWS, "num_kv_shared_layers": 0},
    # Its scores are not scaled: rounding grows with each layer, and four are beyond the bound where all is right.
    "gemma4_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**LATENT, **LINEAR, "linear_head_dim": 8, "linear_num_heads": 4},
    # Chunks shorter than the longest document, and a temperature that changes within it.
    "llama4_text": {"attention_chunk_size": 7, "floor_scale": 4},
    "qwen2": {**WINDOWS, "use_sliding_window": True},
    "qwen4_exp_text": {
        **LINEAR,
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 8, "indexer_compress_ratio": 2},
    },
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},  # it takes no other
}
# In transformers' mapping of causal language models, and not a decoder of texts that a recipe could name: encoders,
# decoders of an encoder's output, models of sounds and pictures, and whole multimodal models, whose text part counts.
# gpt-sw3 is GPT-2 by another name.
NO_DECODERS = set(
    """
    bart beam bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text
    dots3_note electra emu3 ernie fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified
    gemma4_unified_assistant git got_ocr2 gpt-sw3 llama4 marian mbart megatron-bert mllama moshi
    moss_transcribe_diarize musicgen musicgen_melody mvp pegasus phi4_multimodal plbart prophetnet qwen3_5 qwen3_5_moe
    qwen4_exp reformer rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta
    xlm-roberta-xl xlnet xmod
""".split()
)
# transformers' own list: a decoder of a new release is a line of the table as soon as benchmarks/families.py has run.
ARCHITECTURES = {name: NEEDS.get(name, {}) for name in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - NO_DECODERS)}
LENGTHS = (5, 20, 2, 13)  # tokens of the documents: below and above the window
BOUND = 1e-5


@dataclass(frozen=True)
class Way:
    """A recipe's two settings of how documents come to the model."""

    attention: str
    packing: bool

    @property
    def title(self) -> str:
        return f"{'packed' if self.packing else 'unpacked'}, {self.attention}"

    @property
    def rows(self) -> list[list[int]]:
        """The documents of each row; two rows make a micro-batch."""
        return [[0, 1, 2], [3]] if self.packing else [[0], [1], [2], [3]]


WAYS = tuple(Way(attention, packing) for attention in ("auto", "sdpa", "eager") for packing in (True, False))


@dataclass(frozen=True)
class Outcome:
    """`refusal` is the kit's line; without one it trained, and `worst` is the largest difference, of BOUND."""

    refusal: str | None = None
    worst: float = 0.0

    @property
    def word(self) -> str:
        return "refused" if self.refusal else "right" if self.worst <= 1 else "WRONG"


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[name]
    other = dict(kind.attribute_map)
    known = {field.name for field in fields(kind)} | set(other)  # type: ignore[arg-type]  # transformers makes them so
    settings = {key: value for key, value in SMALL.items() if key in known and other.get(key) not in SMALL}
    return kind(**settings | ARCHITECTURES[name] | changes)


def save_shaken(name: str, folder: Path, **changes: Any) -> None:
    """Weights far from where training starts: biases and norms, sinks and decays too, which begin at 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(name, **changes), dtype=torch.float32)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            embedding = isinstance(model.get_submodule(path.rpartition(".")[0]), nn.Embedding)
            if parameter.ndim < 2:
                parameter += 0.3 * drawn
            else:
                parameter.copy_(drawn * (0.5 if embedding else 1 / parameter.shape[-1] ** 0.5))
    model.save_pretrained(folder)


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    made = []
    for length in LENGTHS:
        ids = draw.integers(3, 97, length).astype(np.int64)
        made.append((ids, np.where(np.arange(length) < length // 3, -100, ids)))
    return made


Trained = tuple[float, Mapping[str, Tensor | None]]  # loss, gradients


Computed = Callable[[Callable[[nn.Module], nn.Module]], Trained]  # with what is made of a model before it computes


def difference(ours: Computed, librarys: Computed) -> float:
    """The largest difference, in multiples of BOUND. In float32; where that is more than rounding mostly is (how much
    it is depends on the CPU, and delta rules of random weights round most), in float64, where what is wrong stays.
    Layers are not recomputed there: a second forward in backward is not in float64."""
    found = largest_difference(ours(_as_it_is), librarys(_as_it_is))
    if found > 1:
        with AllInFloat64():
            found = largest_difference(ours(_wide), librarys(_wide))
    return found


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


def _wide(model: nn.Module) -> nn.Module:
    widen(decoder_parts(model))
    return model


def librarys(folder: Path, width: Callable[[nn.Module], nn.Module] = _as_it_is) -> Trained:
    """Plain transformers: eager attention, plain cross-entropy, one document after another."""
    config = copy.deepcopy(AutoConfig.from_pretrained(folder))  # else two models share one, and its attention's name
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, attn_implementation="eager", dtype=torch.float32
    )
    model, total = width(model.train()), torch.zeros(())
    for ids, labels in documents():
        logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits[:-1], torch.from_numpy(labels[1:]), ignore_index=-100, reduction="sum")
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


class Rows:
    """The documents, in the rows of this way."""

    def __init__(self, way: Way) -> None:
        made = documents()
        self.rows = [[made[index] for index in row] for row in way.rows]

    def documents(self, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return self.rows[row]


def recipe_of(folder: Path, way: Way, *, checkpointing: bool) -> Recipe:
    model, data = {"dtype": "float32", "attention": way.attention}, {"packing": way.packing}
    training = {"activation_checkpointing": checkpointing, "per_device_batch_size": 2}
    return least_recipe(folder, model=model, data=data, lora=None, training=training)


def ours(folder: Path, way: Way, width: Callable[[nn.Module], nn.Module] = _as_it_is) -> Trained:
    """The kit's own path, from the recipe on: the model, the micro-batches, the loss. Raises FinetuneError."""
    recipe = recipe_of(folder, way, checkpointing=True)
    try:
        refuse_early(recipe)
    except FinetuneError as error:
        if "activation_checkpointing" not in str(error):
            raise
        recipe = recipe_of(folder, way, checkpointing=False)
        refuse_early(recipe)
    model = width(build_model(recipe, torch.device("cpu")))
    rows, loss = Rows(way), 0.0
    batches = micro_batches(
        rows,
        range(len(rows.rows)),
        rank=0,
        world_size=1,
        per_device_batch_size=2,
        flat=way.attention == "auto",
    )
    model.train()
    for batch in batches:
        part = model(**batch)
        part.backward()
        loss += part.item()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def largest_difference(found: Trained, expected: Trained) -> float:
    """In multiples of BOUND. A gradient that is 0 but for rounding (a key's bias) is measured by the whole's."""
    differences = [abs(found[0] - expected[0]) / abs(expected[0])]
    whole = sum(float(gradient.norm()) ** 2 for gradient in expected[1].values() if gradient is not None) ** 0.5
    for name, theirs in expected[1].items():
        our = found[1][name]
        if theirs is None or our is None:  # nothing came to this tensor, here or there
            other = theirs if our is None else our
            differences.append(0.0 if other is None else float(other.norm()) / whole)
        else:
            differences.append(float((our - theirs).norm()) / (float(theirs.norm()) + 0.1 * whole))
    return max(differences) / BOUND


def outcomes(name: str, folder: Path, ways: Sequence[Way] = WAYS) -> dict[Way, Outcome]:
    """Anything but FinetuneError gets through."""
    save_shaken(name, folder)
    in_float32, found = librarys(folder), {}

    def expected(width: Callable[[nn.Module], nn.Module]) -> Trained:
        return in_float32 if width is _as_it_is else librarys(folder, width)

    for way in ways:
        try:
            found[way] = Outcome(worst=difference(partial(ours, folder, way), expected))
        except FinetuneError as refusal:
            found[way] = Outcome(refusal=str(refusal))
    return found
