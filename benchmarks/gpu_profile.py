"""A training with two of its steps under torch.profiler: which kernels take the time, and how long the device is idle.

    accelerate launch benchmarks/gpu_profile.py RECIPE [key=value ...]     (with GPU_PROFILE=OUT.json; by gpu.py)

The first step records the device alone, which slows the host least: idle time and launches are that step's. The second
records operations and their shapes too, by which products are told apart: classes and longest kernels are that step's.
The trace itself, hundreds of MB, is not kept.

    product           of large matrices               fused     a compiled layer's own kernels
    adapter product   one side is an adapter's rank   head      reads or writes a row of the vocabulary
    attention         forward and backward            update    clipping and the optimizer
    copy, memset      of memory                       idle      no kernel runs
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

FILE = "GPU_PROFILE"  # environment variable: where the figures go
FIRST = 3  # training steps before the two
UPDATE = "gpu_profile: update"  # the name of a range in the trace
CLASSES = (*("product", "adapter product", "attention", "fused", "head", "copy", "update", "memset", "idle", "other"),)
LONGEST = 20  # kernels
MOST_RANK = 128  # a product with a side of at most this is an adapter's; the head's chunks and rows are longer
PRODUCTS = re.compile(r"gemm|cutlass|nvjet|xmma|cublas|aten::(add|b)?mm$|aten::addmm|scaled_mm|float8_product")
ATTENTION = re.compile(r"flash|attention|fmha|sdpa|varlen", re.IGNORECASE)
COPIES = re.compile(r"memcpy|copy_kernel|direct_copy|aten::copy_|CatArray", re.IGNORECASE)
LAUNCHES = re.compile(r"^(cuda|cu)(Launch|GraphLaunch|Memcpy|Memset)\w*")


def summary(light: Mapping[str, Any], shaped: Mapping[str, Any], *, vocabulary: int) -> dict[str, Any]:
    """The figures of two chrome traces of one step each: `light` without operations, `shaped` with their shapes.

    Returns ms and share of each class, the longest kernels, launches, and the share of `light`'s span without a kernel.
    """
    kernels = _kernels(light["traceEvents"])
    spans = sorted((each["ts"], each["ts"] + each["dur"]) for each in kernels)
    span = max((end for _, end in spans), default=0.0) - (spans[0][0] if spans else 0.0)
    busy = _covered(spans)
    milliseconds = dict.fromkeys(CLASSES, 0.0)
    by_name: dict[tuple[str, str], list[float]] = defaultdict(list)
    events = shaped["traceEvents"]
    operations = {each["args"]["External id"]: each for each in events if _is_operation(each)}
    launched = {
        each["args"]["correlation"]: each["ts"]
        for each in events
        if each.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in each.get("args", {})
    }
    updates = [
        (each["ts"], each["ts"] + each["dur"]) for each in events if each.get("name") == UPDATE and "dur" in each
    ]
    for kernel in _kernels(events):
        arguments = kernel.get("args", {})
        operation = operations.get(arguments.get("External id"), kernel)
        begun = launched.get(arguments.get("correlation"), kernel["ts"])
        updating = any(begin <= begun <= end for begin, end in updates)
        found = class_of(kernel["name"], operation, updating=updating, vocabulary=vocabulary, kind=kernel.get("cat"))
        milliseconds[found] += kernel["dur"] / 1e3
        by_name[found, kernel["name"][:120]].append(kernel["dur"] / 1e3)
    milliseconds["idle"] = (span - busy) / 1e3
    total = sum(milliseconds.values()) or 1.0
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return {
        "classes": {name: {"ms": round(ms, 3), "share": round(ms / total, 4)} for name, ms in milliseconds.items()},
        "longest": [
            {"name": name, "class": kind, "ms": round(sum(each), 3), "calls": len(each)}
            for (kind, name), each in longest
        ],
        "span_ms": round(span / 1e3, 3),
        "idle_share": round((span - busy) / span, 4) if span else None,
        "launches": sum(1 for each in light["traceEvents"] if _is_launch(each)),
        "kernels": len(kernels),
    }


def class_of(name: str, operation: Mapping[str, Any], *, updating: bool, vocabulary: int, kind: str | None) -> str:
    """The class of a kernel, by its name and the operation that launched it."""
    dims = [dims for dims in operation.get("args", {}).get("Input Dims", []) if isinstance(dims, list)]
    sizes = [size for each in dims for size in each if isinstance(size, int)]
    words = f"{name} {operation.get('name', '')}"
    if updating:
        return "update"
    if kind == "gpu_memset" or "memset" in name.lower():
        return "memset"
    if ATTENTION.search(words):
        return "attention"
    if name.startswith("triton_"):
        return "fused"
    if vocabulary in sizes and "embedding" not in operation.get("name", ""):
        return "head"
    if PRODUCTS.search(name) or PRODUCTS.search(operation.get("name", "")):
        matrices = [size for each in dims if len(each) == 2 for size in each]
        return "adapter product" if matrices and min(matrices) <= MOST_RANK else "product"
    return "copy" if kind == "gpu_memcpy" or COPIES.search(words) else "other"


def _kernels(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The kernels of the device. Without a device: the CPU's operations that call no other operation."""
    events = list(events)
    kernels = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        return kernels
    innermost: list[Mapping[str, Any]] = []
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for each in events:
        if _is_operation(each):
            threads[each["tid"]].append(each)
    for operations in threads.values():
        operations.sort(key=lambda each: (each["ts"], -each["dur"]))
        for each, after in zip(operations, [*operations[1:], None], strict=True):
            if after is None or after["ts"] >= each["ts"] + each["dur"]:
                innermost.append(each)
    return innermost


def _is_operation(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "cpu_op" and "dur" in event and "External id" in event.get("args", {})


def _is_launch(event: Mapping[str, Any]) -> bool:
    return event.get("cat") in ("cuda_runtime", "cuda_driver") and bool(LAUNCHES.match(event.get("name", "")))


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length that sorted spans cover together."""
    covered, reached = 0.0, float("-inf")
    for begin, end in spans:
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def profile_steps(out: Path) -> None:
    """Have the training loop take its steps FIRST and FIRST + 1 under the profiler, and write the figures to `out`."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from finetune.training import loop, step

    take, update = loop.optimizer_step, step.clip_and_update
    on_gpu = torch.cuda.is_available()
    traces: list[dict[str, Any]] = []
    done = 0

    def updated(*args: Any, **kwargs: Any) -> Any:
        with record_function(UPDATE):
            return update(*args, **kwargs)

    def taken(parts: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done += 1
        number = done - FIRST  # 1 and 2 are recorded
        if number not in (1, 2):
            return take(parts, *args, **kwargs)
        activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
        if on_gpu and number == 2:
            activities.append(ProfilerActivity.CPU)
        with ExitStack() as stack:
            if on_gpu:
                torch.cuda.synchronize()
            recorded = stack.enter_context(profile(activities=activities, record_shapes=number == 2))
            result = take(parts, *args, **kwargs)
            if on_gpu:
                torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            recorded.export_chrome_trace(str(file))
            traces.append(json.loads(file.read_text("utf-8", errors="replace")))
        if number == 2:
            config = parts.accelerator.unwrap_model(parts.model).config
            vocabulary = int(config.get_text_config().vocab_size)
            out.write_text(json.dumps(summary(*traces, vocabulary=vocabulary)), "utf-8")
            traces.clear()
        return result

    loop.optimizer_step, step.clip_and_update = taken, updated


def main() -> int:
    """Train as finetune/train.py does, with two steps recorded."""
    import finetune.train as trainer

    run_training = trainer.run_training

    def profiled(*args: Any) -> int:  # after the process is set up: torch is imported now
        profile_steps(Path(os.environ[FILE]))
        return run_training(*args)

    trainer.run_training = profiled
    return trainer.process_main()


if __name__ == "__main__":
    sys.exit(main())
