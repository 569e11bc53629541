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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._inductor import async_compile, select_algorithm
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.architecture import attention
from finetune.architecture.compiled.layers import CompiledLayers, compile_layers
from finetune.architecture.loss import put_loss_into_forward
from finetune.architecture.own_layers.compute import compute_layers
from finetune.architecture.recomputation import checkpoint_layers
from finetune.model.known_configs import full_config
from finetune.recipe.schema import Lora
from tests.support.memory.layer_traffic import MODEL
from tests.support.models.tiny import flat_batch

COMPILED_METHODS = ("lora", "full, pure_bf16")
COMPILED_COLUMNS = ("kernels", "fused", "product", "attention", "other GB")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
DOCUMENT = 64  # tokens: attention alone is computed, and is soon done; the graphs are those of all documents
EMPTY = "empty.memory_format"  # a loop over no element
VOCABULARY = 512  # the head is not counted: it is not compiled


class Kernel(NamedTuple):
    """A node of inductor's schedule."""

    kind: str  # product, attention or fused
    operations: str  # that are computed in it, by their names
    nbytes: int


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
    found, log.handlers, log.propagate = _Schedules(), [], False  # and none of it on the terminal
    log.addHandler(found)
    try:
        with torch._inductor.config.patch(force_disable_caches=True), _nothing_computed():
            yield found
    finally:
        log.propagate = True
        torch._logging.set_logs()  # as it was, and without this handler


@contextmanager
def _nothing_computed() -> Iterator[None]:
    """Graphs are made, but not compiled by a C++ compiler, which takes a minute each, nor computed: kernels and
    products leave what they are to write as it is. Names of inductor that are not documented."""

    def nothing(*_: Any, **options: Any) -> Any:
        return options.get("out")

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", return_value=nothing))
        for product in PRODUCTS:
            stack.enter_context(mock.patch.object(select_algorithm.extern_kernels, product, nothing))
        yield


def compiled_layer(method: str, *, recomputed: bool, tokens: int, **shape: Any) -> dict[str, Any]:
    """Kernels by what they are, and bytes of those that are neither products nor attention: `by_column` of
    `compiled_kernels`."""
    return by_column(compiled_kernels(method, recomputed=recomputed, tokens=tokens, **shape))


def by_column(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """How many kernels of each kind there are, and GB of those that are fused."""
    times = Counter(kernel.kind for kernel in kernels)
    other = sum(kernel.nbytes for kernel in kernels if kernel.kind == "fused")
    figures = len(kernels), *(times[kind] for kind in COMPILED_COLUMNS[1:-1]), other / 1e9
    return dict(zip(COMPILED_COLUMNS, figures, strict=True))


def largest_kernels(kernels: Iterable[Kernel], count: int = 8) -> list[list[Any]]:
    """Of those that are fused, the operations and GB of those that move most."""
    fused = sorted((kernel for kernel in kernels if kernel.kind == "fused"), key=lambda kernel: -kernel.nbytes)
    return [[kernel.operations, round(kernel.nbytes / 1e9, 3)] for kernel in fused[:count]]


def compiled_kernels(method: str, *, recomputed: bool, tokens: int, **shape: Any) -> list[Kernel]:
    """Each kernel of the layer's graphs.

    Args:
        shape: Settings of the model's configuration other than Llama 3.1 8B's.
    """
    model, base = _one_layer(method, recomputed, shape)
    compiled = CompiledLayers(required=True, log=print)
    compile_layers(base, compiled)
    row = flat_batch([DOCUMENT] * (tokens // DOCUMENT))
    torch.compiler.reset()
    with schedules() as found, torch.autocast("cpu", torch.bfloat16, enabled=method == "lora"):
        model(**row).backward()
    return [Kernel(kind, _operations(node), 4 * quarter) for node, quarter in found.nodes if (kind := _kind(node))]


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
    compute_layers(model, lambda *_: None)
    model.train()
    if recomputed:
        checkpoint_layers(base, 1)
    return model, base


def _operations(node: Any) -> str:
    """The operations that a node of inductor's schedule computes, by their names."""
    origins = {origin for part in node.get_nodes() if part.node is not None for origin in part.node.get_origins()}
    return " ".join(sorted({str(getattr(each.target, "__name__", each.target)) for each in origins}))


def _kind(node: Any) -> str | None:
    """Of a node of inductor's schedule: product, attention or fused; None: it launches nothing."""
    name = type(node).__name__
    if name.startswith("Nop") or _operations(node) == EMPTY:
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
