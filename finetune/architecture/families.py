"""Finds which architectures train correctly, by a trial without data (trial.py) and not by a list of names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.architecture import attention
from finetune.architecture.by_document import Mixer, run_by_document
from finetune.architecture.loss import AS_IT_IS, LogitTransform, put_loss_into_forward
from finetune.architecture.operations import Unsuitable
from finetune.architecture.rotary import rotate_by_document
from finetune.architecture.router_loss import RouterLoss, keep_routers_from_autocast
from finetune.architecture.trial import (
    TRIED,
    check_documents_isolated,
    check_head_is_last,
    check_masks_isolate,
    experts_chosen,
)
from finetune.errors import FinetuneError
from finetune.recipe.schema import Recipe


@dataclass(frozen=True)
class DocumentLayout:
    """How documents come to the model."""

    attention: str  # transformers' name
    packing: bool  # several documents in a row

    @property
    def isolated(self) -> bool:
        """One flat row, its documents isolated by the kit's own attention."""
        return self.attention == attention.NAME


@dataclass(frozen=True)
class Computed:
    """A trial's result: the reason why this architecture cannot be trained, or what correct training needs."""

    problem: str | None = None
    logits: LogitTransform = AS_IT_IS
    mixers: tuple[Mixer, ...] = ()  # modules to be run on one document after another
    router: RouterLoss | None = None

    def taught_to(self, model: PreTrainedModel) -> None:
        """Put the summed loss into the model's forward. Its mixers and rotations respect documents then, and routers
        keep their number format.
        """
        put_loss_into_forward(model, self.logits, self.router)
        run_by_document(model, self.mixers)
        rotate_by_document(model)
        keep_routers_from_autocast(model, model.config.get_text_config().to_dict())


def refuse_unsuitable(model: PreTrainedModel, recipe: Recipe) -> Computed:
    """Raise FinetuneError, in one line with its remedy, if this architecture cannot be trained correctly as asked.

    It looks at the model's class and configuration only, so weights may be on meta. Returns the settings that the
    forward needs.
    """
    name = type(model).__name__
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise FinetuneError(f"model.name_or_path: {name} has no linear head; choose a causal model")
    requested = recipe.model.attention
    layout = DocumentLayout(attention.NAME if requested == "auto" else requested, recipe.data.packing)
    if layout.attention == "flash_attention_2" and layout.packing and recipe.training.rows_at_once > 1:
        raise FinetuneError(
            "model.attention: flash_attention_2 separates packed documents in a single row only; "
            "set training.per_device_batch_size: 1, or model.attention: auto"
        )
    tried = _Tried(model)
    computed = computed_in_layout(tried, layout)
    if computed.problem:
        raise FinetuneError(f"model.name_or_path: {name} {computed.problem}; {_remedy(tried, layout)}")
    coefficient = router_coefficient(model.config, recipe)
    if not coefficient:
        return computed
    chosen = chosen_in(tried)
    if isinstance(chosen, str):
        raise FinetuneError(
            f"model.router_aux_loss_coef: {coefficient:g}: {name} {chosen}; set model.router_aux_loss_coef: 0"
        )
    return replace(computed, router=RouterLoss(coefficient, chosen))


def router_coefficient(config: PreTrainedConfig, recipe: Recipe) -> float:
    """The auxiliary loss coefficient for routers: the recipe's, else the model's own if it sets `output_router_logits:
    true`, with which transformers adds that loss. 0 for preferences: a forward for sums by answer adds none, and
    training/batch_notes.py says so.
    """
    if recipe.preferences is not None:
        return 0.0
    if recipe.model.router_aux_loss_coef is not None:
        return recipe.model.router_aux_loss_coef
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False):
        return float(getattr(text, "router_aux_loss_coef", 0) or 0)
    return 0.0


def _remedy(tried: _Tried, layout: DocumentLayout) -> str:
    """The first layout that passes the same trial."""
    for packing in (True, False) if layout.packing else (False,):
        for kind in ("sdpa", "eager"):
            if computed_in_layout(tried, DocumentLayout(kind, packing)).problem is None:
                settings = [f"model.attention: {kind}"] * (kind != layout.attention)
                settings += ["data.packing: false"] * (packing != layout.packing)
                return f"set {' and '.join(settings)}"
    return "choose another model"


class _Tried:
    """An architecture as a key of a cache: equal where class and configuration are."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.kind: Callable[[PreTrainedConfig], PreTrainedModel] = type(model)
        self.config = model.config
        self.text = model.config.to_json_string(use_diff=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tried) and (self.kind, self.text) == (other.kind, other.text)

    def __hash__(self) -> int:
        return hash(self.text)


@lru_cache(maxsize=64)
def chosen_in(tried: _Tried) -> int | str:
    """The experts that a router chooses for a token, or why there is no auxiliary loss of it."""
    try:
        return experts_chosen(tried.kind, tried.config)
    except Unsuitable as fault:
        return str(fault)
    except Exception as error:  # whatever a model's own code raises
        text = " ".join(str(error).split())[:200]
        return f"does not give its router's logits ({type(error).__name__}: {text})"


@lru_cache(maxsize=64)  # a planner builds the same model many times
def computed_in_layout(tried: _Tried, layout: DocumentLayout) -> Computed:
    """The needs of this architecture in this layout, or the reason why it cannot be trained."""
    kind, config = tried.kind, tried.config
    mixers: tuple[Mixer, ...] = ()
    try:
        alone = layout.isolated or layout.packing
        if alone:
            mixers = check_documents_isolated(kind, config, isolated=layout.isolated)
        if not layout.isolated and layout.packing:
            check_masks_isolate(kind, config)
        logits = check_head_is_last(kind, config, None if layout.isolated else layout.attention, decoder_ran=alone)
    except Unsuitable as fault:
        return Computed(str(fault))
    except FinetuneError as refusal:  # of the attention; the remedy is found here
        return Computed(f"cannot be trained: {str(refusal).removeprefix('model.attention: ').partition(';')[0]}")
    except Exception as error:  # whatever a model's own code raises: it is not trained, and the user gets one line
        text = " ".join(str(error).split())[:200].replace(TRIED, layout.attention)
        return Computed(f"does not run with model.attention: {layout.attention} ({type(error).__name__}: {text})")
    return Computed(logits=logits, mixers=mixers)
