"""Every n-th decoder layer is recomputed in backward.

Only a layer's forward is recomputed. A strategy's hooks around a layer run once, so no weight is gathered twice. From
torch 2.13 on, a compiled layer is one graph with its recomputation. transformers works this way since 5.24. Earlier
releases recompute the whole call with its hooks; `checkpoint_layers` brings the later way to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # no public name; tests/architecture/test_recomputation.py would turn red
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.architecture.by_document import Contexts, checkpoint_contexts
from finetune.architecture.operations import nested_tensors
from finetune.errors import FinetuneError


def checkpoint_layers(model: PreTrainedModel, every: int, *, keep_products: bool = False) -> None:
    """Recompute every n-th decoder layer in backward, by torch's non-reentrant checkpoint.

    Args:
        keep_products: Keep matrix products and attention outputs, and recompute the rest.
    """
    # Renamed within transformers 5; the old name warns in the new releases.
    renamed = hasattr(model, "activation_checkpointing_enable")
    enable = model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
    with suppress(ValueError):  # a class that says it has none
        enable({"use_reentrant": False} | checkpoint_options(model, keep_products=keep_products))
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise FinetuneError(
            f"training.activation_checkpointing: {type(model).__name__} does not support it; set it to false"
        )
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0
        layer.finetune_keeps_products = keep_products
    for kind in {type(layer) for layer in layers}:
        _recompute_forward_alone(kind)


def _recompute_forward_alone(kind: Any) -> None:
    """Let layers of this class recompute their forward instead of their call, under transformers before 5.24.

    There the base class overrides `__call__` to checkpoint it. FSDP2 makes a subclass of `kind` for its shards, which
    inherits both methods from here.
    """
    if kind.__call__ is nn.Module.__call__:
        return
    forward: Callable[..., Any] = kind.forward

    @wraps(forward)
    def recomputed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(partial(forward, self, **kwargs), *args)
        return forward(self, *args, **kwargs)

    kind.forward, kind.__call__ = recomputed, nn.Module.__call__


def keeps_products(layer: nn.Module) -> bool:
    """Whether a layer keeps its products and recomputes everything else."""
    return bool(getattr(layer, "gradient_checkpointing", False) and getattr(layer, "finetune_keeps_products", False))


def checkpoint_options(model: nn.Module, *, keep_products: bool = False) -> dict[str, Any]:
    """Options for torch's checkpoint, so that a layer that runs again sees the same row and its kept products."""
    row = checkpoint_contexts(model)
    if not keep_products:
        if row is None:
            return {}
        return {"context_fn": row}
    return {"context_fn": keeping_and_returning if row is None else _both(row, keeping_and_returning)}


def _both(first: Callable[[], Contexts], second: Callable[[], Contexts]) -> Callable[[], Contexts]:
    def contexts() -> Contexts:
        outer, inner = first(), second()
        return _entered(outer[0], inner[0]), _entered(outer[1], inner[1])

    return contexts


@contextmanager
def _entered(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


# Selective recomputation: a layer keeps its matrix products and attention outputs, and computes only the rest again.
#
# torch's non-reentrant checkpoint runs a layer's forward a second time in backward, under its caller's contexts. Here
# they are two dispatch modes. The first keeps results of products and attention. The second returns them when the same
# operations would run again. Norms, RoPE and SwiGLU are cheap beside the products and save more than they return.
#
# torch's own pair, create_selective_checkpoint_contexts, is not used for three reasons:
# - It keeps a layer's last product, [tokens, hidden], which backward does not need.
# - It refuses a product that another is added to in place, as in own_layers/lora_linear.py; with
#   allow_cache_entry_mutation it returns the later value instead.
# - torch 2.11 asks its policy again in backward. A policy that depends on earlier operations cannot answer there.

# By namespace and name. Not those that add in place: what they add to has been kept.
PRODUCTS = {
    *(f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")),
    *(f"bitsandbytes.{name}" for name in ("gemm_4bit", "gemv_4bit")),
    *(f"bitsandbytes.{name}" for name in ("int8_linear_matmul", "int8_scaled_mm", "int8_mixed_scaled_mm")),
}
# Of these a product of batches is one of many small matrices, such as attention's scores [heads, tokens, tokens].
BATCHED = {"aten.bmm", "aten.baddbmm"}
# Autograd saves no result of these, so where nothing else comes after a layer's last product, backward does not ask
# for it.
SAVE_NOTHING = {
    *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "squeeze", "unsqueeze", "select"),
    *("slice", "split", "split_with_sizes", "detach", "alias", "clone", "_to_copy", "add", "add_", "addmm_"),
}


def keeping_and_returning() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The contexts for one layer's forward, and for that forward in backward."""
    kept: dict[int, Any] = {}
    return _Keeping(kept), _Returning(kept)


class _Keeping(TorchDispatchMode):
    """Keeps results by the place of their operation among all that may be kept."""

    def __init__(self, kept: dict[int, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._kept, self._place, self._needed = kept, 0, True
        self._by_storage: dict[int, int] = {}  # of storages that are kept, and so have one identity meanwhile
        self._unread = _Unread()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if "out" in kwargs or not _may_be_kept(func):
            # Of fake tensors a mode sees questions too, as that for a device.
            asks = next(nested_tensors(result), None) is None
            self._needed = self._needed or not (asks or func.overloadpacket.__name__ in SAVE_NOTHING)
            written = _written(func, args, kwargs)
            if written is not None and not self._unread.is_of(written):
                self._forget(written)
            self._unread.after(func, args, kwargs, result)
            return result
        if _is_worth_it(func, args, kwargs, result):
            self._kept[self._place] = value = _detached(result)
            self._by_storage |= {id(tensor.untyped_storage()): self._place for tensor in nested_tensors(value)}
            self._needed = False
        else:
            self._needed = True
        self._unread.begin(result)
        self._place += 1
        return result

    def _forget(self, written: Tensor) -> None:
        """A kept result was read, and is overwritten now: it is to be computed again, and overwritten again."""
        place = self._by_storage.pop(id(written.untyped_storage()), None)
        if place is not None:
            self._kept.pop(place, None)

    def __exit__(self, *failure: Any) -> None:
        if not self._needed and self._kept:
            del self._kept[max(self._kept)]
        self._by_storage.clear()
        super().__exit__(*failure)  # type: ignore[no-untyped-call]  # torch's


class _Returning(TorchDispatchMode):
    """Returns kept results instead of computing them. Recomputation may end before it asks for all."""

    def __init__(self, kept: dict[int, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._kept, self._place = kept, 0
        self._unread = _Unread()

    def __enter__(self) -> Any:
        self._place = 0
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "out" not in kwargs and _may_be_kept(func):
            value = self._kept.pop(self._place, None)
            self._place += 1
            if value is None:
                self._unread.end()
                return func(*args, **kwargs)
            self._unread.begin(value)
            return value
        written = _written(func, args, kwargs)
        if written is not None and self._unread.is_of(written):
            return written  # what was kept has this in it already
        result = func(*args, **kwargs)
        self._unread.after(func, args, kwargs, result)
        return result

    def __exit__(self, *failure: Any) -> None:
        self._kept.clear()
        self._unread.end()
        super().__exit__(*failure)  # type: ignore[no-untyped-call]  # torch's


class _Unread:
    """The latest product, as long as no operation has read it: only then may another be added to it in place."""

    def __init__(self) -> None:
        self._storage: weakref.ref[torch.UntypedStorage] | None = None

    def begin(self, product: Any) -> None:
        self._storage = weakref.ref(product.untyped_storage()) if isinstance(product, Tensor) else None

    def end(self) -> None:
        self._storage = None

    def is_of(self, tensor: Tensor) -> bool:
        return self._storage is not None and self._storage() is tensor.untyped_storage()

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Track views and in-place writes as the kept tensor. A fake tensor needs a call to know its device."""
        if self._storage is None or func.namespace == "prim" or any(map(self.is_of, nested_tensors(result))):
            return
        if any(map(self.is_of, nested_tensors(args))) or any(map(self.is_of, nested_tensors(kwargs))):
            self.end()


@cache
def _may_be_kept(func: Any) -> bool:
    """Products, and attention by whatever kernel."""
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
    if f"{func.namespace}.{name}" in PRODUCTS:
        return True
    return ("attention" in name or "attn" in name) and "backward" not in name


def _is_worth_it(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """False for operations that draw random numbers, because later ones draw after them, and for results larger than
    their factors.
    """
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if any(value for name, value in given.items() if "dropout" in name):
        return False
    if f"{func.namespace}.{func.overloadpacket.__name__}" in BATCHED:
        return bool(result.numel() <= sum(tensor.numel() for tensor in nested_tensors(args)))
    return True


def _written(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that an operation writes to, by its name: aten.add_, or one with `out`."""
    if "out" in kwargs:
        written = kwargs["out"]
    else:
        name = func.overloadpacket.__name__
        written = args[0] if args and name.endswith("_") and not name.endswith("__") else None
    if isinstance(written, Tensor):
        return written
    return None


def _detached(value: Any) -> Any:
    """The tensor without its graph, because the graph holds these contexts."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return type(value)(map(_detached, value))
    return value
