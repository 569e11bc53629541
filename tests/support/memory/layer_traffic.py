"""What one decoder layer of Llama 3.1 8B launches and moves in a training step: as written, and compiled.

As written it is counted from the plan's trace: two layers' step less one layer's, so the layer is one between others.

- A kernel is an operation that reaches torch's dispatcher and computes or copies; views and allocations are free. A
  fused operation counts once.
- Its bytes are its operands' and results', read or written once, in full. Matrix products and attention are among the
  kernels, but their bytes are not counted: arithmetic bounds them.
- A step is one micro-batch of one row, forward and backward. Gradients are made, not added to earlier ones.

Compiled it is counted from the graphs that inductor has fused for a CPU, because it fuses before it writes code for a
device. A kernel is a node of its schedule. Its bytes are inductor's own figure.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._inductor import async_compile, select_algorithm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.architecture import attention
from finetune.architecture.compiled.layers import CompiledLayers, compile_layers
from finetune.architecture.compiled.loss_kernel import compiled_loss
from finetune.architecture.loss import AS_IT_IS, loss_and_slope, put_loss_into_forward
from finetune.architecture.own_layers.compute import compute_layers
from finetune.architecture.recomputation import checkpoint_layers
from finetune.model.known_configs import full_config
from finetune.planner.depth.extrapolate import with_layers
from finetune.planner.trace.step_work import StepWork, per_step
from finetune.planner.trace.trace import STEPS, trace
from finetune.planner.trace.worst_batches import worst_batches
from finetune.recipe.schema import Data, DataSet, Lora, ModelSection, Quantization, Recipe, Training
from finetune.recipe.strategy import read_strategy
from tests.support.models.tiny import flat_batch

MODEL, TOKENS = "meta-llama/Llama-3.1-8B", 4096
METHODS = ("lora", "qlora", "full")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
DOCUMENT = 64  # tokens: attention alone is computed, and is soon done; the graphs are those of all documents


def layer_step(method: str, folder: Path, *, recomputed: bool = False) -> Counter[str]:
    """As written: kernels, products among them, bytes of what is no product, and floating-point operations by kind."""
    recipe = Recipe(
        accelerate_config="single",
        model=ModelSection(name_or_path=MODEL),
        data=Data(train=[DataSet(path="json", data_files="unused.jsonl")], max_length=TOKENS),
        # bf16, not auto, which asks this machine's processor.
        training=Training(
            global_batch_size=1, per_device_batch_size=1, mixed_precision="bf16", activation_checkpointing=recomputed
        ),
        lora=None if method == "full" else Lora(),
        quantization=Quantization(load_in_4bit=True) if method == "qlora" else None,
    )
    operations: Counter[Any] = Counter(_work_of(recipe, 2, folder).operations)
    operations.subtract(_work_of(recipe, 1, folder).operations)
    found: Counter[str] = Counter()
    for operation, count in operations.items():
        if operation.phase in ("forward", "backward"):
            found["kernels"] += round(count)
            found["products"] += round(count) * (operation.kind == "product")
            found[operation.kind] += round(count * (operation.nbytes if operation.kind == "other" else operation.flops))
    return found


def _work_of(recipe: Recipe, layers: int, folder: Path) -> StepWork:
    shallow = with_layers(recipe, full_config(MODEL)[0], layers, folder)
    traced = trace(shallow, read_strategy(recipe.accelerate_config), worst_batches(recipe, 1), gpu=True)
    return per_step(traced.operations, {}, steps=STEPS, micro_steps=1)


def compiled_step(method: str, *, recomputed: bool = False, tokens: int = TOKENS, **shape: Any) -> Counter[str]:
    """Compiled: kernels, products and attention among them, and bytes of the others.

    Args:
        method: lora, or full: of bfloat16 weights.
        shape: Settings of the model's configuration other than Llama 3.1 8B's.
    """
    model, base = _one_layer(method, recomputed, shape)
    compiled = CompiledLayers(required=True, say=print)
    compiled._tried = lambda *_: True  # type: ignore[method-assign]  # kernels that do nothing cannot be compared
    compile_layers(base, compiled)
    row = flat_batch([DOCUMENT] * (tokens // DOCUMENT))
    torch.compiler.reset()
    with _schedules() as nodes, torch.autocast("cpu", torch.bfloat16, enabled=method == "lora"):
        model(**row).backward()
    found: Counter[str] = Counter()
    for node, quarter in nodes:
        kind = _kind(node)
        if kind is not None:
            found["kernels"] += 1
            found["products"] += kind == "product"
            found["attention"] += kind == "attention"
            found["other"] += 4 * quarter * (kind == "fused")
    return found


def loss_step(*, one_kernel: bool, vocabulary: int, rows: int = 64) -> Counter[str]:
    """A chunk's loss and slope of 16-bit logits: kernels, and the bytes of their operands and results.

    One kernel reads the logits three times, and they are counted once here, as an operand of softmax is.
    """
    generator = torch.Generator().manual_seed(0)
    product = torch.randn((rows, vocabulary), generator=generator).bfloat16()
    target = torch.randint(vocabulary, (rows,), generator=generator)
    if one_kernel:
        torch.compiler.reset()
        with _schedules() as nodes, torch.no_grad():
            compiled_loss()(product, target, 1.0)
        kinds = [(_kind(node), 4 * quarter) for node, quarter in nodes]
        return Counter(kernels=sum(kind is not None for kind, _ in kinds), bytes=sum(nbytes for _, nbytes in kinds))
    with _Traffic() as traffic:
        loss_and_slope(product, torch.empty((rows, vocabulary)), target, AS_IT_IS, all_learned=True, learn=True)
    return traffic.found


class _Traffic(TorchDispatchMode):
    """Kernels, and the bytes of their operands and results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and "empty" not in str(function):
            written = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            read = [each for each in args if isinstance(each, torch.Tensor)]
            if function in (torch.ops.aten.copy_.default, torch.ops.aten.new_full.default):
                read = read[1:]
            if "gather" in str(function) or "scatter" in str(function):  # at few places of the large tensor
                read, written = read[1:], read[1:]
            self.found += Counter(kernels=1, bytes=sum(each.nbytes for each in read + written))
        return result


class _Schedules(logging.Handler):
    """Collects the nodes of every graph, with a quarter of each one's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[tuple[Any, int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, Mapping) and "nodes_num_elem" in record.args:
            self.nodes.extend(record.args["nodes_num_elem"])


@contextmanager
def _schedules() -> Iterator[list[tuple[Any, int]]]:
    """What inductor logs of its graphs within. They are compiled anew: graphs of its cache are not logged."""
    torch._logging.set_logs(inductor_metrics=True)
    log = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    found, log.handlers, log.propagate = _Schedules(), [], False  # and none of it on the terminal
    log.addHandler(found)
    try:
        with torch._inductor.config.patch(force_disable_caches=True), nothing_computed():
            yield found.nodes
    finally:
        log.propagate = True
        torch._logging.set_logs()  # as it was, and without this handler


@contextmanager
def nothing_computed() -> Iterator[None]:
    """Graphs are made, but no C++ compiler runs, which takes a minute each. Kernels and products do nothing.

    Names of inductor that are not documented.
    """

    def nothing(*_: Any, **options: Any) -> Any:
        return options.get("out")

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", return_value=nothing))
        for product in PRODUCTS:
            stack.enter_context(mock.patch.object(select_algorithm.extern_kernels, product, nothing))
        yield


def _one_layer(method: str, recomputed: bool, shape: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    attention.register()
    settings = full_config(MODEL)[0] | {"num_hidden_layers": 1, "vocab_size": 512}  # the head is not compiled
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
