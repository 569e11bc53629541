"""4-bit weights as plain parameters and buffers, so that an engine can shard, send and move them.

bitsandbytes keeps the data for unpacking (scales, their scales, code books) in a Python object on the parameter. An
engine that replaces parameters loses it. Here a layer's `weight` becomes an ordinary frozen parameter with packed bytes
in `bnb_4bit_quant_storage`, [packed, 1]. The object's tensors become buffers, repeated on every rank: 8 bits per 64
weights and 32 bits per 256 such scales, 127 MB for Llama 3 8B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from finetune.errors import FinetuneError
from finetune.recipe.schema import Quantization

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel

# The tensors of a QuantState by the names of the buffers they become; the last three only with double quantisation.
TENSORS = {
    "quant_absmax": "absmax",
    "quant_code": "code",
    "quant_offset": "offset",
    "quant_nested_absmax": "state2.absmax",
    "quant_nested_code": "state2.code",
}
BLOCK, NESTED_BLOCK = 64, 256  # weights a scale, scales a second scale: bitsandbytes' own
PIECE = 2**18  # numbers: 5 MiB beside them. Larger pieces leave holes in the heap that glibc does not give back


def quantize_structure(model: PreTrainedModel, config: BitsAndBytesConfig) -> None:
    """Give a model on meta the layers that `from_pretrained` gives the rank with the weights, by the same code."""
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)  # of the new layers, as in from_pretrained
    try:
        quantizer.preprocess_model(model=model, device_map=None)
    finally:
        torch.set_default_dtype(before)
    quantizer.postprocess_model(model)
    refuse_single_blocks(model)


def refuse_single_blocks(model: nn.Module) -> None:
    """Refuse quantised layers of a few inputs and one block of weights, which their model clamps as they are stored:
    Gemma 3n's prediction_coefs, [16, 4]. A gate of a model made small, [1, 32], has more inputs. Raises FinetuneError.
    """
    for path, layer in named_quantized_layers(model):
        if layer.in_features < 8 and (size := layer.in_features * layer.out_features) <= BLOCK:
            raise FinetuneError(
                f"quantization: {path} has {size} weights, which such a model reads as they are stored; "
                "set quantization: null"
            )


def as_quantized(weight: Tensor, quantization: Quantization) -> Tensor:
    """A layer's weight after quantisation: the numbers that the packed ones encode, float32 or as given.

    Computed on its device, by the operations that bitsandbytes' own layers use when they are made.
    """
    from bitsandbytes import functional as bits

    if quantization.load_in_8bit:
        packed, scales, _ = bits.int8_vectorwise_quant(weight.half())
        return bits.int8_vectorwise_dequant(packed, scales)  # type: ignore[no-any-return]
    packed, state = bits.quantize_4bit(
        weight,
        blocksize=BLOCK,
        compress_statistics=quantization.bnb_4bit_use_double_quant,
        quant_type=quantization.bnb_4bit_quant_type,
    )
    return _unpacked(packed, state)


def four_bit_weight(values: Tensor, config: BitsAndBytesConfig) -> Any:
    """bitsandbytes' parameter of values [rows, columns], quantised on their device.

    On a CPU bitsandbytes holds 20 bytes for each number that it quantises, so it gets PIECE of them at a time.
    """
    from bitsandbytes import functional as bits
    from bitsandbytes.nn import Params4bit  # type: ignore[attr-defined]  # which is typed in part

    settings = _settings(config)
    pieces = values.reshape(-1).split(PIECE if values.device.type == "cpu" else values.numel())
    single = settings | {"compress_statistics": False}
    quantized = [bits.quantize_4bit(piece, blocksize=BLOCK, **single) for piece in pieces]
    state = quantized[0][1]
    state.absmax, state.shape = torch.cat([part.absmax for _, part in quantized]), values.shape
    if config.bnb_4bit_use_double_quant:
        state.offset, state.nested = state.absmax.mean(), True
        state.absmax, state.state2 = bits.quantize_blockwise(state.absmax - state.offset, blocksize=NESTED_BLOCK)
    return Params4bit(torch.cat([packed for packed, _ in quantized]), bnb_quantized=True, quant_state=state, **settings)


def four_bit_layer(rows: int, columns: int, weight: nn.Parameter, config: BitsAndBytesConfig) -> Any:
    """bitsandbytes' layer with a weight [rows, columns]: from `four_bit_weight`, or on meta and of as many numbers."""
    from bitsandbytes.nn import Linear4bit, Params4bit  # type: ignore[attr-defined]  # which is typed in part

    with torch.device("meta"):
        make: Any = Linear4bit
        layer = make(columns, rows, False, config.bnb_4bit_compute_dtype, **_settings(config))
    layer.source_cls = nn.Linear  # as transformers notes it
    layer.weight = weight if weight.ndim < 3 else Params4bit(weight.detach().view(rows, columns), **_settings(config))
    return layer


def _settings(config: BitsAndBytesConfig) -> dict[str, Any]:
    keys = {"compress_statistics": "bnb_4bit_use_double_quant"}
    keys |= {key: f"bnb_4bit_{key}" for key in ("quant_type", "quant_storage")}
    return {key: getattr(config, name) for key, name in keys.items()}


def _unpacked(packed: Tensor, state: Any, dtype: torch.dtype | None = None) -> Tensor:
    """The numbers that a packed weight stands for, in its own shape; in its own format where `dtype` is None.

    bitsandbytes 0.50 counts blocks along each row on a CPU, and along the whole weight when it quantises: rows that are
    not whole blocks come out up to 38 % wrong. As a single row they come out right.
    """
    from bitsandbytes import functional as bits

    shape = state.shape
    read_as = shape if _by_rows_is_right(packed.device, shape) else torch.Size((1, shape.numel()))
    kept = state.absmax, read_as, state.code, state.blocksize, state.quant_type
    # Not by copy.copy, which torch 2.11 does not compile.
    state = bits.QuantState(*kept, dtype or state.dtype, state.offset, state.state2)  # type: ignore[no-untyped-call]
    return bits.dequantize_4bit(packed.view(-1, 1), state).view(shape)


def unpacked_weight(layer: Any, dtype: torch.dtype) -> Tensor:
    """A 4-bit layer's weight as it has it now, dequantised: [outputs, inputs]."""
    return _unpacked(layer.weight, _state(layer), dtype)


def _by_rows_is_right(device: torch.device, shape: torch.Size) -> bool:
    """Whether bitsandbytes finds the scales of a weight [outputs, inputs] on this device."""
    return device.type != "cpu" or shape[-1] % BLOCK == 0


def correct_on_cpu(model: nn.Module) -> None:
    """Have 4-bit layers compute by the right scales on a CPU, where bitsandbytes' own forward does not."""
    for layer in quantized_layers(model):
        state = getattr(layer.weight, "quant_state", None)
        if state is not None and not _by_rows_is_right(layer.weight.device, state.shape):
            layer.forward = MethodType(_forward, layer)


def quantized_layers(model: nn.Module) -> Iterator[Any]:
    """Packed experts, and bitsandbytes' layers, 4-bit and 8-bit, inside adapters too; peft's layers around them bear
    the same names.
    """
    return (layer for _, layer in named_quantized_layers(model))


def named_quantized_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The quantised layers, with their paths."""
    modules = model.named_modules()
    return ((path, module) for path, module in modules if is_packed(module) and hasattr(module, "in_features"))


def is_packed(module: nn.Module) -> bool:
    """Whether this is a quantised layer with packed bytes as its weight."""
    return type(module).__module__.startswith("bitsandbytes.") or hasattr(module, "finetune_experts")


def float8_layers(model: nn.Module) -> Iterator[Any]:
    """The layers whose frozen weights are in float8 (architecture/own_layers/float8_linear.py)."""
    return (module for module in model.modules() if hasattr(module, "weight_scale"))


def frozen_weights(model: nn.Module, numel: Callable[[Tensor], int]) -> int:
    """The number of frozen weights. A packed element counts for all weights in it.

    `numel` counts the elements of an unpacked parameter, which an engine may hold in part.
    """
    packed = {id(layer.weight): layer.in_features * layer.out_features for layer in quantized_layers(model)}
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return sum(packed.get(id(parameter)) or numel(parameter) for parameter in frozen)


def packed_experts(model: nn.Module) -> list[Any]:
    """The modules that compute packed experts: peft's outermost wrapper where there is one, else the experts."""
    inside = {id(module.base_layer) for module in model.modules() if hasattr(module, "parameter_name")}
    others = (module for module in model.modules() if id(module) not in inside)
    return [module for module in others if hasattr(experts_of(module), "finetune_transposed")]


def experts_of(module: Any) -> Any:
    """A module without peft's wrappers, one around another for each adapted parameter."""
    while hasattr(module, "parameter_name"):
        module = module.base_layer
    return module


def plain_quantized_weights(model: nn.Module) -> None:
    """Turn each 4-bit weight into a plain parameter and plain buffers, in place. Layers compute the same as before.

    This also works on meta: all tensors get the shapes and formats that quantisation gives them elsewhere. Call it
    after peft, which asks bitsandbytes' parameter for its settings. DoRA and merging ask it too, so they come before,
    or not at all.
    """
    for layer in list(quantized_layers(model)):
        if hasattr(layer, "packing"):  # plain already: a planner's, whose tensors without data have no other form
            continue
        weight = layer.weight
        assert hasattr(weight, "bnb_quantized"), "only 4-bit weights can be made plain"
        state = weight.quant_state if weight.bnb_quantized else empty_quant_state(weight, weight.device)
        packed = weight.detach().as_subclass(Tensor) if weight.bnb_quantized else hollow_weight(weight)
        layer.packing = {key: getattr(state, key) for key in ("shape", "dtype", "blocksize", "quant_type")}
        layer.quant_state = None
        layer.weight = nn.Parameter(packed, requires_grad=False)
        tensors = dict(state_tensors(state))
        for buffer in TENSORS:
            layer.register_buffer(buffer, tensors.get(buffer), persistent=False)
        layer.forward = MethodType(_forward, layer)


def state_tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    """A QuantState's tensors by buffer name. Some exist only under double quantisation."""
    for buffer, place in TENSORS.items():
        holder, _, name = place.rpartition(".")
        tensor = getattr(getattr(state, holder) if holder else state, name, None)
        if tensor is not None:
            yield buffer, tensor


def packing_settings(weight: Any) -> dict[str, Any]:
    """The settings by which bitsandbytes makes a parameter like this one."""
    return {key: getattr(weight, key) for key in ("compress_statistics", "quant_type", "quant_storage")}


def forget_inputs(model: nn.Module) -> None:
    """Drop int8 layers' inputs, which backward does not need because the weights are frozen.

    bitsandbytes 0.50 keeps them as an attribute on autograd's node, not by `save_for_backward`, so activation
    checkpointing does not drop them: 65 GiB for a row with 8192 tokens in Llama 3 70B.
    """
    for layer in quantized_layers(model):
        layer.register_forward_hook(_forget_input)


def _forget_input(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
    node: Any = output.grad_fn
    if hasattr(node, "tensors"):  # on a GPU: the input transposed, its outliers, and itself
        node.tensors = (None,) * len(node.tensors)
    if hasattr(node, "A"):  # on a CPU
        node.A = None


def empty_int8_weights(model: nn.Module) -> None:
    """Give int8 layers on meta the tensors they have after loading, as a plain parameter and a plain buffer.

    For a planner. Outlier columns depend on the data, and here there are none.
    """
    for layer in list(quantized_layers(model)):
        shape = layer.out_features, layer.in_features
        layer.weight = nn.Parameter(torch.empty(shape, dtype=torch.int8, device="meta"), requires_grad=False)
        layer.register_buffer("scales", torch.empty(layer.out_features, device="meta"), persistent=False)
        layer.forward = MethodType(_int8_forward, layer)


def _int8_forward(layer: Any, hidden: Tensor) -> Tensor:
    import bitsandbytes

    layer.state.CB, layer.state.SCB, layer.state.threshold = layer.weight, layer.scales, 0.0
    layer.state.is_training = layer.training
    result: Tensor = bitsandbytes.matmul(hidden, layer.weight, bias=layer.bias, state=layer.state)  # type: ignore[attr-defined]
    return result


def hollow_weight(weight: Any) -> Tensor:
    """The packed form [packed, 1] of a 4-bit parameter that is not quantised, without values."""
    size = (weight.numel() + 1) // 2 // weight.quant_storage.itemsize
    return torch.empty(size, 1, dtype=weight.quant_storage, device=weight.device)


def empty_quant_state(weight: Any, device: torch.device) -> Any:
    """The QuantState that quantising this 4-bit parameter would make, without values."""
    from bitsandbytes.functional import QuantState

    make: Any = QuantState

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    blocks, nested = -(-weight.numel() // BLOCK), None
    if weight.compress_statistics:
        scales = empty(-(-blocks // NESTED_BLOCK))
        nested = make(scales, code=empty(256), blocksize=NESTED_BLOCK, dtype=torch.float32)
    return make(
        empty(blocks, dtype=torch.uint8 if nested else torch.float32),
        shape=weight.shape,
        code=empty(16),
        blocksize=BLOCK,
        quant_type=weight.quant_type,
        dtype=weight.dtype,
        offset=empty() if nested else None,
        state2=nested,
    )


def _state(layer: Any) -> Any:
    """bitsandbytes' object: the parameter's, or built from the layer's buffers."""
    from bitsandbytes.functional import QuantState

    if not hasattr(layer, "packing"):
        return layer.weight.quant_state
    make: Any = QuantState
    nested = None
    if layer.quant_nested_absmax is not None:
        scales, code = layer.quant_nested_absmax, layer.quant_nested_code
        nested = make(scales, code=code, blocksize=NESTED_BLOCK, dtype=torch.float32)
    return make(layer.quant_absmax, code=layer.quant_code, offset=layer.quant_offset, state2=nested, **layer.packing)


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    """bitsandbytes' own forward, with the right scales: [..., in_features] to [..., out_features]."""
    import bitsandbytes

    state, compute = _state(layer), layer.compute_dtype or hidden.dtype
    bias = None if layer.bias is None else layer.bias.to(compute)
    if not _by_rows_is_right(hidden.device, state.shape):
        return nn.functional.linear(hidden.to(compute), _unpacked(layer.weight, state, compute), bias).to(hidden.dtype)
    result: Tensor = bitsandbytes.matmul_4bit(hidden.to(compute), layer.weight, quant_state=state, bias=bias)  # type: ignore[attr-defined]
    node: Any = result.grad_fn
    if hasattr(node, "tensors"):
        node.tensors = _PackedWeight(layer)
    return result.to(hidden.dtype)


class _PackedWeight:
    """The object that bitsandbytes' backward unpacks from its node: nothing, and the layer's packed weight at that
    time.

    bitsandbytes 0.50 keeps the weight itself there. ZeRO-3 gathers a new one for backward, and the old ones would stay
    until then: the unsharded base on every rank.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((None, self._layer.weight.view(-1, 1)))
