"""What one compiled decoder layer launches and moves in a training step, read from the graphs that inductor has fused.

- The layer is Llama 3.1 8B's with its own shape, in bfloat16, forward and backward of one row, whose input needs a
  gradient. It is compiled for a CPU, as no GPU is at hand: what inductor fuses is decided before it writes code for a
  device, and a GPU's code may join or split what this does not (reductions above all).
- A kernel is a node of inductor's schedule, after fusion; its bytes are inductor's own figure: each of its operands
  and results once, of those that are read in part, that part.
- Matrix products and attention are among the kernels, and their bytes are not among those here, as in layer_traffic.py.
- In full training the layer computes with 16-bit copies of float32 weights, which are made outside of its graphs, as
  their gradients are added outside: those kernels and bytes are counted from the eager trace, where training with
  copies has them and training of bfloat16 weights has not.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.architecture import attention
from finetune.architecture.compiled.layers import CompiledLayers, compile_layers
from finetune.architecture.lora_linear import compute_adapters
from finetune.architecture.loss import put_loss_into_forward
from finetune.architecture.recomputation.layers import checkpoint_layers
from finetune.model.known_configs import full_config
from finetune.recipe.schema import Lora
from tests.support.layer_traffic import MODEL
from tests.support.tiny import flat_batch

COMPILED_METHODS = ("lora", "full, pure_bf16")
COMPILED_COLUMNS = ("kernels", "fused", "product", "attention", "other GB")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
VOCABULARY = 512  # the head is not counted: it is not compiled


class _Schedules(logging.Handler):
    """Collects the nodes of every graph, with a quarter of the bytes of each."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[tuple[Any, int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, Mapping) and "nodes_num_elem" in record.args:
            self.nodes.extend(record.args["nodes_num_elem"])


@contextmanager
def schedules() -> Iterator[_Schedules]:
    """What inductor logs of its graphs within. They have to be compiled anew: graphs of its cache are not logged."""
    torch._logging.set_logs(inductor_metrics=True)
    log = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    found, log.handlers = _Schedules(), []  # and none of it on the terminal
    log.addHandler(found)
    try:
        with torch._inductor.config.patch(force_disable_caches=True):
            yield found
    finally:
        torch._logging.set_logs()  # as it was, and without this handler


def compiled_layer(method: str, *, recomputed: bool, tokens: int, **shape: Any) -> dict[str, Any]:
    """Kernels by what they are, and bytes of those that are neither products nor attention.

    Args:
        shape: Settings of the model's configuration other than Llama 3.1 8B's.
    """
    model, base = _one_layer(method, recomputed, shape)
    compiled = CompiledLayers(required=True, log=print)
    compile_layers(base, compiled)
    row = flat_batch([tokens])
    torch.compiler.reset()
    with schedules() as found, torch.autocast("cpu", torch.bfloat16, enabled=method == "lora"):
        model(**row).backward()
    kernels: Counter[str] = Counter()
    other = 0
    for node, quarter in found.nodes:
        if kind := _kind(node):
            kernels[kind] += 1
            other += 4 * quarter * (kind == "fused")
    figures = kernels.total(), *(kernels[kind] for kind in COMPILED_COLUMNS[1:-1]), other / 1e9
    return dict(zip(COMPILED_COLUMNS, figures, strict=True))


def with_copies(row: Mapping[str, Any], full: Mapping[str, Any], pure: Mapping[str, Any]) -> dict[str, Any]:
    """A compiled layer of bfloat16 weights with what an eager one of 16-bit copies has besides."""
    more = {column: full[column] - pure[column] for column in ("kernels", "other GB")}
    return {**row, **{column: row[column] + each for column, each in more.items()}}


def _one_layer(method: str, recomputed: bool, shape: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    attention.register()
    settings = full_config(MODEL)[0] | {"num_hidden_layers": 1, "vocab_size": VOCABULARY}
    settings |= {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings | shape)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.set_attn_implementation(attention.NAME)
    put_loss_into_forward(base)
    base.enable_input_require_grads()  # the layer is one between others
    model: nn.Module = base
    if method == "lora":
        lora = Lora()
        model = get_peft_model(base, LoraConfig(r=lora.r, lora_alpha=lora.lora_alpha, target_modules="all-linear"))
        compute_adapters(model, lambda *_: None)
    model.train()
    if recomputed:
        checkpoint_layers(base, 1)
    return model, base


def _kind(node: Any) -> str | None:
    """Of a node of inductor's schedule: product, attention or fused; None: it launches nothing."""
    name = type(node).__name__
    if name.startswith("Nop"):
        return None
    if not name.startswith("Extern"):
        return "fused"
    called = str(getattr(node.node, "python_kernel_name", "") or getattr(node.node, "op_overload", ""))
    if "MultiOutput" in type(node.node).__name__:
        return None  # one of the results of the kernel before it
    if any(f".{product}" in called for product in PRODUCTS):
        return "product"
    if "finetune" in called:
        return "attention"
    raise ValueError(f"a kernel of inductor's schedule that is not known: {called} ({type(node.node).__name__})")
