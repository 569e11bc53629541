"""Which architectures are trained rightly is found by a trial without data (trial.py), and not by a list of names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.architecture import attention
from finetune.architecture.trial import (
    TRIED,
    Unsuitable,
    check_documents_isolated,
    check_head_is_last,
    check_masks_isolate,
)
from finetune.errors import FinetuneError
from finetune.recipe.schema import Recipe

# Settings under which the logits are not simply the head applied to the last hidden state.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "output_multiplier_scale")


@dataclass(frozen=True)
class DocumentLayout:
    """How documents come to the model."""

    attention: str  # transformers' name
    packing: bool  # several documents in a row

    @property
    def isolated(self) -> bool:
        """One flat row, its documents isolated by the kit's own attention."""
        return self.attention == attention.NAME


def refuse_unsuitable(model: PreTrainedModel, recipe: Recipe) -> None:
    """Raise FinetuneError, in one line with its remedy, where the recipe would train something else than it seems to.

    Only the model's class and configuration are looked at, so its weights may be on meta.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    for key in LOGIT_TRANSFORMS:
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise FinetuneError(
                f"model.name_or_path: {name} changes its logits by {key}, which the fused loss does not know; "
                "choose a model without it"
            )
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise FinetuneError(f"model.name_or_path: {name} has no linear head; choose a causal model")
    requested = recipe.model.attention
    layout = DocumentLayout(attention.NAME if requested == "auto" else requested, recipe.data.packing)
    if layout.isolated and getattr(config, "attention_dropout", None):
        raise FinetuneError("model.attention: this model has attention dropout; set model.attention: sdpa")
    if layout.attention == "flash_attention_2" and layout.packing and recipe.training.per_device_batch_size > 1:
        raise FinetuneError(
            "model.attention: flash_attention_2 separates packed documents in a single row only; "
            "set training.per_device_batch_size: 1, or model.attention: auto"
        )
    tried = _Tried(model)
    if problem := problem_of_layout(tried, layout):
        raise FinetuneError(f"model.name_or_path: {name} {problem}; {_remedy(tried, layout)}")


def _remedy(tried: _Tried, layout: DocumentLayout) -> str:
    """The first layout that passes the same trial."""
    for packing in (True, False) if layout.packing else (False,):
        for kind in ("sdpa", "eager"):
            if problem_of_layout(tried, DocumentLayout(kind, packing)) is None:
                settings = [f"model.attention: {kind}"] if kind != layout.attention else []
                settings += ["data.packing: false"] if packing != layout.packing else []
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


@lru_cache(maxsize=64)  # a planner builds the same model many times
def problem_of_layout(tried: _Tried, layout: DocumentLayout) -> str | None:
    """What is wrong with training this architecture in this layout, None where nothing is."""
    kind, config = tried.kind, tried.config
    try:
        if layout.isolated or layout.packing:
            check_documents_isolated(kind, config, isolated=layout.isolated)
        if not layout.isolated and layout.packing:
            check_masks_isolate(kind, config)
        check_head_is_last(kind, config, None if layout.isolated else layout.attention)
    except Unsuitable as found:
        return str(found)
    except FinetuneError as refusal:  # of the attention; the remedy is found here
        return f"cannot be trained: {str(refusal).removeprefix('model.attention: ').partition(';')[0]}"
    except Exception as error:  # whatever a model's own code raises: it is not trained, and the user gets one line
        text_of_error = " ".join(str(error).split())[:200].replace(TRIED, layout.attention)
        return f"does not run with model.attention: {layout.attention} ({type(error).__name__}: {text_of_error})"
    return None
