"""Builds the model: base weights, quantisation, adapters and checkpointing. Its forward returns the summed loss.

adapters.py makes adapters, finished_run.py loads them again, and hand_over/merged_weights.py merges them. A method
(full, LoRA, QLoRA) is a way to build a model. The loop does not see which one it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from finetune.architecture import attention
from finetune.architecture.families import refuse_unsuitable
from finetune.architecture.recomputation import checkpoint_layers
from finetune.base.location import folder_of, resolve_model_path
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.files import loading_in_this_thread
from finetune.library_errors import library_errors, not_loaded
from finetune.model.adapter_targets import has_experts, language_model_path
from finetune.model.dtypes import widening
from finetune.model.new_tokens import add_rows
from finetune.model.quantization import (
    correct_on_cpu,
    forget_inputs,
    quantize_structure,
    quantized_layers,
    refuse_single_blocks,
)
from finetune.model.stored_structure import as_stored, fetch_weights
from finetune.model.text_part import auto_class, remember_whole, text_alone, trained_config
from finetune.recipe.schema import Quantization, Recipe
from finetune.untrusted.config_sizes import MXFP4, stored_format
from finetune.untrusted.model_folder import look_at_config, look_at_model
from finetune.wording import install_command

Load = Callable[..., PreTrainedModel]


def build_model(
    recipe: Recipe,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    load: Load | None = None,
    config: PreTrainedConfig | None = None,
) -> nn.Module:
    """The model that the recipe trains, on `device`, ready for its first forward.

    Args:
        dtype: The base weights' number format; None: as the recipe trains them.
        load: Called in place of `load_base`, with the same arguments.
        config: The base's configuration, on meta; None: it is read from the base's files.

    With `shift_labels` its forward returns the summed float32 loss, a scalar, and nothing else; without them it is
    the library's own forward. On device "meta" no weights are read: the same structure, to be filled by a rank that
    has them. Raises FinetuneError when weights are missing, unexpected or not safetensors, and EnvironmentMismatch
    when they cannot be reached.
    """
    # A base that will be in float8 waits in host memory, so that the device never holds it in 16 bits.
    loaded_on = torch.device("cpu") if recipe.model.load_in_fp8 else device
    if device.type == "meta":
        model = structure_alone(recipe, dtype, config)
    else:
        model = (load or load_base)(recipe, loaded_on, dtype=dtype)
    rows = add_rows(model, recipe.model)
    refuse_unsuitable(model, recipe).taught_to(model)
    if recipe.quantization is not None and recipe.quantization.load_in_8bit:
        forget_inputs(model)
    adapted: nn.Module = model
    if recipe.lora is None and language_model_path(model):
        raise FinetuneError(
            f"lora: {type(model).__name__} has parts for images, which rows of text do not train, and transformers has "
            "no class for its text part by itself; train it with adapters: lora: {}"
        )
    if recipe.lora is not None:
        from finetune.model.adapters import add_adapters

        torch.manual_seed(recipe.training.seed)  # every rank draws the same adapters
        with torch.device("meta" if model.device.type == "meta" else "cpu"):  # a GPU draws other numbers by a seed
            adapted = add_adapters(model, recipe.lora, recipe.training.pure_bf16, rows)
    if recipe.model.load_in_fp8:  # after peft, which reads weights and their number format
        from finetune.architecture.own_layers.float8_linear import use_float8

        use_float8(model, device, without=model.get_output_embeddings())
    if every := recipe.training.recompute_every:
        # After peft, which else makes the embeddings' output require a gradient, as reentrant checkpointing would need.
        checkpoint_layers(model, every, keep_products=recipe.training.keeps_products)
    if recipe.training.activation_offloading:
        from finetune.architecture.offloading import offload_hidden_states

        offload_hidden_states(model)
    return adapted.to(device)


def refuse_early(recipe: Recipe, config: PreTrainedConfig | None = None) -> tuple[PreTrainedModel, nn.Module]:
    """Build the model on meta, before weights are read and data prepared. Raises what `build_model` would raise about
    the architecture and the names in `lora`. It takes 1 s of CPU time for Llama 8B with adapters.

    Args:
        config: The base's configuration; None: it is read from the base's files.

    Returns the base, not quantised, with eager attention, because every architecture supports that; and the model.
    """
    if config is None:
        with library_errors(partial(_not_built, recipe, "configuration", recipe.model.name_or_path)):
            config = configuration(recipe)
    section = recipe.model.model_copy(update={"attention": "eager"})
    plain = structure_alone(recipe.model_copy(update={"model": section, "quantization": None}), config=config)
    refuse_unsuitable(plain, recipe)
    widening(config, recipe)
    return plain, build_model(recipe, torch.device("meta"), config=config)


def attention_name(recipe: Recipe) -> str:
    """transformers' name of the attention that the recipe asks for, `auto` resolved."""
    if recipe.model.attention == "auto":
        return attention.NAME
    return recipe.model.attention


def decoder_parts(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside an adapter's wrapping, or the model itself."""
    inner = model if isinstance(model, PreTrainedModel) else model.get_base_model()  # type: ignore[operator]  # peft's
    assert isinstance(inner, PreTrainedModel)
    return inner


def load_base(
    recipe: Recipe,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    path: str | None = None,
    quantise_on: torch.device | None = None,
) -> PreTrainedModel:
    """The library's model with the recipe's base weights, quantised if the recipe says so. For a multimodal base, its
    text part.

    Args:
        dtype: The weights' format; None: as the recipe trains them.
        path: A folder with other weights for this architecture.
        quantise_on: Quantises experts for a model in host memory; None: the host does.

    Raises FinetuneError if weights are missing, unexpected or not safetensors.
    """
    section = recipe.model
    options = _common_options(recipe, dtype) | {"use_safetensors": True, "output_loading_info": True}
    if recipe.quantization:
        # Without a device map transformers quantises on this rank's GPU, also what is to be sharded from the host.
        options |= {"device_map": {"": str(device)}}
    elif device.type == "cuda" and not is_deepspeed_zero3_enabled():  # which shards on the device what it reads
        options["device_map"] = {"": str(device)}  # each tensor straight from its file, none through host memory
    name, folder = path or section.name_or_path, path or resolve_model_path(section.name_or_path)
    if path is None and folder_of(folder, section.revision) is not None:
        fetch_weights(section)  # their ties are read before the model is built
    if (files := folder_of(folder, section.revision)) is not None:
        look_at_model(files, whole=Path(folder).is_dir())
    with library_errors(partial(_not_built, recipe, "weights", name)):
        config = configuration(recipe, path)
        if recipe.quantization:
            options["quantization_config"] = bitsandbytes_config(recipe.quantization, config, quantise_on)
        if (widened := widening(config, recipe)) is not None:
            options["quantization_config"] = widened
        elif stored_format(config.to_dict()) == MXFP4:  # transformers would read it by its own quantizer
            del config.quantization_config
        elif getattr(config, "quantization_config", None):  # the recipe's, which transformers would warn of
            options.pop("quantization_config", None)
        text_only = trained_config(config) is not config
        if text_only:  # other parts may not have the attention that the text gets below
            options["attn_implementation"] = "eager"
        # A mixture's parameters are large: 0.4 GB each in Qwen3-30B-A3B.
        in_turn = loading_in_this_thread() if recipe.quantization and has_experts(config) else nullcontext()
        with in_turn:
            model, info = auto_class(config).from_pretrained(
                folder, revision=section.revision, config=config, **options
            )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if names := sorted(map(str, info.get(kind) or ())):
                raise FinetuneError(
                    f"model.name_or_path: {name}: {len(names)} {kind.replace('_', ' ')}, first {names[0]}; "
                    "these weights are not those of this architecture"
                )
        if text_only:
            model = text_alone(model, options.get("quantization_config"))
            model.set_attn_implementation(attention_name(recipe))
    assert isinstance(model, PreTrainedModel)
    if recipe.quantization:
        check_quantized(model)
    model.config.use_cache = False
    return model


def structure_alone(
    recipe: Recipe, dtype: torch.dtype | None = None, config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """The base model on meta, built from its configuration, with the quantised layers that the recipe asks for.

    Args:
        config: The base's configuration, which stays as it is; None: it is read from the base's files.
    """
    with library_errors(partial(_not_built, recipe, "configuration", recipe.model.name_or_path)):
        config = configuration(recipe) if config is None else copy.deepcopy(config)
        trained = trained_config(config)
        kind = auto_class(trained)
        settings = bitsandbytes_config(recipe.quantization, trained) if recipe.quantization else None
        if hasattr(config, "quantization_config"):  # of the files: what is loaded of them has it no more
            del config.quantization_config
        with torch.device("meta"):
            model = kind.from_config(trained, **_common_options(recipe, dtype))
    assert isinstance(model, PreTrainedModel)
    remember_whole(model, config)
    if settings is not None:
        quantize_structure(model, settings)
    model.config.use_cache = False
    return model


def configuration(recipe: Recipe, path: str | None = None) -> PreTrainedConfig:
    """The base's configuration from its files, or from those in `path`, after checks.

    If the weights are on this machine, they decide the ties (stored_structure.py). Raises transformers' errors.
    """
    section, source = recipe.model, path or resolve_model_path(recipe.model.name_or_path)
    if (files := folder_of(source, section.revision)) is not None:
        look_at_config(files)
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        source, revision=section.revision, trust_remote_code=section.trust_remote_code
    )
    config = as_stored(config, section, path)
    if section.rope_scaling is not None:
        from finetune.model.rope_scaling import scale_rope

        scale_rope(config, section.rope_scaling)
    return config


def _common_options(recipe: Recipe, dtype: torch.dtype | None) -> dict[str, Any]:
    section = recipe.model
    attention.register()
    trained_in = torch.bfloat16 if recipe.training.pure_bf16 else torch.float32
    return {
        "dtype": dtype or (getattr(torch, section.dtype) if recipe.lora else trained_in),
        "attn_implementation": attention_name(recipe),
        "trust_remote_code": section.trust_remote_code,
    }


def bitsandbytes_config(
    quantization: Quantization, config: PreTrainedConfig, quantise_on: torch.device | None = None
) -> BitsAndBytesConfig:
    """The recipe's section for `from_pretrained`; for a mixture, with its experts.

    Args:
        quantise_on: Quantises experts for a model in host memory; None: the host does.

    Raises EnvironmentMismatch where bitsandbytes is not installed.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        remedy = f"install it in the checkout: {install_command('qlora')}"
        raise EnvironmentMismatch(f"quantization: bitsandbytes is not installed; {remedy}") from error
    settings = BitsAndBytesConfig(
        load_in_4bit=quantization.load_in_4bit,
        load_in_8bit=quantization.load_in_8bit,
        bnb_4bit_quant_type=quantization.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=quantization.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=getattr(torch, quantization.bnb_4bit_compute_dtype),
        bnb_4bit_quant_storage=getattr(torch, quantization.bnb_4bit_quant_storage),
    )
    if quantization.load_in_8bit or not has_experts(config):
        return settings
    from finetune.model.packed_experts import for_experts

    return for_experts(settings, stored_format(config.to_dict()), quantise_on)


def check_quantized(model: PreTrainedModel, ready: Callable[[Any], Any] = lambda mixer: mixer) -> None:
    """Keep quantised weights as they were loaded, and check that only their layers read them.

    Args:
        ready: Returns a module whose layers can compute, for one whose layers cannot yet.

    On a CPU with AVX512-BF16, bitsandbytes 0.50's first evaluation repacks every 4-bit weight permanently and rounds
    its scales to bfloat16. Training would continue from other weights (tests/model/test_quantization.py). Raises
    EnvironmentMismatch.
    """
    for layer in quantized_layers(model):
        layer.support_avx512bf16_for_cpu = False
    correct_on_cpu(model)
    refuse_single_blocks(model)
    packed = set(quantized_layers(model))
    if packed & {model.get_input_embeddings(), model.get_output_embeddings()}:
        raise EnvironmentMismatch(
            "quantization: embeddings or head were quantised, which the fused loss does not know; choose another "
            "model, or quantization: null"
        )
    # A state-space mixer may multiply a layer's weights itself: Mamba's dt_proj. One mixer of each class runs.
    modules: Iterable[Any] = model.modules()
    mixers = [mixer for mixer in modules if all(hasattr(mixer, name) for name in ("A_log", "D", "in_proj"))]
    for mixer in {type(mixer): mixer for mixer in mixers if packed.intersection(mixer.children())}.values():
        tokens = torch.zeros(1, 2, mixer.in_proj.in_features, dtype=model.dtype, device=model.device)
        try:
            with torch.no_grad(), suppress(TypeError):  # it asks for more than hidden states: not Mamba's
                ready(mixer)(tokens)
        except RuntimeError as error:
            raise EnvironmentMismatch(
                f"quantization: {type(mixer).__name__} reads the packed weights of its layers past their forward "
                f"({' '.join(str(error).split())[:80]}); set quantization: null"
            ) from error


def _not_built(recipe: Recipe, what: str, name: str, error: Exception) -> FinetuneError:
    """The error line for a model that cannot be built. Falcon and GPT-J raise KeyError for unknown attentions."""
    if isinstance(error, KeyError) and error.args == (attention_name(recipe),):
        return FinetuneError(
            f"model.attention: {name} has no {error}; set model.attention: eager and data.packing: false"
        )
    return not_loaded(what, name, error)
