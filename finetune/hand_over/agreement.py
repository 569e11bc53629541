"""Compare a merged model with its base and adapter, by their next tokens in held-out answers.

Both compute in float32 from their stored weights. So a difference comes from the weights, not from the rounding of two
ways to multiply them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.generation.generate import computing_device
from finetune.model.quantization import quantized_layers
from finetune.tokens.dataset import Prepared
from finetune.tokens.encoder import IGNORE

# The adapter model's logits, float32 on the host, until the other models were compared with them. Llama 3's vocabulary
# has 128,256 entries, so 64 documents get 2^30 / (4 * 128,256 * 64) = 32 tokens each.
KEPT_BYTES = 2**30


@dataclass(frozen=True)
class ComparedDocument:
    """A document up to its last compared answer token, and the positions whose next token is compared."""

    ids: Tensor  # int64 [1, tokens]
    positions: Tensor  # int64 [compared], ascending
    targets: Tensor  # int64 [compared], the data's own next tokens


@dataclass
class Agreement:
    """Sums over documents; figures by `as_json`."""

    tokens: int = 0
    same_top: int = 0
    kl: float = 0.0
    largest: float = 0.0
    loss: float = 0.0

    def add(self, expected: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Add one document's logits [compared, vocabulary] from the adapter model and the compared one."""
        # float64, because the KL of nearly equal models is a sum over tiny differences.
        expected, logits = expected.double(), logits.double()
        log_expected, log_compared = expected.log_softmax(-1), logits.log_softmax(-1)
        self.tokens += len(targets)
        self.same_top += int((expected.argmax(-1) == logits.argmax(-1)).sum())
        self.kl += float((log_expected.exp() * (log_expected - log_compared)).sum())
        self.largest = max(self.largest, float((expected - logits).abs().max()))
        self.loss -= float(log_compared.gather(-1, targets[:, None]).sum())

    def as_json(self) -> dict[str, Any]:
        """The share with the same top token, mean KL in nats, largest logit difference, and mean loss on the data."""
        return {
            "top1": self.same_top / self.tokens,
            "kl": self.kl / self.tokens,
            "largest_logit_difference": self.largest,
            "loss": self.loss / self.tokens,
        }


@dataclass(frozen=True)
class Reference:
    """The adapter model's logits, to which the other models are compared."""

    documents: Sequence[ComparedDocument]
    logits: list[Tensor] = field(repr=False)  # float32 [compared, vocabulary] each, on the host
    adapter: Agreement = field(default_factory=Agreement)


def documents_to_compare(prepared: Prepared, count: int, vocabulary: int) -> list[ComparedDocument]:
    """The first held-out documents, or training documents if none are held out, with tokens spread over the answers."""
    split = prepared.split
    documents = split.held_out if len(split.held_out) else np.unique(split.train)
    chosen = documents[:count].tolist()
    most_tokens = max(1, KEPT_BYTES // (4 * vocabulary * max(1, len(chosen))))
    return [compared_document(*prepared.pool.document(index), most_tokens) for index in chosen]


def compared_document(ids: np.ndarray, labels: np.ndarray, most: int) -> ComparedDocument:
    """At most `most` positions, evenly spread over the answer tokens, the first and the last among them."""
    # Position i predicts label i + 1, so labels[1:] are the targets for positions 0, 1, ...
    supervised = np.flatnonzero(labels[1:] != IGNORE)
    places = np.linspace(0, len(supervised) - 1, min(most, len(supervised))).round().astype(int)
    positions = supervised[np.unique(places)]
    tokens = torch.from_numpy(np.ascontiguousarray(ids[: positions[-1] + 1]))[None]
    return ComparedDocument(tokens, torch.from_numpy(positions), torch.from_numpy(labels[positions + 1]))


def run_reference(adapted: nn.Module, documents: Sequence[ComparedDocument]) -> Reference:
    """Compute the reference's logits. `adapted` is peft's model, or any other reference."""
    reference = Reference(documents, [])
    with computing_in_float32(adapted):
        for document in documents:
            logits = _answer(adapted, document)
            reference.adapter.add(logits, logits, document.targets)
            reference.logits.append(logits)
    return reference


def agreement_with(model: nn.Module, reference: Reference) -> Agreement:
    """A plain model's agreement with the adapter model."""
    agreement = Agreement()
    with computing_in_float32(model):
        for document, logits in zip(reference.documents, reference.logits, strict=True):
            agreement.add(logits, _answer(model, document), document.targets)
    return agreement


def _answer(model: nn.Module, document: ComparedDocument) -> Tensor:
    device = computing_device(model)
    # logits_to_keep computes the head at the compared positions only, not a [tokens, vocabulary] matrix.
    with torch.no_grad():
        output = model(input_ids=document.ids.to(device), logits_to_keep=document.positions.to(device), use_cache=False)
    logits: Tensor = output.logits[0]
    return logits.float().cpu()


@contextmanager
def computing_in_float32(model: nn.Module) -> Iterator[None]:
    """Within the block, each layer's weights are float32 while it computes, one layer at a time.

    Afterwards they return to their format. Quantised layers compute in float32 from their dequantised weights.
    """
    quantized = set(quantized_layers(model))
    handles: list[Any] = []
    saved_dtypes = [(layer, layer.compute_dtype) for layer in quantized if hasattr(layer, "compute_dtype")]
    for layer, _ in saved_dtypes:
        layer.compute_dtype = torch.float32
    stored: dict[nn.Parameter, Tensor] = {}
    # Listed once: peft moves a parameter that an adapter names out of its module while that module computes.
    narrow: dict[nn.Module, list[nn.Parameter]] = {}

    def widen(module: nn.Module, *_: Any) -> None:
        for parameter in narrow[module]:
            stored[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def narrow_again(module: nn.Module, *_: Any) -> None:
        for parameter in narrow[module]:
            parameter.data = stored.pop(parameter)

    for module in model.modules():
        own = module.parameters(recurse=False)
        narrow[module] = [
            parameter for parameter in own if parameter.is_floating_point() and parameter.dtype != torch.float32
        ]
        if module not in quantized and narrow[module]:
            handles += [module.register_forward_pre_hook(widen), module.register_forward_hook(narrow_again)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer, dtype in saved_dtypes:
            layer.compute_dtype = dtype
