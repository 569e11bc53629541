"""Hidden states in host memory on a GPU: the same bits, the bytes by arithmetic, and the seconds that copies add.

The step `offloading` of gpu.py: layers of Llama 8B's width with random weights. Only the norms are trained. Every layer
is recomputed, and rows have 16,384 tokens. Three micro-batches run with and without `training.activation_offloading`,
from the same weights. On a CPU, `--shrunken`, memory and seconds are not judged.
"""

from __future__ import annotations

import os
import time
from typing import Any

LAYERS, TOKENS, STEPS = 8, 16_384, 3


def offloading(lines: Any, *, shrunken: bool) -> None:
    """Add a line: loss and gradients to the bit, bytes less on the device, pinned bytes, seconds more a step."""
    began = time.monotonic()
    layers, tokens = (4, 256) if shrunken else (LAYERS, TOKENS)
    resident, offloaded = (_trained(layers, tokens, offloads=offloads, shrunken=shrunken) for offloads in (False, True))
    state = 2 * tokens * resident["hidden_size"]
    expected = (layers - 2) * state
    less = resident["peak_bytes"] - offloaded["peak_bytes"]
    differing = [name for name, value in resident["tensors"].items() if not value.equal(offloaded["tensors"][name])]
    figures = {
        "state_bytes": state,
        "expected_bytes_less": expected,
        "bytes_less": less,
        "pinned_bytes": offloaded["pinned_bytes"],
        "seconds": resident["seconds"],
        "seconds_offloaded": offloaded["seconds"],
    }
    seen = (
        f"{len(resident['tensors'])} losses and gradients, {len(differing)} differ; {less:,} bytes less on the device"
    )
    seen += f" ({expected:,} by arithmetic), {offloaded['pinned_bytes']:,} pinned; a step {resident['seconds']:.3f} s"
    seen += f", {offloaded['seconds']:.3f} with offloading"
    is_right = not differing and (shrunken or abs(less - expected) <= 0.05 * expected)
    lines.add(
        "offloaded hidden states", "ok" if is_right else "failed", seen, time.monotonic() - began, figures=figures
    )


def _trained(layers: int, tokens: int, *, offloads: bool, shrunken: bool) -> dict[str, Any]:
    """Loss and gradients after each micro-batch, on the CPU; peak bytes on the device; median seconds of one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.architecture.offloading import offload_hidden_states
    from finetune.architecture.recomputation import checkpoint_layers
    from finetune.launch.determinism import deterministic_algorithms
    from finetune.launch.gpu_environment import CUBLAS_VARIABLE, REPRODUCIBLE_WORKSPACES

    os.environ.setdefault(CUBLAS_VARIABLE, REPRODUCIBLE_WORKSPACES[0])
    device = torch.device("cpu" if shrunken else "cuda")
    width = {"hidden_size": 64, "intermediate_size": 128} if shrunken else {"intermediate_size": 14_336}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2} if shrunken else {"num_key_value_heads": 8}
    config = AutoConfig.for_model("llama", num_hidden_layers=layers, vocab_size=1024, **width, **heads)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    checkpoint_layers(model, 1)
    if offloads:
        offload_hidden_states(model)
    tensors: dict[str, Any] = {}
    seconds: list[float] = []
    for step in range(STEPS):
        ids = torch.randint(1024, (1, tokens), generator=torch.Generator().manual_seed(step)).to(device)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        with deterministic_algorithms(True, device):  # flash attention's backward sums in any order otherwise
            loss = model.model(input_ids=ids, use_cache=False).last_hidden_state.float().square().mean()
            loss.backward()
        tensors[f"{step}: loss"] = loss.detach().cpu()  # waits for the device
        seconds.append(time.perf_counter() - began)
        trained = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        tensors |= {f"{step}: {name}": gradient.cpu() for name, gradient in trained.items()}
    states = getattr(model.model.layers[0], "finetune_states_on_host", None)
    return {
        "tensors": tensors,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        "pinned_bytes": sum(buffer.nbytes for buffer in states._free) if states is not None else 0,
        "seconds": sorted(seconds)[len(seconds) // 2],
        "hidden_size": config.hidden_size,
    }
