"""A mixture's experts, frozen in 4 bits.

transformers 5 holds a layer's experts as parameters of three dimensions, which its 4-bit loading leaves in 16 bits.
Here each becomes a 4-bit layer of bitsandbytes, a child of the experts' module by the parameter's name. So everything
that knows 4-bit layers knows experts: sharding, planning, receipts, merging. Nobody calls that layer. The experts'
forward reads its weight:

    forward    y = grouped product (tokens sorted by expert, W)     W = dequantised, freed at once
    backward   dx = grouped product (dy, W transposed)              W = dequantised again

So autograd keeps no weight. Gate and up of Qwen3-30B-A3B's 128 experts take 0.8 GB in bfloat16 meanwhile. The host
reads no number of tokens where torch has a grouped product.

The last product keeps nothing for backward, because the router's weights are applied to its input, [tokens, ffn], not
to its output, [tokens, hidden]. A recomputed layer ends before it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from finetune.architecture.attention import AMPERE
from finetune.errors import FinetuneError
from finetune.model.adapter_targets import expert_parameters
from finetune.model.quantization import (
    experts_of,
    four_bit_layer,
    four_bit_weight,
    packed_experts,
    unpacked_weight,
)
from finetune.untrusted.config_sizes import MXFP4

METHOD = "finetune_experts"  # transformers' name of the quantizer below
MXFP4_GROUP = 32  # numbers of one scale
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
RANK_MULTIPLE = 8  # grouped products take rows of whole 16 bytes
LARGEST_OF_COPY = 1e-4  # of a small copy, in float32, from the library's own forward

ExpertsShape = tuple[int, int, int]
WeightOf = Callable[[torch.dtype], Tensor]  # [experts, inputs, outputs] in that format
Adapter = tuple[Tensor, Tensor, float]  # [experts, inputs, rank], [experts, rank, outputs], scale


class Quantizer(Bnb4BitHfQuantizer):
    """transformers' 4-bit quantizer, which takes experts too. It reads, joins and quantises one parameter at a time."""

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        path, _, name = param_name.rpartition(".")
        if name in PROJECTIONS and getattr(model.get_submodule(path), name).ndim == 3:
            return True
        return bool(super().param_needs_quantization(model, param_name, **kwargs))

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantise(self, super().get_quantize_ops())  # type: ignore[no-untyped-call]  # transformers'

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        pack_experts(model, self.quantization_config)
        return super()._process_model_after_weight_loading(model, **kwargs)

    def get_weight_conversions(self) -> list[Any]:
        conversions = list(super().get_weight_conversions())  # type: ignore[no-untyped-call]
        if vars(self.quantization_config)["experts_stored"] == MXFP4:
            for name in ("gate_up_proj", "down_proj"):
                keep = _KeepMxfp4(self.quantization_config)
                conversions.append(WeightConverter([f"{name}_blocks", f"{name}_scales"], name, [keep]))
        return conversions


class _KeepMxfp4(ConversionOps):
    """Joins the bytes of MXFP4's blocks and of their scales, as the file has them."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def convert(self, input_dict: Any, *_: Any, full_layer_name: Any = None, **__: Any) -> Any:
        parts = [value[0] if isinstance(value, list) else value for _, value in sorted(input_dict.items())]
        count, outputs, groups, _size = parts[0].shape
        # transformers has cast the bytes to the model's format, in which 0 to 255 are exact.
        packed = torch.cat([part.to(torch.uint8).flatten() for part in parts])
        weight: Any = nn.Parameter(packed.view(self.config.bnb_4bit_quant_storage)[:, None], requires_grad=False)
        weight.finetune_experts = count, groups * MXFP4_GROUP, outputs
        return {full_layer_name: weight}


class Mxfp4Experts(nn.Module):
    """A frozen weight [experts, inputs, outputs] in MXFP4, as gpt-oss is stored: numbers of 4 bits (sign, two bits of
    exponent, one of mantissa), and a power of two for each 32 inputs.

        weight     [packed, 1] in `storage`: blocks [experts, outputs, groups, 16 bytes], then scales [.., groups]
        a byte     the number at an even place in its low half, the next one in its high half
    """

    def __init__(self, shape: ExpertsShape, weight: Tensor, config: Any) -> None:
        super().__init__()
        count, inputs, outputs = self.finetune_experts = shape
        self.in_features, self.out_features = outputs, count * inputs
        if weight.ndim == 3:  # a structure's, without values
            size = count * outputs * (inputs // 2 + inputs // MXFP4_GROUP) // config.bnb_4bit_quant_storage.itemsize
            weight = torch.empty(size, 1, dtype=config.bnb_4bit_quant_storage, device=weight.device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.compute_dtype = config.bnb_4bit_compute_dtype
        self.packing = {"dtype": self.compute_dtype, "quant_type": MXFP4}  # as that of 4-bit layers that are plain

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """[experts, inputs, outputs], one expert after another: a lookup has 4 bytes an index."""
        count, inputs, outputs = self.finetune_experts
        packed, numbers = self.weight.view(torch.uint8).flatten(), count * outputs * inputs
        blocks, scales = packed.split([numbers // 2, numbers // MXFP4_GROUP])
        byte = torch.arange(256, device=packed.device)
        code = torch.stack([byte & 15, byte >> 4], 1)
        exponent, half = (code >> 1) & 3, (code & 1) / 2
        size = torch.where(exponent == 0, half, (1 + half) * torch.exp2(exponent - 1.0))  # 0, 0.5, 1, 1.5, 2, 3, 4, 6
        pairs = torch.where(code >= 8, -size, size)  # [256, 2], by byte
        result = torch.empty(count, outputs, inputs, dtype=dtype, device=packed.device)
        for own, block, scale in zip(result, blocks.chunk(count), scales.chunk(count), strict=True):
            power = (scale.int() << 23).view(torch.float32)  # float32's own exponent: 2 ** (scale - 127)
            own.view(-1, MXFP4_GROUP).copy_(pairs[block.int()].view(-1, MXFP4_GROUP) * power[:, None])
        return result.transpose(1, 2)


class _Quantise(ConversionOps):
    """Quantises a parameter with its values, on `quantise_on` if the configuration names a device, else where it is."""

    def __init__(self, hf_quantizer: Any, of_layers: Any) -> None:
        self.config, self.of_layers = hf_quantizer.quantization_config, of_layers

    def convert(self, input_dict: Any, *places: Any, model: Any = None, **kwargs: Any) -> Any:
        quantised = {}
        for name, value in input_dict.items():  # several, if a stored tensor holds several parameters
            value = value[0] if isinstance(value, list) else value
            held_on = value.device
            on_device = value.to(getattr(self.config, "quantise_on", None) or held_on)
            if hasattr(value, "finetune_experts"):  # MXFP4
                quantised[name] = value
            elif name.rpartition(".")[2] in PROJECTIONS and value.ndim == 3:
                quantised[name] = four_bit_weight(on_device.flatten(0, 1), self.config).to(held_on)
                quantised[name].finetune_experts = tuple(value.shape)
            else:
                converted = self.of_layers.convert({name: on_device}, *places, model=model, **kwargs)
                quantised |= {path: weight.to(held_on) for path, weight in converted.items()}
        return quantised


def for_experts(
    config: BitsAndBytesConfig, stored: str | None, quantise_on: torch.device | None = None
) -> BitsAndBytesConfig:
    """The settings with which transformers quantises experts too.

    Args:
        stored: The format with scales that the files have. MXFP4 stays as it is.
        quantise_on: The device that quantises a model which is loaded into host memory; None: the CPU.
    """
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(Quantizer)
    config.quant_method = METHOD  # type: ignore[assignment]  # transformers' enumeration names its own alone
    config.experts_stored = stored  # type: ignore[attr-defined]
    if quantise_on is not None:
        config.quantise_on = str(quantise_on)  # type: ignore[attr-defined]  # transformers writes it as JSON
    return config


def pack_experts(model: PreTrainedModel, config: Any) -> None:
    """Make the experts' parameters 4-bit layers, in place. Values that are quantised already stay; others are on meta.

    Raises FinetuneError for experts that compute in an unknown way.
    """
    modules: dict[str, dict[str, ExpertsShape]] = {}
    quantised = {name: weight for name, weight in model.named_parameters() if hasattr(weight, "finetune_experts")}
    for path, weight in (quantised | expert_parameters(model)).items():
        owner, _, name = path.rpartition(".")
        modules.setdefault(owner, {})[name] = getattr(weight, "finetune_experts", None) or tuple(weight.shape)
    transposed: dict[type, bool] = {}
    for path, shapes in modules.items():
        experts: Any = model.get_submodule(path)
        if type(experts) not in transposed:
            transposed[type(experts)] = _is_transposed(experts, shapes, f"{type(model).__name__}: {path}")
        for name, shape in shapes.items():
            if config.experts_stored == MXFP4:
                layer = Mxfp4Experts(shape, getattr(experts, name), config)
            else:
                layer = four_bit_layer(shape[0] * shape[1], shape[2], getattr(experts, name), config)
            layer.finetune_experts = shape
            delattr(experts, name)
            setattr(experts, name, layer)
        experts.finetune_transposed = transposed[type(experts)]
        experts.forward = MethodType(_forward, experts)


@contextmanager
def experts_by_shape(model: nn.Module) -> Iterator[None]:
    """Within the block, packed experts are parameters again, without memory: peft asks for names, shapes and formats.

    At the end, this module computes them with their adapters.
    """
    layers = [(experts, name, layer) for experts in packed_experts(model) for name, layer in _layers_of(experts)]
    for experts, name, layer in layers:
        one = torch.zeros((), dtype=layer.compute_dtype, device=layer.weight.device)
        delattr(experts, name)
        setattr(experts, name, nn.Parameter(one.expand(layer.finetune_experts), requires_grad=False))
    try:
        yield
    finally:
        for experts, name, layer in layers:
            delattr(experts, name)
            setattr(experts, name, layer)
    for module in packed_experts(model):
        while hasattr(module, "parameter_name"):
            module.forward, module.finetune_packed = MethodType(_forward, module), True
            module = module.base_layer


def _layers_of(experts: Any) -> list[tuple[str, Any]]:
    return [(name, layer) for name, layer in experts.named_children() if hasattr(layer, "finetune_experts")]


def _forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """[..., hidden] to [..., hidden]; `module` is the experts or peft's outermost wrapper around them."""
    adapters: dict[str, list[Adapter]] = {}
    experts = experts_of(module)
    # peft takes parameters for [experts, outputs, inputs] unless they say otherwise, which Llama 4's do not.
    swapped = experts.finetune_transposed and not getattr(experts, "is_transposed", False)
    while module is not experts:
        names = [] if module.disable_adapters else [name for name in module.active_adapters if name in module.lora_A]
        for name in names:  # peft holds A expert after expert, and B's columns by rank
            down, up, count = module.lora_A[name].weight, module.lora_B[name].weight, module.num_experts
            down, up = down.reshape(count, -1, down.shape[1]), up.reshape(len(up), -1, count).permute(2, 0, 1)
            first, second = (up, down) if swapped else (down.transpose(1, 2), up.transpose(1, 2))
            adapters.setdefault(module.parameter_name, []).append((first, second, module.scaling[name]))
        module = module.base_layer
    weights = {name: partial(_weight_of, experts, layer) for name, layer in _layers_of(experts)}
    layer = _layers_of(experts)[0][1]
    names = list(inspect.signature(inspect.unwrap(type(experts).forward)).parameters)[1:]
    given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
    dtype = layer.compute_dtype or given[0].dtype
    return _computed(experts, weights, adapters, layer.finetune_experts[0], dtype, given)


def _weight_of(experts: Any, layer: Any, dtype: torch.dtype) -> Tensor:
    """[experts, inputs, outputs], dequantised as the layer has it now: an engine may have gathered it for backward."""
    if isinstance(layer, Mxfp4Experts):
        return layer.unpacked(dtype)
    weight = unpacked_weight(layer, dtype).view(layer.finetune_experts)
    return weight if experts.finetune_transposed else weight.transpose(1, 2)


def _computed(
    experts: Any,
    weights: Mapping[str, WeightOf],
    adapters: Mapping[str, Sequence[Adapter]],
    count: int,
    dtype: torch.dtype,
    given: Sequence[Tensor],
) -> Tensor:
    """The experts' outputs.

    Args:
        given: Hidden states, each token's experts [tokens, top], and their weights [tokens, top]. Llama 4 gives hidden
            states alone, which are all experts' rows in order, equally many.
    """
    hidden = given[0]
    flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    if len(given) == 1:
        rows, shares, chosen = flat, None, None
        ends = torch.arange(1, count + 1, dtype=torch.int32, device=flat.device) * (len(flat) // count)
    else:
        indices, routed = given[1:]
        chosen, order = torch.sort(indices.reshape(-1), stable=True)
        ends = torch.searchsorted(chosen, torch.arange(count, device=flat.device), right=True).to(torch.int32)
        shares, order, top = routed.reshape(-1)[order, None], order.to(torch.int32), indices.shape[-1]
        rows = cast(Tensor, _Routed.apply(flat, order, top, False))  # type: ignore[no-untyped-call]

    def product(name: str, rows: Tensor) -> Tensor:
        result = cast(Tensor, _Product.apply(rows, ends, weights[name]))  # type: ignore[no-untyped-call]
        for *factors, scale in adapters.get(name, ()):
            first, second = (factor.to(rows.dtype).contiguous() for factor in factors)
            if lacking := -first.shape[2] % RANK_MULTIPLE:
                first, second = F.pad(first, (0, lacking)), F.pad(second, (0, 0, 0, lacking))
            result = result + grouped_product(grouped_product(rows, first, ends) * scale, second, ends)
        return result

    first = next(name for name in weights if name != "down_proj")
    projected = product(first, rows)
    if (bias := getattr(experts, f"{first}_bias", None)) is not None:
        projected = projected + bias[chosen].to(dtype)
    if first == "up_proj":
        inner = experts.act_fn(projected)
    elif hasattr(experts, "_apply_gate"):
        inner = experts._apply_gate(projected)  # transformers' name of it, for each family's own gate
    else:
        gate, up = projected.chunk(2, -1)
        inner = experts.act_fn(gate) * up
    if shares is None:
        return product("down_proj", inner).view(hidden.shape).to(hidden.dtype)
    added = None
    if (bias := getattr(experts, "down_proj_bias", None)) is not None:  # before the product, which keeps nothing
        added = flat.new_zeros(len(flat), count).scatter(1, indices, routed.to(dtype)) @ bias.to(dtype)
    result = product("down_proj", (inner * shares).to(dtype))
    result = cast(Tensor, _Routed.apply(result, order, top, True))  # type: ignore[no-untyped-call]
    if added is not None:
        result = result + added
    return result.view(hidden.shape).to(hidden.dtype)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows [tokens, inputs], sorted by expert, times each expert's weight [experts, inputs, outputs].

    Args:
        ends: int32 [experts], where each expert's rows end.
    """
    if rows.device.type != "cuda" or torch.cuda.get_device_capability(rows.device) >= AMPERE:
        return F.grouped_mm(rows, weights, offs=ends)
    starts = pairwise([0, *ends.tolist()])
    return torch.cat([rows[start:end] @ weights[at] for at, (start, end) in enumerate(starts) if start < end])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, weight_of: WeightOf) -> Tensor:
        ctx.ends, ctx.weight_of = ends, weight_of  # not saved: torch's checkpoint would recompute up to here
        return grouped_product(rows, weight_of(rows.dtype), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return grouped_product(slope.contiguous(), ctx.weight_of(slope.dtype).transpose(1, 2), ctx.ends), None, None


class _Routed(torch.autograd.Function):
    """Rows [tokens, hidden] sorted by expert, [tokens x top]: each token once for each of its experts. If `back`, the
    reverse: each token's sum over its experts.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, top: int, back: bool) -> Tensor:
        ctx.order, ctx.top, ctx.back = order, top, back  # not saved, for the same reason; 4 bytes a row
        return _summed(rows, order, top) if back else rows[order // top]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        rows = slope[ctx.order // ctx.top] if ctx.back else _summed(slope, ctx.order, ctx.top)
        return rows, None, None, None


def _summed(sorted_rows: Tensor, order: Tensor, top: int) -> Tensor:
    """Without adding at repeated places, which a GPU does in any order."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), dtype=order.dtype, device=order.device)
    return sorted_rows[inverse].view(len(order) // top, top, -1).sum(1)


def _is_transposed(experts: Any, shapes: Mapping[str, ExpertsShape], place: str) -> bool:
    """Whether parameters are [experts, inputs, outputs]. Found on a small copy with drawn weights, in float32.

    Raises FinetuneError if neither way gives the outputs of the experts' own forward.
    """
    reason = f"its parameters are {', '.join(shapes)}"
    if len(shapes) == 2 and set(shapes) <= set(PROJECTIONS) and "down_proj" in shapes:
        for transposed in (False, True):
            try:
                if (difference := _difference(experts, shapes, transposed)) <= LARGEST_OF_COPY:
                    return transposed
                reason = f"a small copy differs by {difference:.1g}"
            except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
    raise FinetuneError(
        f"quantization.load_in_4bit: the experts of {place} compute in a way that is not known in 4 bits ({reason}); "
        "set quantization: null, or choose another model"
    )


def _difference(experts: Any, shapes: Mapping[str, ExpertsShape], transposed: bool) -> float:
    """The relative difference of the output from the library's own forward. No gradient is asked for: a process whose
    autograd has run knows no fake device any more.
    """
    first, down = next(shape for name, shape in shapes.items() if name != "down_proj"), shapes["down_proj"]
    count, sides = first[0], down[1:] if transposed else down[:0:-1]
    sizes = {count: 4, sides[0]: 8, 2 * sides[0]: 16} | {sides[1]: 8 if sides[0] == sides[1] else 16}
    if down[0] != count:
        raise ValueError("each projection has its own number of experts")
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    small: Any = copy.copy(experts)
    for name, value in list(vars(small).items()):
        if type(value) is int:
            setattr(small, name, sizes.get(value, value))
    own = {
        name: shapes.get(name, tuple(parameter.shape)) for name, parameter in experts.named_parameters(recurse=False)
    }
    small._parameters = {name: nn.Parameter(drawn(*(sizes[side] for side in shape))) for name, shape in own.items()}
    weights = {name: small._parameters[name] for name in shapes}
    small_weights: dict[str, WeightOf] = {
        name: partial(Tensor.to, weight if transposed else weight.transpose(1, 2)) for name, weight in weights.items()
    }
    librarys = inspect.unwrap(type(experts).forward)
    alone = len(inspect.signature(librarys).parameters) == 2
    given = [drawn(8, sizes[sides[1]])]
    if not alone:
        given += [torch.tensor([[0, 2], [2, 3], [3, 0], [1, 2]] * 2), drawn(8, 2).softmax(-1)]
    with torch.no_grad():
        expected = librarys(small, *given)
        computed = _computed(small, small_weights, {}, sizes[count], torch.float32, given)
    return float((computed - expected).norm() / expected.norm())
