"""Mixtures whose frozen experts are in 4 bits, held against weights that were dequantised by the format's definition.

The reference shares no code with the kit: transformers' own eager forward, one document at a time, over weights that
went through bitsandbytes' public `quantize_4bit` and back by NF4's sixteen published numbers. An adapter is a term of
its weight there, W + (alpha / r) B A, so that no library's adapter is needed either.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes.functional as bits
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finetune.recipe.schema import Recipe
from tests.support.models.architectures import Trained, documents, save_shaken
from tests.support.models.quantised import dequantised
from tests.support.runs.recipes import least_recipe

FAMILIES = (
    *("qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "mixtral", "olmoe"),
    *("glm4_moe", "deepseek_v3", "llama4_text", "granitemoe", "ernie4_5_moe"),
)
NF4 = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float32"}
RANK, ALPHA = 4, 16.0


def mixture_recipe(
    folder: Path, quantization: Mapping[str, Any] | None = NF4, *, recomputed: bool = False, **lora: Any
) -> Recipe:
    """Adapters over the mixture in `folder`: packed rows of documents, float32."""
    training = {"activation_checkpointing": recomputed, "per_device_batch_size": 2, "mixed_precision": "no"}
    sections = {"lora": {"r": RANK, "lora_alpha": ALPHA, **lora}, "quantization": quantization}
    return least_recipe(folder, model={"dtype": "float32"}, data={"packing": True}, training=training, **sections)


def through_nf4(weight: Tensor, *, double: bool = True) -> Tensor:
    """The numbers that a weight becomes in NF4, in blocks of 64 along its memory."""
    settings = {"blocksize": 64, "compress_statistics": double, "quant_type": "nf4"}
    packed, state = bits.quantize_4bit(weight.contiguous(), **settings)
    return dequantised(SimpleNamespace(weight=SimpleNamespace(data=packed, quant_state=state))).view(weight.shape)


def plain_base(folder: Path) -> PreTrainedModel:
    """The library's own model in float32, its experts one after another."""
    config = copy.deepcopy(AutoConfig.from_pretrained(folder))  # else two models share one, and its attention's name
    settings = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(folder, config=config, **settings)


def expert_blocks(model: nn.Module) -> dict[str, nn.Parameter]:
    """The experts' matrices, all experts of a layer in one parameter, by its path. Biases have two dimensions."""
    named = model.named_parameters()
    return {path: block for path, block in named if "experts." in path and block.ndim == 3}


def save_mixture(family: str, folder: Path) -> None:
    """A tiny mixture. Qwen 3.5's delta rules round by 2e-4 in float32, so its layers have attention here."""
    attention = {"layer_types": ["full_attention"] * 4} if family == "qwen3_5_moe_text" else {}
    save_shaken(family, folder, **attention)


def in_four_bits(base: PreTrainedModel, layers: list[str], *, double: bool = True, experts: bool = True) -> Any:
    """The base with the numbers that NF4 makes of its experts and of these linear layers, in place.

    Args:
        double: Whether the scales are quantised too.
        experts: False: experts stay as they are.
    """
    with torch.no_grad():
        for block in expert_blocks(base).values() if experts else ():
            block.copy_(through_nf4(block, double=double))
        for path in layers:
            weight = base.get_submodule(path).weight
            weight.copy_(through_nf4(weight, double=double))
    return base


def adapted_weights(base: PreTrainedModel, adapters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each adapted layer's weight with its adapter's term, by path; gradients reach the adapters."""
    for name, down in adapters.items():
        if ".lora_A." not in name:
            continue
        path = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
        up = adapters[name.replace(".lora_A.", ".lora_B.")]
        yield f"{path}.weight", base.get_parameter(f"{path}.weight") + ALPHA / RANK * up @ down


def expected(base: PreTrainedModel, adapters: Mapping[str, Tensor]) -> Trained:
    """Loss and the gradients of adapters on linear layers, over one document after another."""
    adapters = {name: tensor.detach().clone().requires_grad_() for name, tensor in adapters.items()}
    base.train().requires_grad_(False)
    loss = summed_loss(
        lambda call: torch.func.functional_call(base, dict(adapted_weights(base, adapters)), kwargs=call)
    )
    loss.backward()
    return loss.item(), {name: tensor.grad for name, tensor in adapters.items()}


def expected_of_peft(base: PreTrainedModel, adapters: Mapping[str, Tensor], **targets: Any) -> Trained:
    """Loss and gradients of peft's own model over the base, by peft's names; adapters on experts too."""
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, **targets)
    model = get_peft_model(base, config)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained.keys() == adapters.keys()
    for name, parameter in trained.items():
        parameter.data = adapters[name].detach().clone()
    loss = summed_loss(lambda call: model.train()(**call))
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in trained.items()}


def summed_loss(forward: Callable[[dict[str, Any]], Any]) -> Tensor:
    """The documents' cross-entropy, one after another."""
    total = torch.zeros(())
    for ids, labels in documents():
        logits = forward({"input_ids": torch.from_numpy(ids)[None], "use_cache": False}).logits[0]
        total = total + F.cross_entropy(logits[:-1], torch.from_numpy(labels[1:]), ignore_index=-100, reduction="sum")
    return total


def stored_in_mxfp4(folder: Path) -> None:
    """Have a gpt-oss's files as OpenAI publishes them: experts in MXFP4, four bits a number and a power of two for 32.

    Its experts' numbers are drawn anew.
    """
    draw = torch.Generator().manual_seed(2)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        groups = inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, groups, 16), generator=draw).to(torch.uint8)
        # 2^-6 to 2^-4 of numbers up to 6: about as large as the other weights.
        tensors[f"{name}_scales"] = torch.randint(121, 124, (experts, outputs, groups), generator=draw).to(torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


MXFP4_CODE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP Microscaling 1.0, table 7; the fourth bit is the sign


def from_mxfp4(folder: Path) -> dict[str, Tensor]:
    """The experts [experts, inputs, outputs] of a folder in MXFP4, by path, from the format's definition."""
    tensors, code = load_file(folder / "model.safetensors"), torch.tensor(MXFP4_CODE + [-one for one in MXFP4_CODE])
    found = {}
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks, exponents = tensors[name], tensors[name.replace("_blocks", "_scales")].int() - 127
        numbers = torch.stack([code[(blocks & 15).long()], code[(blocks >> 4).long()]], dim=-1).flatten(-2)
        values = torch.ldexp(numbers, exponents[..., None])  # [experts, outputs, groups, 32]
        found[name.removesuffix("_blocks")] = values.flatten(2).transpose(1, 2).contiguous()
    return found
