"""Puts adapters into a model with peft, and compares the result with the recipe's `lora`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from finetune.architecture.loss import AS_IT_IS, LogitTransform, OwnRows, summed_cross_entropy
from finetune.errors import FinetuneError
from finetune.model.adapter_targets import (
    adapted_paths,
    is_excluded,
    kind_of,
    named_targets,
    names_near,
    refuse_unknown_names,
    resolve_targets,
)
from finetune.model.quantization import packed_experts
from finetune.recipe.schema import Lora


def add_adapters(model: PreTrainedModel, lora: Lora, pure_bf16: bool, new_rows: Sequence[int] = ()) -> nn.Module:
    """Wrap this model, which is changed in place, with peft.

    Args:
        new_rows: Rows of embeddings and head that are trained too, starting from their present values.

    Raises FinetuneError if a name in `lora` means nothing here, or means something else to peft than to the recipe.
    """
    from peft import LoraConfig, get_peft_model  # takes a second, with bitsandbytes: only where adapters are
    from peft.tuners.tuners_utils import BaseTunerLayer

    with experts_as_parameters(model):
        refuse_unknown_names(model, lora)
        targets = resolve_targets(model, lora)
        asked = named_targets(model, lora, targets)
        settings = lora.model_dump(exclude={"loraplus_lr_ratio"})
        settings |= {"target_modules": targets.modules, "target_parameters": targets.parameters or None}
        for key in ("modules_to_save", "exclude_modules"):
            settings[key] = settings[key] or None
        if float(lora.lora_alpha).is_integer():  # peft and those who read its files declare a whole number
            settings["lora_alpha"] = int(lora.lora_alpha)
        if model.device.type == "meta":  # the values come from a rank that has the weights
            settings["init_lora_weights"] = True
        with silenced_peft():
            config = LoraConfig(task_type="CAUSAL_LM", **settings)
        if new_rows:
            config.trainable_token_indices = _places_of_rows(model, lora, asked, new_rows)
        try:
            with silenced_peft():
                adapted = get_peft_model(model, config, autocast_adapter_dtype=not pure_bf16)
        except ValueError as error:
            raise FinetuneError(f"lora: {' '.join(str(error).split())}; correct the section") from error
        if isinstance(model.get_output_embeddings(), BaseTunerLayer):
            raise FinetuneError(
                "lora.target_modules: the head cannot carry an adapter, its logits are never held; "
                "train it in full with lora.modules_to_save: [lm_head]"
            )
        # peft 0.21 takes some names for experts, and leaves out the layers that have them.
        if missing := sorted(asked - set(adapted_paths(adapted)), key=len):
            weights = ", ".join(f"{kind}.weight" for kind in dict.fromkeys(map(kind_of, missing)))
            raise FinetuneError(
                f"lora.target_modules: peft adapts the experts in place of {len(missing)} layers that are named here, "
                f"first {missing[0]}; write all-linear, or name them as lora.target_parameters: [{weights}]"
            )
        _refuse_idle_patterns(lora, adapted_paths(adapted))
        from peft import get_peft_model_state_dict
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

        saved = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        loaded = convert_peft_adapter_state_dict_for_transformers(adapted, adapted.peft_config["default"], dict(saved))
        if lost := sorted(saved.keys() - loaded.keys()):
            raise FinetuneError(
                f"lora: peft would load {len(lost)} tensors of an adapter on {type(model).__name__} under other names "
                f"than it saves, first {lost[0]}; exclude their layers by lora.exclude_modules, or choose another model"
            )
        if new_rows:
            take_new_rows_into_loss(model)
        if pure_bf16:
            _adapters_as_elsewhere(adapted)
        else:  # peft 0.21 makes adapters float32, and leaves its copies of modules_to_save in the base's format
            for parameter in adapted.parameters():
                if parameter.requires_grad and parameter.dtype != torch.float32:
                    parameter.data = parameter.data.float()
    assert isinstance(adapted, nn.Module)
    return adapted


def experts_as_parameters(model: nn.Module) -> AbstractContextManager[None]:
    """Within the block, peft sees packed experts as parameters with their own shapes."""
    if not packed_experts(model):
        return nullcontext()
    from finetune.model.packed_experts import experts_by_shape

    return experts_by_shape(model)


def _places_of_rows(model: PreTrainedModel, lora: Lora, named: set[str], rows: Sequence[int]) -> dict[str, list[int]]:
    """peft's `trainable_token_indices`: rows of the embeddings, and of the head if it is not tied to them.

    Raises FinetuneError if peft would train them differently, or leave something out.
    """
    embeddings: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    paths = {id(module): path for path, module in model.named_modules()}
    ends = [paths[id(end)] for end in (embeddings, head)]
    tied = embeddings.weight is head.weight
    for path in ends:
        if path in named or is_excluded(lora.model_copy(update={"exclude_modules": []}), path):
            key = "target_modules" if path in named else "modules_to_save"
            name = path.rpartition(".")[2]
            raise FinetuneError(
                f"lora.{key}: names {name}, whose new rows model.add_tokens trains; leave {name} out, or train all "
                "weights (lora: null)"
            )
    if head.bias is not None:  # peft's forward of new rows has no bias
        raise FinetuneError(
            f"model.add_tokens: the head of {type(model).__name__} has a bias, which peft leaves out beside new rows; "
            "train all weights (lora: null), or choose another model"
        )
    if tied != bool(model.config.get_text_config().tie_word_embeddings):
        raise FinetuneError(
            f"model.add_tokens: {type(model).__name__} has a head that is{'' if tied else ' not'} tied to its "
            "embeddings, and its configuration, which peft reads, says otherwise; train all weights (lora: null)"
        )
    return {path: list(rows) for path in (ends[:1] if tied else ends)}


def take_new_rows_into_loss(model: Any) -> None:
    """Compute the loss with the new rows, if the head has some.

    peft's own forward would copy the head [vocabulary, hidden] and its gradient for each micro-batch.
    """
    from peft.utils.other import TrainableTokensWrapper

    head: Any = model.get_output_embeddings()
    if not issubclass(type(head), TrainableTokensWrapper):
        return
    rows = head.token_adapter.token_indices[head.active_adapters[0]]
    head.register_buffer("new_rows", torch.tensor(rows, device=head.original_module.weight.device), persistent=False)
    head.forward = MethodType(_head_forward, head)


def _head_forward(
    head: Any,
    hidden: Tensor,
    shift_labels: Tensor | None = None,
    supervised: Tensor | None = None,
    transform: LogitTransform = AS_IT_IS,
    answer_lengths: Sequence[int] | None = None,
) -> Tensor:
    """The forward for peft's wrapper around the head, as architecture/loss.py has it for a plain head."""
    if shift_labels is None:
        logits: Tensor = type(head).forward(head, hidden)
        return logits
    layer, own = head.original_module, None
    if not head.disable_adapters:
        own = OwnRows(head.new_rows, head.token_adapter.trainable_tokens_delta[head.active_adapters[0]])
    return summed_cross_entropy(
        hidden, layer.weight, shift_labels, layer.bias, supervised, transform, own, answer_lengths
    )


def _refuse_idle_patterns(lora: Lora, adapted: list[str]) -> None:
    """Raise FinetuneError for a key that fits no adapter, or that fits only without peft's `.weight`."""
    mistakes = []
    for place, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for key in patterns:
            fits = re.compile(rf"(.*\.)?({key})$")
            weights = [path for path in adapted if path.endswith(".weight") and not fits.match(path)]
            if missed := [path for path in weights if fits.match(path.removesuffix(".weight"))]:
                mistakes.append(
                    f"lora.{place}: {key} does not fit {missed[0]}, which has its adapter as a parameter; "
                    f'write "({key})(\\\\.weight)?"'
                )
            elif not any(map(fits.match, adapted)):
                mistakes.append(
                    f"lora.{place}: {key} matches none of the adapters; {names_near(key, map(kind_of, adapted))}"
                )
    if mistakes:
        raise FinetuneError("\n".join(mistakes))


def _adapters_as_elsewhere(adapted: nn.Module) -> None:
    """Give adapters on meta the number format that peft gives them on a rank with weights: the adapted weight's format,
    or a 4-bit layer's compute format. peft 0.21 leaves meta out, and ranks would disagree on their shards.
    """
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in adapted.modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        base: Any = layer.get_base_layer()
        weight: Any = layer.get_param() if isinstance(layer, ParamWrapper) else base.weight
        dtype = getattr(base, "compute_dtype", weight.dtype)
        if weight.device.type == "meta" and dtype.is_floating_point:
            for name, parameter in layer.named_parameters():
                if parameter.requires_grad and not name.startswith("base_layer."):
                    parameter.data = parameter.data.to(dtype)


@contextmanager
def silenced_peft() -> Iterator[None]:
    """Within the block, hide peft 0.21's warnings that a user cannot act on. It asks transformers 5.2x by a deprecated
    name, and looks for ranks of parameters among modules alone. Our own check looks among both.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        warnings.filterwarnings("ignore", message="Unsupported layer type")
        warnings.filterwarnings("ignore", message="Using Rank-Stabilized LoRA with rank_pattern")
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # GPT-2's layers; peft sets it
        yield
