"""One block of experts in five ways: operations, bytes, products and what autograd keeps, on a CPU.

    python benchmarks/experts.py            (20 CPU seconds; writes benchmarks/results/experts.json)

    16 bits                 transformers' grouped products over experts in bfloat16, frozen
    16 bits, peft           the same with peft's `target_parameters` (rank 8): the sum of both weights is made
    4 bits, bitsandbytes    its `replace_parameter_4bit`: each access dequantises, and autograd keeps the result
    4 bits                  model/packed_experts.py
    4 bits, adapters        the same with adapters of rank 8 on each expert, computed beside the frozen product

A block has a quarter of Qwen3-30B-A3B's width and an eighth of its experts. Counted are a forward and its backward:
operations that compute something, which are kernels on a GPU; bytes that they read and write; and multiply-adds of
products, against those of the frozen experts in one pass.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import write_result

HIDDEN, FFN, EXPERTS, TOP, TOKENS, RANK = 512, 192, 16, 4, 1024, 8
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]


class Counting(TorchDispatchMode):
    """Counts operations that are no views, their bytes, and multiply-adds of products."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.nbytes = self.multiply_adds = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        name = func._schema.name.partition("::")[2]
        if func.is_view or name.startswith(("empty", "new_empty")) or name in ("_unsafe_view", "detach"):
            return result
        self.operations += 1
        self.nbytes += sum(each.nbytes for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor))
        if name in ("_grouped_mm", "mm", "bmm", "baddbmm"):
            left, right = args[-2:] if name == "baddbmm" else args[:2]
            self.multiply_adds += left.numel() * right.shape[-1]
        return result


def block() -> nn.Module:
    """A layer's router and experts, in bfloat16 and frozen."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": FFN, "num_experts": EXPERTS, "num_experts_per_tok": TOP}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **sizes, head_dim=32)
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="grouped_mm"
    )
    return model.requires_grad_(False)


def adapted(model: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=RANK, target_modules=[], target_parameters=PARAMETERS))


def packed(*, adapters: bool) -> nn.Module:
    """As a training loads it; here quantised from values in memory."""
    from finetune.model.packed_experts import experts_by_shape, for_experts, pack_experts
    from finetune.model.quantization import four_bit_weight

    model: Any = block()
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16", **settings)
    config = for_experts(config, None)
    experts = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        values = getattr(experts, name)
        weight = four_bit_weight(values.detach().flatten(0, 1), config)
        weight.finetune_experts = tuple(values.shape)
        setattr(experts, name, weight)
    pack_experts(model, config)
    if adapters:
        with experts_by_shape(model):
            model = adapted(model)
    return model


def bitsandbytes_way() -> nn.Module:
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    model: Any = block()
    for name in ("gate_up_proj", "down_proj"):
        replace_parameter_4bit(model.model.layers[0].mlp.experts, name, compress_statistics=True, quant_type="nf4")
    return model


def ways() -> Iterator[tuple[str, nn.Module]]:
    yield "16 bits", block()
    yield "16 bits, peft", adapted(block())
    yield "4 bits, bitsandbytes", bitsandbytes_way()
    yield "4 bits", packed(adapters=False)
    yield "4 bits, adapters", packed(adapters=True)


def measured(model: Any) -> dict[str, float]:
    mlp = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))
    hidden = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    held = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    held.add(hidden.untyped_storage().data_ptr())
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Counting() as forward, saved_tensors_hooks(keep, lambda tensor: tensor):
        output = mlp(hidden)
        output = output[0] if isinstance(output, tuple) else output
    with Counting() as backward:
        output.backward(torch.ones_like(output))
    once = TOKENS * TOP * 3 * HIDDEN * FFN  # multiply-adds of the frozen experts in one pass
    return {
        "operations": forward.operations + backward.operations,
        "mb_moved": round((forward.nbytes + backward.nbytes) / 1e6, 1),
        "products": round((forward.multiply_adds + backward.multiply_adds) / once, 2),
        "mb_kept": round(sum(kept.values()) / 1e6, 2),
        "mb_weights": round(sum(each.nbytes for each in mlp.parameters() if not each.requires_grad) / 1e6, 2),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    for name, model in ways():
        found[name] = measured(copy.deepcopy(model))
        print(name, found[name], flush=True)
    print(write_result("experts", {"ways": found}))


if __name__ == "__main__":
    main()
