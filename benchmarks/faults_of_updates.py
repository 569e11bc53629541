"""Faults in an update of the weights (how bfloat16 is rounded, and what its random bits are made of), and in the
gradients of norms and gates.

`python benchmarks/seeded_faults.py` seeds them; each names the tests that must notice.
"""

from __future__ import annotations

from benchmarks.common import Fault

ROUNDED, BITS = "model/optimizers/rounded_adamw.py", "model/optimizers/random_bits.py"
ITS_TESTS = "model/test_rounded_adamw.py"
COPIES = "training/step/cast_weights.py"
BLOCKS, BLOCKWISE = "model/optimizers/blocks.py", "model/optimizers/blockwise_adamw.py"
BLOCKS_TESTS = "model/test_blockwise_adamw.py"
LAYERS, LAYERS_TESTS = "architecture/own_layers/norm_and_gate.py", "architecture/test_norm_and_gate.py"

FAULTS_OF_UPDATES = (
    Fault(
        "a norm's gradient leaves out what its root depends on",
        LAYERS,
        "torch.addcmul(inner, hidden, along, out=wide)",
        "wide.copy_(inner)",
        LAYERS_TESTS,
    ),
    Fault(
        "a norm's root is that of a sum, not of a mean, in its gradient",
        LAYERS,
        ".div_(-hidden.shape[-1])",
        ".neg_()",
        LAYERS_TESTS,
    ),
    Fault(
        "the gradient of a norm's weight is that of its input as it came",
        LAYERS,
        "(normed * slope)",
        "(hidden * slope)",
        LAYERS_TESTS,
    ),
    Fault(
        "the gradient of a norm's input leaves out what is added to its weight",
        LAYERS,
        "else slope * _wide(weight, ctx.offset)",
        "else slope * weight.float()",
        LAYERS_TESTS,
    ),
    Fault(
        "a norm that rounds once is rounded before its weight",
        LAYERS,
        "wide, factor = hidden * root, _wide(weight, offset)",
        "wide, factor = _times(hidden, root).float(), _wide(weight, offset)",
        LAYERS_TESTS,
    ),
    Fault(
        "a norm is known by its forward, whatever that calls",
        LAYERS,
        'for name in ("forward", "_norm") if',
        'for name in ("forward",) if',
        LAYERS_TESTS,
    ),
    Fault(
        "GELU's gradient is that of its other formula",
        LAYERS,
        "partial(torch.ops.aten.gelu_backward.grad_input, approximate=approximate)",
        'partial(torch.ops.aten.gelu_backward.grad_input, approximate="none")',
        LAYERS_TESTS,
    ),
    Fault(
        "a norm rounds before it multiplies by the root",
        LAYERS,
        "return torch.mul(values, factor, out=torch.empty_like(values if like is None else like))",
        "return values * factor.to(values.dtype) if like is None else (values * factor).to(like.dtype)",
        LAYERS_TESTS,
    ),
    Fault(
        "a gate passes the gradient of its sigmoid alone",
        LAYERS,
        "grad_gate = slope * up",
        "grad_gate = slope.clone()",
        LAYERS_TESTS,
    ),
    Fault(
        "any gate is taken for SwiGLU",
        LAYERS,
        """        return "gelu_tanh"
    return None""",
        """        return "gelu_tanh"
    return "silu\"""",
        LAYERS_TESTS,
    ),
    Fault(
        "a norm is known by its constants alone",
        LAYERS,
        "code.co_code, code.co_names, constants",
        "code.co_code, constants",
        LAYERS_TESTS,
    ),
    Fault(
        "a norm is known by its instructions without their constants",
        LAYERS,
        "code.co_names, constants, code.co_argcount",
        "code.co_names, code.co_argcount",
        LAYERS_TESTS,
    ),
    Fault(
        "bfloat16 weights are cut off and not rounded at random",
        ROUNDED,
        "values.view(torch.int32).add_(bits.bitwise_and_(_LOW)).bitwise_and_(_HIGH)",
        "values.view(torch.int32).bitwise_and_(_HIGH)",
        ITS_TESTS,
    ),
    Fault(
        "every step rounds with the same bits",
        BITS,
        "for number in numbers:",
        "for number in numbers[:1]:",
        ITS_TESTS,
    ),
    Fault(
        "all tensors are rounded with the same bits",
        ROUNDED,
        "key = key_of(self._seed, step, each.place)",
        "key = key_of(self._seed, step)",
        ITS_TESTS,
    ),
    Fault(
        "a shard is rounded as if it were the first",
        ROUNDED,
        "Range(place, start, 0, local.numel())",
        "Range(place, 0, 0, local.numel())",
        ITS_TESTS,
    ),
    Fault(
        "the seed does not decide how weights are rounded",
        ROUNDED,
        "key = key_of(self._seed, step, each.place)",
        "key = key_of(0, step, each.place)",
        ITS_TESTS,
    ),
    Fault(
        "moments are rounded to the nearest",
        ROUNDED,
        "if part.dtype == torch.bfloat16:",
        "if part.dtype == torch.bfloat16 and use == 0:",
        ITS_TESTS,
    ),
    Fault(
        "bits repeat every 65,536 elements",
        BITS,
        "_shifted_xor_(bits, 16).mul_(_signed(0x7FEB352D))",
        "bits.bitwise_and_(0xFFFF).mul_(_signed(0x7FEB352D))",
        ITS_TESTS,
    ),
    Fault(
        "bias correction is left out in bfloat16",
        ROUNDED,
        'value=-group["lr"] / (1 - beta1**step)',
        'value=-group["lr"]',
        ITS_TESTS,
    ),
    Fault(
        "training in bfloat16 alone takes torch's AdamW",
        "model/optimizer.py",
        "if training.pure_bf16:",
        "if False:",
        "model/test_optimizer.py",
    ),
    Fault(
        "shards are rounded without their place",
        "strategies/assemble.py",
        "optimizer = make_optimizer(unwrapped, recipe, local_part)",
        "optimizer = make_optimizer(unwrapped, recipe)",
        "strategies/test_fsdp.py",
    ),
    Fault(
        "gradients of 16-bit copies are added in bfloat16",
        COPIES,
        "    gradient, copy.grad = copy.grad, None\n",
        "    gradient = copy.grad\n",
        "training/step/test_cast_weights.py",
    ),
    Fault(
        "gradients of 16-bit copies wait for the end of backward",
        COPIES,
        "if cast.requires_grad:",
        "if False:",
        "training/step/test_cast_weights.py",
    ),
    Fault(
        "adapters' float32 weights are copied too",
        "recipe/strategy.py",
        "in_16_bits and recipe.lora is None and not",
        "in_16_bits and not",
        "training/step/test_cast_weights.py",
    ),
    Fault(
        "an evaluation computes without the copies",
        "training/loop.py",
        "weights.during(forward)",
        "forward()",
        "training/step/test_cast_weights.py",
    ),
    Fault(
        "a small second moment in one byte becomes 0",
        BLOCKS,
        "        edges[0] = 0.0\n",
        "        pass\n",
        BLOCKS_TESTS,
    ),
    Fault(
        "every chunk has the scales of the first one",
        BLOCKWISE,
        "return scales[begin // self.block : end // self.block]",
        "return scales[: (end - begin) // self.block]",
        BLOCKS_TESTS,
    ),
    Fault(
        "moments of embeddings are in one byte",
        BLOCKWISE,
        "return 0 if id(parameter) in self._in_float32 else block_length(parameter.shape)",
        "return block_length(parameter.shape)",
        BLOCKS_TESTS,
    ),
)
