"""What gpu.py runs in processes of their own: the environment, the kit's layers, its optimizer, its proofs, a random
model.

    python benchmarks/gpu_checks.py KIND OUT.jsonl             (a kind of CHECKS, below)
    python benchmarks/gpu_checks.py operator OUT.jsonl CASE    (one case of `operator`)
    python benchmarks/gpu_checks.py model RECIPE FOLDER [key=value ...]

`--shrunken` computes on the CPU, with small sizes. OUT.jsonl gets a line for each check as soon as it is known: name,
state (ok, failed, not run), seconds and what was seen; a failure may have a log.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from benchmarks.gpu_answers import generate
from benchmarks.gpu_offloading import offloading
from benchmarks.gpu_peer import peer
from benchmarks.gpu_proofs import ProofBench, ProofMachine, find_gpus, plan_proofs, write_proof_recipe
from benchmarks.gpu_recipes import LAYERS, OUT_OF_TIME, last_line, run_checks
from benchmarks.gpu_two_ranks import two_ranks

PACKAGES = tuple(
    "torch triton transformers tokenizers safetensors huggingface_hub accelerate peft pydantic numpy datasets "
    "bitsandbytes deepspeed torchao liger-kernel".split()
)
MODULES = ("finetune.train", "finetune.training.session", "finetune.planner.plan_recipe", "finetune.doctor")
TAIL = 20_000  # characters of a log that a line keeps
# Proofs whose layers are compiled; with those that go on from them. Each kind of layer costs seconds of inductor.
COMPILED_PROOFS = ("float32", "bf16")
LONGEST_LOG = 200
# Relative, of gradients. float32 sums of 4,096 and 14,336 products, in another order than the library's.
FLOAT32_BOUND = 2e-4
DOCUMENTS = (300, 1, 513, 42)  # tokens: more than two blocks of a flash kernel, one token, a ragged end


class Lines:
    """Where checks write what they saw, a line each, at once."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def add(self, name: str, state: str, seen: str, seconds: float = 0.0, **more: Any) -> None:
        line = {"name": name, "state": state, "seconds": round(seconds, 1), "seen": seen, **more}
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        print(f"{state:<8}{seconds:6.1f} s  {name:<40}{seen[:LONGEST_LOG]}", flush=True)

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """One check: the block fills `seen` and more. What it raises is a failure, never the end of the others."""
        found: dict[str, Any] = {"state": "ok", "seen": ""}
        began = time.monotonic()
        try:
            yield found
        except Exception as error:
            found |= {"state": "failed", "seen": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            found["log"] = traceback.format_exc()[-TAIL:]
        self.add(name, found.pop("state"), found.pop("seen"), time.monotonic() - began, **found)


def environment(lines: Lines, *, shrunken: bool) -> None:
    """Versions, the card, what importing costs, and the two rates that bound every step."""
    versions = {name: _version(name) for name in PACKAGES}
    with lines.check("versions") as found:
        found["versions"] = {"python": platform.python_version()} | {k: v for k, v in versions.items() if v}
        found["packages"] = [name for name, version in versions.items() if version]
        missing = [name for name, version in versions.items() if not version]
        found["seen"] = f"without {', '.join(missing)}" if missing else "all are there"
    for module in ("torch", "transformers", "peft", "accelerate", *MODULES):
        with lines.check(f"import {module}") as found:
            importlib.import_module(module)
    with lines.check("machine") as found:
        found["machine"] = _machine(shrunken)
        found["seen"] = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    if not shrunken:
        with lines.check("rates") as found:
            found["rates"] = _rates()
            found["seen"] = ", ".join(f"{key} {value}" for key, value in found["rates"].items())
        with lines.check("outside of the allocator") as found:
            import torch

            from finetune.measure.phases import memory_of

            found["bytes"] = memory_of(torch.device("cuda")).others
            found["seen"] = f"{found['bytes'] / 1e9:.3f} GB: CUDA's context and cuBLAS, and other programs' memory"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine(shrunken: bool) -> dict[str, Any]:
    import psutil
    import torch

    facts: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "host_gb": round(psutil.virtual_memory().available / 1e9, 1),
        "disk_gb": round(shutil.disk_usage(tempfile.gettempdir()).free / 1e9, 1),
    }
    if shrunken:
        return facts | {"device": "a CPU in a GPU's place", "gpu_gb": 0.0}
    card = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return facts | {
        "device": card.name,
        "gpus": torch.cuda.device_count(),
        "gpu_gb": round(total / 1e9, 1),
        "gpu_free_gb": round(free / 1e9, 1),
        "capability": f"{card.major}.{card.minor}",
        "cuda": torch.version.cuda,
    }


def _rates() -> dict[str, str]:
    """bf16 products and copies on the device; medians of CUDA events, after a warm-up, of random numbers."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    product, copied = milliseconds(lambda: a @ b), milliseconds(lambda: target.copy_(source))
    return {
        "product_tflops": f"{2 * 8192**3 / product / 1e9:.0f}",
        "copy_tb_per_second": f"{2 * source.nbytes / copied / 1e9:.2f}",
    }


def milliseconds(function: Callable[[], object], times: int = 10) -> float:
    """The median time of a function on the device, by events, after three calls for warmth."""
    import torch

    for _ in range(3):
        function()
    took = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end))
    return sorted(took)[times // 2]


def layers(lines: Lines, *, shrunken: bool) -> None:
    """Two decoder layers, embeddings and head of an 8B Llama, as the recipes train them: loss and gradients beside
    the library's own in float32, one document at a time with eager attention. Eager first, then compiled."""
    import torch

    from finetune.probe.compare import library_side
    from finetune.probe.small_model import SmallModel

    device = torch.device("cpu" if shrunken else "cuda")
    with tempfile.TemporaryDirectory(prefix="finetune-layers-") as name:
        folder = Path(name)
        _save_layers(folder, device, _two_layers("Llama", shrunken=shrunken))
        small = SmallModel(folder, "LlamaForCausalLM", 2, 1, 0, frozenset(range(2)))
        lora = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
        for way, adapters, recomputed, compute in (
            ("LoRA in bfloat16", lora, False, torch.bfloat16),
            ("LoRA in bfloat16, recomputed", lora, True, torch.bfloat16),
            ("all weights, float32 in bfloat16", None, False, torch.bfloat16),
            ("LoRA in float32", lora, False, None),
        ):
            recipe = _recipe(folder, adapters, recomputed=recomputed, bf16=compute is not None)
            side = library_side(recipe, small, device, compute, DOCUMENTS)
            # Adapters without recomputation are compiled, and compared by the guard, in the recipe of 8B.
            compiles = compute is not None and (adapters is None or recomputed)
            _compare(lines, way, recipe, side, device, compiles=compiles, shrunken=shrunken)
            del side
            if not shrunken:
                torch.cuda.empty_cache()


def _recipe(folder: Path, adapters: Any, *, recomputed: bool, bf16: bool) -> Any:
    """A training of the model in `folder`, for `_compare`."""
    from finetune.recipe.schema import Recipe

    precision = "bf16" if bf16 else "no"
    training = {"activation_checkpointing": recomputed, "mixed_precision": precision, "max_steps": 1}
    return Recipe.model_validate(
        {
            "model": {"name_or_path": str(folder), "dtype": "bfloat16" if adapters and bf16 else "float32"},
            "lora": adapters,
            "data": {"train": [{"path": "json", "data_files": "none.jsonl"}], "max_length": 2048},
            "training": training | {"learning_rate": 1e-4},
        }
    )


def _two_layers(family: str, *, shrunken: bool) -> Any:
    """The configuration of two layers of Llama 3.1 8B's, Gemma 2 9B's or Gemma 4 31B's widths."""
    from transformers import AutoConfig

    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    narrow = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "head_dim": 32}
    match family:
        case "Llama":
            model_type = "llama"
            own: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
            own |= {"tie_word_embeddings": False}
        case "Gemma 2":  # logits of attention capped at 50, which no flash kernel does
            model_type, own = "gemma2", kinds | {"attn_logit_softcapping": 50.0}
            wide |= {"hidden_size": 3584, "num_attention_heads": 16, "sliding_window": 512, "head_dim": 256}
        case _:  # global heads of 512, too wide for torch's flash kernel
            model_type, own = "gemma4_text", kinds | {"global_head_dim": 512, "hidden_size_per_layer_input": 0}
            wide |= {"hidden_size": 5376, "intermediate_size": 21504, "num_key_value_heads": 16}
            wide |= {"sliding_window": 512, "head_dim": 256}
    return AutoConfig.for_model(
        model_type,
        vocab_size=512 if shrunken else 32_768,
        num_hidden_layers=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **(own | (narrow if shrunken else wide)),
    )


def _save_layers(folder: Path, device: Any, config: Any) -> None:
    """Save a random model with this configuration in a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    # Gemma multiplies its embeddings, which are its head too, by the root of their width.
    of_embeddings = config.hidden_size**-0.5 if config.tie_word_embeddings else 0.5
    with torch.device(device), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for name, weight in model.named_parameters():
            if weight.ndim < 2:  # norms: of 1 alone a wrong one could not be told
                weight.add_(0.3 * torch.randn_like(weight))
                if name.endswith(("q_norm.weight", "k_norm.weight")):  # else Gemma 4's attention sees one token alone
                    weight.mul_(weight.shape[-1] ** -0.25)
            else:
                weight.normal_(std=of_embeddings if "embed" in name else weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def _compare(lines: Lines, way: str, recipe: Any, side: Any, device: Any, *, compiles: bool, shrunken: bool) -> None:
    """The kit's model as the recipe builds it, beside the library's: eager, then compiled where `compiles` says so."""
    from finetune.architecture.compiled.layers import CompiledLayers, compile_layers
    from finetune.architecture.own_layers.compute import compute_layers
    from finetune.model.build import build_model, decoder_parts
    from finetune.model.quantization import unpacked_weight

    bound = side.bound if side.compute is not None else FLOAT32_BOUND
    model: Any = None
    eager: Any = None
    with lines.check(f"{way}, eager") as found:
        model = build_model(recipe, device)  # its base in the recipe's own format
        compute_layers(model, unpacked_weight)
        model.load_state_dict(side.model.state_dict())
        eager = side.computed_by(model, recipe)
        _judge(found, eager, side.expected, bound, exact=side.compute is None)
    if eager is None or not compiles:
        return
    with lines.check(f"{way}, compiled") as found:
        compiled = CompiledLayers(required=False, say=lambda line: print(line, flush=True))
        if shrunken:
            compiled.backend = "aot_eager"  # traced forward and backward, and no code made
        compile_layers(decoder_parts(model), compiled)
        ours = side.computed_by(model, recipe)
        found["compiled"] = compiled.facts()
        _judge(found, ours, side.expected, bound, exact=False)
        if compiled.stopped is not None:  # what it computes then is right, and is eager
            found |= {"state": "not run", "seen": f"layers are not compiled: {compiled.stopped}"}
        else:
            found["seen"] += f"; first {compiled.facts()['first_seconds']} s"


def _judge(found: dict[str, Any], ours: Any, expected: Any, bound: float, *, exact: bool) -> None:
    """Fill `found` with how far ours is from what is expected, by all gradients and by the one furthest away."""
    from finetune.probe.compare import difference

    whole, one = difference(ours, expected, exact=exact), difference(ours, expected, exact=True)
    found["figures"] = {"loss": whole.loss, "gradients": whole.gradients, "one": one.gradients, "bound": bound}
    without = [name for name, gradient in ours.gradients.items() if gradient is None or not bool(gradient.any())]
    found["seen"] = (
        f"loss {whole.loss:.1e}, gradients {whole.gradients:.1e} apart (bound {bound:.1e}); "
        f"furthest {one.gradients:.1e}, {one.worst}"
    )
    if without:
        found |= {"state": "failed", "seen": f"{len(without)} gradients are 0, first {without[0]}; {found['seen']}"}
    elif not whole.largest <= bound:
        found["state"] = "failed"


OPERATOR_CASES = {  # family, and whether it computes in bfloat16
    "Gemma 4, heads of 512": ("Gemma 4", True),
    "Gemma 2, capped at 50": ("Gemma 2", True),
    "Llama in float32": ("Llama", False),
}
CASE_SECONDS, CASE_SECONDS_ON_CPU = 120.0, 600.0  # after which a case is taken to hang


def operator(lines: Lines, *, shrunken: bool) -> None:
    """Attention that no flash kernel computes, by document inside a compiled layer: three models, all weights trained,
    each in a process of its own, which is ended after a minute, because a GPU once hung here without a message."""
    seconds = CASE_SECONDS_ON_CPU if shrunken else CASE_SECONDS
    for case in OPERATOR_CASES:
        before = lines.file.read_text("utf-8") if lines.file.is_file() else ""
        log = lines.file.with_suffix(".case.log")
        began = time.monotonic()
        words = [str(lines.file), case, *(["--shrunken"] if shrunken else [])]
        code = run_checks("operator", words, log, began + seconds)
        if code == 0:
            continue
        done = lines.file.read_text("utf-8").removeprefix(before).count("\n") if lines.file.is_file() else 0
        why = f"{OUT_OF_TIME}: {seconds:.0f} s" if code is None else f"it ended with {code}: {last_line(log)}"
        name = f"{case}, {('eager', 'compiled', 'at its end')[min(done, 2)]}"
        more = {"log": log.read_text("utf-8", errors="replace")[-TAIL:]}
        lines.add(name, "failed", why, time.monotonic() - began, **more)


def operator_case(lines: Lines, case: str, *, shrunken: bool) -> None:
    """One model of `operator`: loss and gradients beside the library's, eager and compiled."""
    import torch

    from finetune.probe.compare import library_side
    from finetune.probe.small_model import SmallModel

    family, bf16 = OPERATOR_CASES[case]
    device = torch.device("cpu" if shrunken else "cuda")
    with tempfile.TemporaryDirectory(prefix="finetune-operator-") as name:
        folder = Path(name)
        _save_layers(folder, device, _two_layers(family, shrunken=shrunken))
        recipe = _recipe(folder, None, recomputed=False, bf16=bf16)
        small = SmallModel(folder, "AutoModelForCausalLM", 2, 2, 0, frozenset(range(2)))
        side = library_side(recipe, small, device, torch.bfloat16 if bf16 else None, DOCUMENTS)
        _compare(lines, case, recipe, side, device, compiles=True, shrunken=shrunken)


def optimizer(lines: Lines, *, shrunken: bool) -> None:
    """RoundedAdamW's update as one kernel beside the update as written, on a billion bfloat16 weights: results, seconds
    a step, memory beside weights and state, graphs. Then pieces of a weight, which must be bitwise the whole. Last
    adamw_8bit's update over shards, on as many weights."""
    import torch

    from finetune.model.optimizers.fused_update import FusedUpdate, compare_updates, compiled_update

    device = torch.device("cpu" if shrunken else "cuda")
    shape, count = ((64, 48), 2) if shrunken else ((14336, 4096), 17)
    update = FusedUpdate(compiled_update("aot_eager" if shrunken else "inductor"))
    with lines.check("compiled and compared") as found:
        found["rounded_otherwise"] = compare_updates(update, torch.bfloat16, device)
        found["seen"] = f"{found['rounded_otherwise']:.2%} of the elements are rounded to the other neighbour"
    after: dict[str, list[torch.Tensor]] = {}
    for way, chosen in (("as written", None), ("one kernel", update)):
        with lines.check(f"{count * math.prod(shape):,} weights, {way}") as found:
            kept = _rounded_steps(chosen, shape, count, device, found)
            after[way] = [each.cpu() for each in kept]
            del kept
        if not shrunken:
            torch.cuda.empty_cache()
    with lines.check("their difference") as found:
        different = furthest = 0.0
        for ours, theirs in zip(after["one kernel"], after["as written"], strict=True):
            different += float((ours != theirs).double().mean()) / len(after["as written"])
            distance = (ours.float() - theirs.float()).abs() / theirs.float().abs().clamp(min=1e-3)
            furthest = max(furthest, float(distance.max()))
        found["figures"] = {"unequal": different, "furthest": furthest}
        found["seen"] = f"{different:.4%} of the elements unequal, furthest {furthest:.1e} relative (a step is 7.8e-03)"
        if different > 0.005 or furthest > 2**-6:
            found["state"] = "failed"
    with lines.check("pieces of a weight are bitwise the whole") as found:
        pieces = [0, 3, 35, 1000, 4000]
        if not shrunken:
            pieces += [1 << 20, (1 << 23) - 5, (1 << 23) + 77, 3 << 23]
        whole = _rounded_pieces(update, (0, pieces[-1]), device)
        unequal = int((_rounded_pieces(update, pieces, device) != whole).sum())
        found["seen"] = f"{unequal} of {len(whole):,} elements unequal"
        if unequal:
            found["state"] = "failed"
    with lines.check("graphs") as found:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]  # not public
        found["graphs"], found["seen"] = graphs, f"{graphs}, of all of these weights and pieces"
        if graphs != 1:
            found["state"] = "failed"
    for dtype in (torch.bfloat16, torch.float32):
        with lines.check(f"adamw_8bit over shards, {dtype}".replace("torch.", "")) as found:
            _blockwise_steps(dtype, shape, count, device, found, shrunken=shrunken)
        if not shrunken:
            torch.cuda.empty_cache()


def _blockwise_steps(
    dtype: Any, shape: Sequence[int], count: int, device: Any, found: dict[str, Any], *, shrunken: bool
) -> None:
    """BlockwiseAdamW's update as one kernel: compared as a training compares it, then timed on `count` weights."""
    import torch
    from torch import nn

    from finetune.model.optimizers.blockwise_adamw import BlockwiseAdamW
    from finetune.model.optimizers.fused_update import FusedBlocks, compare_updates, compiled_blocks

    update = FusedBlocks(compiled_blocks("aot_eager" if shrunken else "inductor"))
    shape = (64, 256) if shrunken else shape
    weights = [nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for _ in range(count)]
    optimizer = BlockwiseAdamW(weights, seed=1, in_float32=(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    (block,) = optimizer.block_lengths or {0}
    others = compare_updates(update, dtype, device, block)
    found["figures"] = {"block": block, "rounded_otherwise": others}
    found["seen"] = f"blocks of {block}, {others:.2%} of the elements are rounded to the other neighbour"
    optimizer.update_blocks = update
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    if shrunken:
        return
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    took, beside = milliseconds(optimizer.step, times=5), torch.cuda.max_memory_allocated() - before
    # Weight, gradient and weight again, two moments of a byte read and written.
    nbytes = (3 * dtype.itemsize + 4) * count * math.prod(shape)
    found["figures"] |= {"milliseconds": took, "bytes_beside": beside}
    found["seen"] += f"; {took:.1f} ms a step, {nbytes / took / 1e9:.2f} TB/s; {beside / 2**20:.1f} MiB"
    if beside > 1 << 20:
        found["state"] = "failed"


def _rounded_steps(update: Any, shape: Sequence[int], count: int, device: Any, found: dict[str, Any]) -> list[Any]:
    """Elements of weights and moments after two steps; fills `found` with the time and memory of more."""
    import torch
    from torch import nn

    from finetune.model.optimizers.rounded_adamw import RoundedAdamW

    generator = torch.Generator(device).manual_seed(0)

    def drawn() -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    weights = [nn.Parameter(drawn()) for _ in range(count)]
    optimizer = RoundedAdamW(weights, seed=1, lr=1e-3, weight_decay=0.1)
    for chosen in (None, update):
        for weight in weights:
            weight.grad = drawn()
        optimizer.update_range = chosen
        optimizer.step()
    some = slice(0, 1 << 20)
    states = [optimizer.state[weight] for weight in weights]
    kept = [weight.detach().view(-1)[some].clone() for weight in weights]
    kept += [state[name].view(-1)[some].clone() for state in states for name in ("exp_avg", "exp_avg_sq")]
    if device.type != "cuda":
        return kept
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    took = milliseconds(optimizer.step, times=5)
    beside = torch.cuda.max_memory_allocated() - before
    nbytes = 14 * count * math.prod(shape)
    found["figures"] = {"milliseconds": took, "bytes_beside": beside}
    found["seen"] = f"{took:.1f} ms a step, {nbytes / took / 1e9:.2f} TB/s of 14 bytes each; {beside / 2**20:.1f} MiB"
    if update is not None and beside > 1 << 20:
        found["state"] = "failed"
    return kept


def _rounded_pieces(update: Any, edges: Sequence[int], device: Any) -> Any:
    """A weight after two steps, updated in pieces that end at these edges."""
    import torch
    from torch import nn

    from finetune.model.optimizers.rounded_adamw import Range, RoundedAdamW

    generator = torch.Generator(device).manual_seed(0)

    def drawn() -> torch.Tensor:
        return torch.randn(edges[-1], generator=generator, device=device, dtype=torch.bfloat16)

    weight = nn.Parameter(drawn())
    optimizer = RoundedAdamW([weight], seed=1, lr=1e-3, weight_decay=0.1)
    optimizer.round_as((weight, Range(0, begin, begin, end)) for begin, end in itertools.pairwise(edges))
    optimizer.update_range = update
    for _ in range(2):
        weight.grad = drawn()
        optimizer.step()
    return weight.detach()


def proofs(lines: Lines, *, shrunken: bool) -> None:
    """The proofs of as many ranks as there are GPUs, those side by side that do not wait for each other: they are
    tiny, and most of a proof is imports."""
    machine = ProofMachine("cpu", "a CPU in a GPU's place", 1) if shrunken else find_gpus()
    planned = [_compiled_or_not(proof) for proof in plan_proofs(machine) if proof.ranks <= machine.count]
    with tempfile.TemporaryDirectory(prefix="finetune-proofs-") as name:
        folder = Path(name)
        bench = ProofBench(machine, write_proof_recipe(folder), {proof.name: proof for proof in planned})
        waiting, ok = list(planned), set[str]()
        ended = set[str]()
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
            while waiting:
                now = [proof for proof in waiting if not proof.of or proof.of in ended]
                waiting = [proof for proof in waiting if proof not in now]
                for done in as_completed([pool.submit(bench.outcome, proof, {*ok}) for proof in now]):
                    outcome = done.result()
                    ended.add(outcome["name"])
                    ok |= {outcome["name"]} if outcome["state"] == "ok" else set()
                    lines.add(**outcome, **_log_of(outcome, folder))


def _compiled_or_not(proof: Any) -> Any:
    if proof.name in COMPILED_PROOFS or proof.kind == "resume":
        return proof  # one that resumes has the settings of the training that it continues
    return replace(proof, settings={**proof.settings, "training.compile": False})


def _log_of(outcome: dict[str, Any], folder: Path) -> dict[str, str]:
    log = folder / outcome["name"].replace(" ", "_") / "run.log"
    if outcome["state"] != "failed" or not log.is_file():
        return {}
    return {"log": log.read_text("utf-8", errors="replace")[-TAIL:]}


def model(recipe_path: str, folder: Path, changes: Sequence[str], *, shrunken: bool) -> None:
    """The recipe's model in bfloat16, of random weights, and a tokenizer of its rows, in `folder`."""
    from finetune.recipe.loader import load_recipe
    from finetune.rehearse.shrink import END_TOKENS, sample_texts, shrink_model, train_tokenizer

    recipe = load_recipe(recipe_path, changes).recipe
    name = recipe.model.name_or_path
    if shrunken:
        shrink_model(name, recipe.model.revision, recipe.data, folder)
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.model.known_configs import full_config

    tokenizer = train_tokenizer(sample_texts(recipe.data))
    config, _ = full_config(name, recipe.model.revision)
    config |= {"bos_token_id": None, **END_TOKENS}  # the tokenizer's own
    for made_smaller, count in LAYERS.items():
        if made_smaller in name:
            config["num_hidden_layers"] = count
    with torch.device("cuda"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    half_made = folder.with_name(f"{folder.name}-half-made")  # it has its name when it is whole
    shutil.rmtree(half_made, ignore_errors=True)
    whole.save_pretrained(half_made)
    tokenizer.save_pretrained(half_made)
    half_made.rename(folder)


CHECKS: dict[str, Callable[..., None]] = {
    "environment": environment,
    "layers": layers,
    "operator": operator,
    "optimizer": optimizer,
    "proofs": proofs,
    "generate": generate,
    "peer": peer,
    "two_ranks": two_ranks,
    "offloading": offloading,
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=(*CHECKS, "model"))
    parser.add_argument("words", nargs="+", metavar="OUT.jsonl, or RECIPE FOLDER")
    parser.add_argument("--shrunken", action="store_true")
    asked = parser.parse_args(words)
    if asked.kind == "model":
        model(asked.words[0], Path(asked.words[1]), asked.words[2:], shrunken=asked.shrunken)
        return 0
    lines = Lines(Path(asked.words[0]))
    if asked.kind == "operator" and len(asked.words) > 1:
        operator_case(lines, asked.words[1], shrunken=asked.shrunken)
        return 0
    CHECKS[asked.kind](lines, shrunken=asked.shrunken)
    return 0


if __name__ == "__main__":
    sys.exit(main())
