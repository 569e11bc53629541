"""One call replaces the forward of a model's adapters, norms and gates; each keeps a link to the library's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from finetune.architecture.own_layers.lora_linear import (
    Unpack,
    compute_adapters,
    leave_to_peft,
    own_adapters,
    share_inputs,
    sharing_layers,
    sharing_modules,
)
from finetune.architecture.own_layers.norm_and_gate import (
    compute_norms_and_gates,
    librarys_gate,
    own_gates,
    own_norms,
)

ADAPTERS, NORMS, GATES = "own adapters", "own norms", "own gates"


def compute_layers(
    model: nn.Module, unpack: Unpack, *, adapters_by_peft: str | None = None, mlp_tile_tokens: int | None = None
) -> None:
    """Let the kit compute adapters, norms and gates, if a layer allows it, and MLPs in tiles of so many tokens.

    Other arguments as in `compute_adapters`. Raises FinetuneError if there are tiles and no dense MLP.
    """
    compute_adapters(model, unpack, by_peft=adapters_by_peft)
    compute_norms_and_gates(model)
    share_inputs(model)
    if mlp_tile_tokens is not None:
        from finetune.architecture.own_layers.tiled_mlp import tile_mlps

        tile_mlps(model, mlp_tile_tokens)


@dataclass(frozen=True)
class FastModule:
    """A module that is computed here, and the library's way to compute it."""

    path: str  # ADAPTERS, NORMS or GATES
    module: Any
    attribute: str  # of the module: what is called
    librarys: Callable[..., Any]  # in its place
    tensors: int  # arguments of both, [..., width] each

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for modules that compute in the same way."""
        module = self.module
        weights = [
            (name, weight.shape, weight.dtype, weight.requires_grad) for name, weight in module.named_parameters()
        ]
        scaling = str(getattr(module, "scaling", None))
        return self.path, type(module), repr(module), scaling, tuple(weights)

    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters that both ways use, by name."""
        if self.path == GATES:
            return {}
        return dict(self.module.named_parameters())


def fast_modules(model: nn.Module) -> Iterator[FastModule]:
    """All modules in `model` that are computed here."""
    sharing = set[nn.Module]()
    for module in sharing_modules(model):
        sharing.update(sharing_layers(module))
        yield FastModule(ADAPTERS, module, "finetune_products", partial(_by_peft, module), 1)
    for module in own_adapters(model):
        if module not in sharing:
            yield FastModule(ADAPTERS, module, "forward", partial(type(module).forward, module), 1)
    for module in own_norms(model):
        yield FastModule(NORMS, module, "forward", partial(type(module).forward, module), 1)
    for module in own_gates(model):
        yield FastModule(GATES, module, "finetune_gate", partial(librarys_gate, module), 2)


def _by_peft(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Compute with peft's own layers, to compare `finetune_products` with them."""
    return tuple(type(layer).forward(layer, hidden) for layer in sharing_layers(module))


def leave_to_library(model: nn.Module, path: str) -> None:
    """From now on peft or transformers computes all modules of this path."""
    match path:
        case "own adapters":
            leave_to_peft(model, "differs from peft's")
        case "own norms":
            for module in own_norms(model):
                module.finetune_norm = None
        case "own gates":
            for module in own_gates(model):
                module.finetune_gate = None
