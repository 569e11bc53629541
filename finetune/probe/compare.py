"""The kit's loss and gradients beside the library's: its own class, eager attention, one document at a time.

Both models have equal weights and adapters. In float32 the two differ by rounding, below 1e-5 relative. A deep or badly
scaled model rounds more, so a larger difference is computed once more in float64. A real difference stays there. In 16
bits rounding depends on model and kernel, so the measure is the library's own error against float32.

If the two differ, `judge` names the setting that differs and one that is right.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.architecture import attention
from finetune.architecture.families import router_coefficient
from finetune.architecture.own_layers.compute import compute_layers
from finetune.architecture.recomputation import checkpoint_layers
from finetune.errors import FinetuneError
from finetune.model.adapter_targets import expert_parameters
from finetune.model.build import attention_name, build_model, decoder_parts
from finetune.model.dtypes import dtype_name
from finetune.model.quantization import unpacked_weight
from finetune.model.text_part import auto_class
from finetune.probe.small_model import SmallModel, draw_weights
from finetune.recipe.schema import Recipe
from finetune.tokens.batches import micro_batches, prefetch
from finetune.tokens.encoder import IGNORE

EXACT = 1e-5  # relative, in float32
# In 16 bits: so many times the library's own error. Both sides have that error, so they may differ by twice as much.
# Kernels add up in another order, and a few elements of a tensor decide: half as much again. A document that sees
# another document is off by a tenth and more.
TIMES_THE_LIBRARYS = 3.0
FAR = 1e9  # distance if a value is not finite; a number, because results are kept as JSON
SMALL_GRADIENT = 0.1  # a gradient that is 0 but for rounding (a key's bias) is measured by this share of the whole
# A model that chooses experts may differ by this much through rounding in 16 bits: a token with two nearly equal best
# experts goes to the other one. A document that sees another document is off by more.
BY_CHOICE = 0.1
KEPT, RECOMPUTED = "kept", "recomputed"  # layers, in backward
DOCUMENT_LENGTHS = (5, 20, 2, 13)  # tokens: shorter and longer than the small model's window
PACKED, ALONE = [[0, 1, 2], [3]], [[0], [1], [2], [3]]  # documents of each row
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)

TokensAndLabels = tuple[np.ndarray, np.ndarray]


class Differs(Exception):
    """Loss or gradients are not the library's; its text is the line for the user."""


class NotFiniteHere(Exception):
    """The small model's loss or a gradient is NaN or infinite: its sizes or weights tell nothing."""


@dataclass(frozen=True)
class LossAndGradients:
    """A loss, summed over the documents' supervised tokens, and its gradients by parameter name."""

    loss: float
    gradients: Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Difference:
    """Relative differences: of the loss, and of the gradient that differs most."""

    loss: float
    gradients: float
    worst: str = ""  # the parameter whose gradient that is

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradients)


def difference(computed: LossAndGradients, expected: LossAndGradients, *, exact: bool = True) -> Difference:
    """The relative difference between `computed` and `expected`.

    A gradient that only one side has counts as a difference. Values that are not finite are FAR away.

    Args:
        exact: Take the gradient that differs most. False compares all gradients as one vector, because in 16 bits the
            worst of many tensors mostly shows rounding.

    With all gradients together of norm 10, a gradient [3, 4] beside [3, 3] is 1 / (4.24 + 0.1 x 10) = 0.19 off. Without
    the second term, a gradient that consists of rounding alone would count as wholly wrong.
    """
    whole = math.sqrt(sum(float(g.double().norm()) ** 2 for g in expected.gradients.values() if g is not None))
    worst, at, squares = 0.0, "", 0.0
    for name, theirs in expected.gradients.items():
        ours = computed.gradients.get(name)
        if theirs is None and ours is None:
            continue
        if theirs is None or ours is None:
            distance = float(cast(Tensor, theirs if ours is None else ours).double().norm())
            off = distance / whole
        else:
            distance = float((ours.double() - theirs.double()).norm())
            off = distance / (float(theirs.double().norm()) + SMALL_GRADIENT * whole)
        squares += distance**2
        if _number(off) > worst:
            worst, at = _number(off), name
    if not exact:
        worst, at = _number(math.sqrt(squares) / whole), "all"
    return Difference(_number(abs(computed.loss - expected.loss) / abs(expected.loss)), worst, at)


def _number(off: float) -> float:
    """FAR for infinity and for NaN. A maximum would ignore NaN, because every comparison with it is false."""
    if math.isfinite(off):
        return off
    return FAR


@dataclass
class LibrarySide:
    """A small model of the library and its results; recipes are compared with it one after another.

    The sides that `dataclasses.replace` makes of one another share the model.
    """

    small: SmallModel
    model: nn.Module
    decoder: PreTrainedModel  # the model inside its adapters
    documents: list[TokensAndLabels]
    device: torch.device
    compute: torch.dtype | None  # of autocast; None: float32
    router: float  # the coefficient of its router's auxiliary loss
    training: bool = True  # False for a model that draws numbers whatever its settings say
    wide: bool = False  # float64. `model.float()` undoes it: weights stay exact, because they are bfloat16's numbers
    expected: LossAndGradients = field(init=False)
    bound: float = field(init=False)

    def __post_init__(self) -> None:
        if self.wide:
            widen(self.decoder)
        self.expected = self._librarys(None)
        gradients = [gradient for gradient in self.expected.gradients.values() if gradient is not None]
        if not math.isfinite(self.expected.loss) or not all(bool(g.isfinite().all()) for g in gradients):
            raise NotFiniteHere("its loss or a gradient is not finite")
        self.bound = EXACT
        if self.compute is not None:
            rounded = self.difference_of(self._librarys(self.compute)).largest
            self.bound = TIMES_THE_LIBRARYS * max(rounded, torch.finfo(self.compute).eps)

    @property
    def precision(self) -> str:
        return "float64" if self.wide else dtype_name(self.compute or torch.float32)

    def _librarys(self, compute: torch.dtype | None) -> LossAndGradients:
        self.model.train(self.training)
        self.model.zero_grad()
        total = 0.0
        balanced = bool(self.router) and self.training
        options = {"output_router_logits": True} if balanced else {}
        with AllInFloat64() if self.wide else nullcontext():
            for ids, labels in self.documents:
                targets = torch.from_numpy(labels[1:]).to(self.device)
                with torch.autocast(self.device.type, compute, enabled=compute is not None):
                    tokens = torch.from_numpy(ids)[None].to(self.device)
                    output = self.model(input_ids=tokens, use_cache=False, **options)
                loss = summed(output.logits[0, :-1], targets)
                if balanced:
                    loss = loss + self.router * int((labels[1:] != IGNORE).sum()) * output.aux_loss
                loss.backward()
                total += loss.item()
        return LossAndGradients(total, gradients_of(self.model))

    def kits_model(self, recipe: Recipe) -> tuple[nn.Module, PreTrainedModel]:
        """The kit's model of the recipe and its decoder, with the library's weights; in float64 nothing is recomputed.

        Raises what `build_model` raises.
        """
        model, decoder = kits_model(recipe, self.small, self.device)
        model.load_state_dict(self.model.state_dict())
        if self.wide:
            widen(decoder)
        return model, decoder

    def computed_by(self, model: nn.Module, recipe: Recipe, *, by_logits: bool = False) -> LossAndGradients:
        """Loss and gradients of the kit's model, in the micro-batches that the recipe makes of the documents.

        Args:
            by_logits: Take the library's own logits and loss, with the kit's batches and attention.
        """
        model.train(self.training)
        model.zero_grad()
        loss = 0.0
        members = PACKED if recipe.data.packing else ALONE
        rows = ProbeRows([[self.documents[index] for index in row] for row in members])
        flat = attention_name(recipe) == attention.NAME
        at_once = min(2, recipe.training.rows_at_once)
        batches = micro_batches(
            rows, range(len(members)), rank=0, world_size=1, per_device_batch_size=at_once, flat=flat
        )
        with AllInFloat64() if self.wide else nullcontext():
            for batch in prefetch(batches, self.device, non_blocking=False):
                arguments: dict[str, Any] = dict(batch)
                with torch.autocast(self.device.type, self.compute, enabled=self.compute is not None):
                    if by_logits:
                        labels, _ = arguments.pop("shift_labels"), arguments.pop("supervised", None)
                        logits = model(**arguments, use_cache=False).logits
                        part = summed(logits.flatten(0, 1), labels.flatten())
                    else:
                        part = model(**arguments)
                part.backward()
                loss += part.item()
        return LossAndGradients(loss, gradients_of(model))

    def repeats(self) -> bool:
        """Whether the library's model repeats its results, which means that it draws no random numbers."""
        return self.difference_of(self._librarys(None)).largest <= self.bound

    def difference_of(self, computed: LossAndGradients) -> Difference:
        """The difference of `computed` from the library's."""
        return difference(computed, self.expected, exact=self.compute is None)


@dataclass(frozen=True)
class ProbeRows:
    """The documents in rows, as micro-batches ask for them."""

    rows: list[list[TokensAndLabels]]

    def documents(self, row: int) -> list[TokensAndLabels]:
        return self.rows[row]


@dataclass(frozen=True)
class RecipeSide:
    """A recipe's results beside the library's: by its own way first, KEPT or RECOMPUTED, then by the other one."""

    library: LibrarySide
    computed: Mapping[str, LossAndGradients]
    differences: Mapping[str, Difference]

    @property
    def own(self) -> Difference:
        """The difference of the recipe's own way, which decides."""
        return next(iter(self.differences.values()))

    @property
    def is_right(self) -> bool:
        return self.own.largest <= self.library.bound


def recipe_side(library: LibrarySide, recipe: Recipe) -> RecipeSide:
    """Compute with layers recomputed as the recipe says, then the other way if the model can.

    Raises what `build_model` and the model's own code raise.
    """
    model, decoder = library.kits_model(recipe)
    recomputes = bool(recipe.training.recompute_every)
    own, other = (RECOMPUTED, KEPT) if recomputes else (KEPT, RECOMPUTED)
    computed = {own: library.computed_by(model, recipe)}
    try:
        if recomputes:
            recompute_nothing(decoder)
        else:
            checkpoint_layers(decoder, 1)
    except FinetuneError:  # the model cannot recompute
        pass
    else:
        computed[other] = library.computed_by(model, recipe)
    return RecipeSide(library, computed, {layers: library.difference_of(result) for layers, result in computed.items()})


def judge(
    recipe: Recipe, small: SmallModel, device: torch.device, compute: torch.dtype | None
) -> tuple[RecipeSide, str | None]:
    """Compare the recipe's loss and gradients with the library's. Returns what is right, and a note on it.

    Raises Differs if they differ, FinetuneError if the kit refuses the small model, and what the model's own code
    raises.
    """
    note = None
    library = library_side(recipe, small, device, compute)
    ours = recipe_side(library, recipe)
    if not ours.is_right and not library.repeats():
        note = "compared in evaluation mode: it draws random numbers"
        library = replace(library, training=False)
        ours = recipe_side(library, recipe)
    if not ours.is_right and compute is not None and expert_parameters(library.decoder):
        # In float32 rounding hardly changes a mixture's choice of experts.
        exact = recipe_side(replace(library, compute=None), recipe)
        if exact.is_right:
            by_choice = "float32 agrees; in 16 bits rounding decides which experts are chosen"
            note = f"{note}; {by_choice}" if note else by_choice
            library.bound = BY_CHOICE
    if not ours.is_right and compute is None and device.type == "cpu":
        ours = _in_float64(ours, recipe)
    if not ours.is_right:
        raise _refusal(ours, recipe)
    return ours, note


def _in_float64(ours: RecipeSide, recipe: Recipe) -> RecipeSide:
    """Compare once more in float64, where rounding is far below the bound, unless an operation has no float64.

    Layers are not recomputed there. Recomputing them must not change a bit, so float32 shows any change it makes.
    """
    own, as_written = next(iter(ours.computed.items()))
    recomputing = difference(as_written, ours.computed[KEPT])
    try:
        wide = replace(ours.library, wide=True)
        model, _ = wide.kits_model(recipe)
        result = wide.computed_by(model, recipe)
    except Exception:  # the model's own code or a kernel
        ours.library.model.float()
        return ours
    kept = wide.difference_of(result)
    both = Difference(max(kept.loss, recomputing.loss), max(kept.gradients, recomputing.gradients), kept.worst)
    return RecipeSide(wide, {KEPT: result}, {own: both} if own == KEPT else {own: both, KEPT: kept})


def _refusal(ours: RecipeSide, recipe: Recipe) -> Differs:
    """The line for the user: the place that differs, by how much, and a setting that is right.

    Only a router's auxiliary loss may differ. Without it, recipes are tried with one other setting, then with two.
    """
    library = ours.library
    name = library.small.name
    if library.router:
        off = ours.own
        library = replace(library, router=0.0)
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"router_aux_loss_coef": 0.0})})
        ours = recipe_side(library, recipe)
        if ours.is_right:
            return Differs(
                f"model.router_aux_loss_coef: the router's auxiliary loss differs: {name}, made small, has a loss "
                f"{off.loss:.1e} and gradients {off.gradients:.1e} from the library's own of one document at a time; "
                "set model.router_aux_loss_coef: 0"
            )
    others = [other for other in attention.LIBRARYS if other != recipe.model.attention]
    trials = {f"model.attention: {other}": _changed(recipe, other, packing=recipe.data.packing) for other in others}
    if recipe.data.packing:
        trials["data.packing: false"] = _changed(recipe, recipe.model.attention, packing=False)
        for other in others:
            trials[f"model.attention: {other} and data.packing: false"] = _changed(recipe, other, packing=False)
    if ours.differences[KEPT].largest <= library.bound:
        setting = str(recipe.training.activation_checkpointing).lower()
        place, part = f"training.activation_checkpointing: {setting}", "the recomputation of layers"
        right = ["training.activation_checkpointing: false"]
    else:
        right = [text for text, trial in trials.items() if _is_right(library, trial)]
        place, part = f"model.name_or_path: {recipe.model.name_or_path}", "its forward"
        if _is_right(library, recipe, by_logits=True):
            part = "the loss"
        elif "data.packing: false" in right:
            place, part = "data.packing: true", "packing"
        elif right:
            place, part = f"model.attention: {recipe.model.attention}", "attention"
            if right[0].endswith("data.packing: false"):
                part = "attention, and packing with any other,"
    remedy = f"set {right[0]}" if right else "choose another model"
    return Differs(
        f"{place}: {part} differs: {name}, made small, has a loss {ours.own.loss:.1e} and gradients "
        f"{ours.own.gradients:.1e} from the library's own of one document at a time, where {library.bound:.0e} is "
        f"rounding; {remedy}"
    )


def _changed(recipe: Recipe, attention: str, *, packing: bool) -> Recipe:
    """The recipe with this attention and packing."""
    section = recipe.model.model_copy(update={"attention": attention})
    return recipe.model_copy(update={"model": section, "data": recipe.data.model_copy(update={"packing": packing})})


def _is_right(library: LibrarySide, recipe: Recipe, *, by_logits: bool = False) -> bool:
    try:
        model, _ = library.kits_model(recipe)
        computed = library.computed_by(model, recipe, by_logits=by_logits)
    except Exception:  # refused, or the model's own code fails: nothing to propose
        return False
    return library.difference_of(computed).largest <= library.bound


def library_side(
    recipe: Recipe,
    small: SmallModel,
    device: torch.device,
    compute: torch.dtype | None,
    lengths: Sequence[int] = DOCUMENT_LENGTHS,
) -> LibrarySide:
    """The library's own class with eager attention and the recipe's adapters, all of whose weights are drawn.

    Args:
        lengths: Tokens of each document.

    Raises what either library raises.
    """
    like, decoder = kits_model(recipe, small, device)
    embeddings: Any = decoder.get_input_embeddings()
    rows = len(embeddings.weight)
    trust = recipe.model.trust_remote_code
    config = AutoConfig.from_pretrained(small.folder, trust_remote_code=trust)
    base: PreTrainedModel = auto_class(config).from_pretrained(
        small.folder, attn_implementation="eager", dtype=torch.float32, trust_remote_code=trust
    )
    if rows > len(base.get_input_embeddings().weight):  # type: ignore[arg-type]
        base.resize_token_embeddings(rows, mean_resizing=False)
    model: nn.Module = base.to(device)  # type: ignore[arg-type]  # transformers' annotation
    if hasattr(like, "peft_config"):
        from peft import get_peft_model

        model = get_peft_model(base, copy.deepcopy(like.peft_config["default"])).to(device)  # type: ignore[index, arg-type]
    model.load_state_dict(like.state_dict())
    for parameter, other in zip(model.parameters(), like.parameters(), strict=True):
        parameter.requires_grad_(other.requires_grad)
    if hasattr(like, "peft_config"):
        draw_weights(model, trained_alone=True)  # else one of an adapter's matrices is 0
    new = embeddings.token_adapter.token_indices["default"] if hasattr(embeddings, "token_adapter") else ()
    documents = probe_documents(rows, small.special, new, lengths)
    router = router_coefficient(decoder.config, recipe)
    return LibrarySide(small, without_dropout(model), base, documents, device, compute, router)


def kits_model(recipe: Recipe, small: SmallModel, device: torch.device) -> tuple[nn.Module, PreTrainedModel]:
    """The small model as the recipe builds and computes its own, in float32, without quantisation and dropout.

    Returns the model with its adapters, and the decoder inside.
    """
    own = {"name_or_path": str(small.folder), "revision": "main", "adapter": None, "load_in_fp8": False}
    own |= {"rope_scaling": None}  # it is in the small model's own configuration
    section = recipe.model.model_copy(update=own)
    model = build_model(recipe.model_copy(update={"model": section, "quantization": None}), device, dtype=torch.float32)
    decoder = decoder_parts(model)
    compute_layers(model, unpacked_weight)
    return without_dropout(model.float()), decoder


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with all dropout off, because its random numbers would differ between two forwards."""
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
    return model


def probe_documents(
    vocabulary: int, special: frozenset[int], new: Sequence[int] = (), lengths: Sequence[int] = DOCUMENT_LENGTHS
) -> list[TokensAndLabels]:
    """Ids and labels of each document; its first third is a prompt, which is not supervised.

    Args:
        special: Tokens that are no text: an image, padding, an end.
        new: Token rows that are trained by themselves; the first few of them stand in every document.
    """
    text = np.array([token for token in range(vocabulary) if token not in special], np.int64)
    draw = np.random.default_rng(0)
    documents = []
    for length in lengths:
        ids = draw.choice(text, length)
        places = np.arange(1, length, 3)[: len(new)]
        ids[places] = new[: len(places)]
        documents.append((ids, np.where(np.arange(length) < length // 3, IGNORE, ids)))
    return documents


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    """Plain cross-entropy. logits: [tokens, vocabulary]; targets: [tokens]."""
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients of the trained parameters."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def recompute_nothing(decoder: PreTrainedModel) -> None:
    """Keep every layer's activations for backward."""
    for layer in decoder.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = False


def widen(decoder: PreTrainedModel) -> None:
    """Compute in float64, experts one after another: torch's product of all at once knows no float64.

    No layer is recomputed, because backward would recompute in float32 what forward had in float64.
    """
    recompute_nothing(decoder)
    with suppress(ValueError):  # it has no experts
        decoder.set_experts_implementation("eager")
    decoder.double()


class AllInFloat64(TorchFunctionMode):
    """Norms, softmax and the loss, which a model always computes in float32, are computed in float64 too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return value
