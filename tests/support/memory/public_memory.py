"""Memory that others measured on a GPU, against our trace of their loop: peft's method comparison on an L40S.

Points: benchmarks/peft_l40s.json, from huggingface/peft at 5d602fd, method_comparison/MetaMathQA/results: Llama 3.2 3B
in bf16, adapters in float32, four rows padded to the longest, AdamW, the norm of gradients clipped at 1; the largest
`memory_reserved` at the end of a step and the mean of `memory_allocated` there, with the adapter's settings where they
differ from peft's own. Facts of their loop (run.py) that the step here repeats: logits and loss are the library's, and
live until the next step's; a bucket of 20 batches begins with its longest, after the allocator's cache was emptied.

Two numbers are unknown and are taken from one point, `lora--llama-3.2-3B-rank32`, then used for all: the longest batch
has LONGEST tokens a row, the batches on average MEAN. All else is the trace's. Five layers are traced, then
repeated.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import peft
import torch
from torch import _meta_registrations, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from finetune.closed_form.constants import CUBLAS_WORKSPACE
from finetune.model.known_configs import CONFIGS
from finetune.planner.depth.caching_allocator import CachingAllocator
from finetune.planner.depth.repeat_layers import StorageChange, repeat_layers
from finetune.planner.trace.fake_device import DEVICE_NAME, pretend_device
from finetune.planner.trace.fake_model import fill_with_fakes, no_data
from finetune.planner.trace.kernel_workspaces import workspaces
from finetune.planner.trace.recorder import OnOperations, Recorder, tagging
from finetune.planner.trace.timeline import Timeline
from finetune.wording import GIB
from tests.support.runs.cells import ROOT

POINTS = ROOT / "benchmarks" / "peft_l40s.json"
ROWS = 4
LONGEST, MEAN = 668, 219
LAYERS, DEEP = 5, 28
# Why a point is not traced.
REASONS = {
    "frod": "not traced: its initialisation gives weights to a device that tensors without data cannot move to",
    "waveft": "not traced: its forward takes those of its places that lie inside, by their values",
}
# Their initialisation asks for values: they are made of real tensors, and what these hold is then forgotten.
REAL = ("mica", "vblora")
WHOLE = ("lily", "prefixtuning", "prompt_tuning", "ptuning", "adaptionprompt")  # traced at full depth


@contextmanager
def moved_without_swapping() -> Iterator[None]:
    """`Module.to` in a form that tensors without data can be moved by."""

    def apply(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
        for child in module.children():
            apply(child, change)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = change(parameter.detach())
                if (moved.dtype, moved.device) != (parameter.dtype, parameter.device):
                    module._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
        return module

    with mock.patch.object(nn.Module, "_apply", apply):
        yield


@contextmanager
def factors_as_on_cuda() -> Iterator[None]:
    """CUDA's singular value decomposition gives Vh row by row, other devices' column by column: its first rows are then
    a view, in which all of it lives on (psoft: 1.15 GiB)."""

    def device(_: torch.Tensor) -> str:  # a function: a mock would keep the tensors that it is asked about
        return "cuda"

    with mock.patch.object(_meta_registrations, "device_hint", device):  # torch's own question, not public
        yield


def build(adapter: dict[str, Any] | None, layers: int, device: torch.device) -> nn.Module:
    """Llama 3.2 3B with so many layers, in bf16, and the adapter."""
    shape = json.loads((CONFIGS / "llama-3.2-3b.json").read_text("utf-8")) | {"num_hidden_layers": layers}
    with device:
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.bfloat16)
    if adapter is None:
        return model  # type: ignore[no-any-return]
    settings = dict(adapter)
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(settings.pop("peft_type"))]
    return peft.get_peft_model(model, kind(**settings))  # type: ignore[no-any-return]


def timeline_of(adapter: dict[str, Any] | None, lengths: Sequence[int], layers: int, *, real: bool) -> Timeline:
    """Their loop, a step for each length. `real`: the model is made of real tensors first."""
    device = pretend_device()
    made = build(adapter, layers, torch.device("cpu")) if real else None
    with ExitStack() as inside:
        mode = inside.enter_context(no_data(1.0, masks=True))
        mode.allow_non_fake_inputs = True  # indices that adapters keep are small and real
        recorder = Recorder(device, mode)
        for each in (
            factors_as_on_cuda(),
            moved_without_swapping(),
            OnOperations(tagging(recorder, gloo=False), workspaces(recorder, device, CUBLAS_WORKSPACE)),
        ):
            inside.enter_context(each)
        with recorder.phases("load"):
            model = made or build(adapter, layers, device)
            if real:
                fill_with_fakes(model, device)
            model.train()
            optimizer = torch.optim.AdamW(model.parameters())
        with recorder.modules(model, None):
            kept: dict[str, Any] = {}
            for tokens in lengths:
                step(model, optimizer, tokens, device, recorder, kept)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            recorder.place_in_layer(tensor, name)
            for value in optimizer.state.get(tensor, {}).values():
                recorder.place_in_layer(value, name)
    return recorder.timeline


def step(
    model: Any, optimizer: Any, tokens: int, device: torch.device, recorder: Recorder, kept: dict[str, Any]
) -> None:
    """One step; the outputs that it has `kept` live until those of the next forward replace them."""
    ids = torch.ones(ROWS, tokens, dtype=torch.long, device=device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    optimizer.zero_grad()
    with recorder.phases("forward"):
        kept["outputs"] = model(**batch, num_items_in_batch=ROWS * tokens)
    with recorder.phases("backward"):
        kept["outputs"].loss.backward()
    with recorder.phases("step"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def at_ends(changes: Sequence[StorageChange]) -> list[tuple[int, int]]:
    """Bytes allocated and reserved at the end of each step; the cache is emptied then."""
    allocator, found = CachingAllocator(), list[tuple[int, int]]()
    before = ""
    for storage, nbytes, phase, stream in [*changes, StorageChange(None, 0, "end")]:
        if before == "step" and phase != "step":
            found.append((allocator.allocated, allocator.reserved))
            allocator.empty_cache()
        before = phase
        if storage is not None:
            allocator.free(storage)
            allocator.malloc(storage, nbytes, stream)
    return found


def planned(adapter: dict[str, Any] | None, layers: int = LAYERS, *, real: bool = False) -> tuple[int, int]:
    """Bytes allocated at the end of a mean step, and reserved at that of the longest."""
    timeline = timeline_of(adapter, (MEAN, MEAN, LONGEST), layers, real=real)
    _, mean, longest = at_ends(list(repeat_layers(timeline, DEVICE_NAME, layers, DEEP)))
    return mean[0], longest[1]


def compared(name: str, point: dict[str, Any]) -> dict[str, Any]:
    """Plan beside measured, and the errors in percent; or why there is no plan."""
    warnings.simplefilter("ignore")  # peft's about settings, 33 times
    family = name.split("--")[0]
    reason = next((why for word, why in REASONS.items() if word in name), None)
    if reason:
        return {"reason": reason}
    # Prompts and prefixes are one tensor for all layers, and Lily shares among some: layers are not alike.
    layers = DEEP if family in WHOLE else LAYERS
    allocated, reserved = (
        nbytes / GIB for nbytes in planned(point["adapter"], layers, real=any(word in name for word in REAL))
    )
    return {
        "reserved_gib": round(reserved, 3),
        "reserved_error": round(100 * (reserved / point["reserved_gib"] - 1), 2),
        "mean_allocated_gib": round(allocated, 3),
        "mean_allocated_error": round(100 * (allocated / point["mean_allocated_gib"] - 1), 2),
    }


def summary(found: dict[str, dict[str, Any]], key: str) -> dict[str, float]:
    """Of one kind of error, without its sign: how many, the median, and the share of at most 5 %."""
    errors = [abs(row[key]) for row in found.values() if key in row]
    return {
        "points": len(errors),
        "median": round(statistics.median(errors), 2),
        "within_5": round(sum(error <= 5 for error in errors) / len(errors), 3),
    }


def table(points: dict[str, Any], found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The page's rows."""
    yield "| point | reserved, GiB | planned | error | allocated, GiB | planned | error |"
    yield "|---|---|---|---|---|---|---|"
    for name, row in found.items():
        point = points[name]
        measured = f"| {name.replace('--llama-3.2-3B', '')} | {point['reserved_gib']:.2f}"
        if "reason" in row:
            yield f"{measured} | {row['reason']} | | {point['mean_allocated_gib']:.2f} | | |"
            continue
        yield (
            f"{measured} | {row['reserved_gib']:.2f} | {row['reserved_error']:+.1f} % "
            f"| {point['mean_allocated_gib']:.2f} | {row['mean_allocated_gib']:.2f} "
            f"| {row['mean_allocated_error']:+.1f} % |"
        )
