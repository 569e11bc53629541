"""What gpu.py runs in processes of their own: the environment, the kit's layers, its proofs, a random model.

    python benchmarks/gpu_checks.py environment OUT.jsonl
    python benchmarks/gpu_checks.py layers OUT.jsonl
    python benchmarks/gpu_checks.py proofs OUT.jsonl
    python benchmarks/gpu_checks.py model RECIPE FOLDER [key=value ...]

`--shrunken` computes on the CPU, with small sizes. OUT.jsonl gets a line for each check as soon as it is known: name,
state (ok, failed, not run), seconds and what was seen; a failure may have a log.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
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
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

PACKAGES = tuple(
    "torch triton transformers tokenizers safetensors huggingface_hub accelerate peft pydantic numpy datasets "
    "bitsandbytes deepspeed torchao".split()
)
MODULES = ("finetune.train", "finetune.training.session", "finetune.planner.plan_recipe", "finetune.preflight.doctor")
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

    from finetune.model.small import SmallModel
    from finetune.probe.compare import library_side
    from finetune.recipe.schema import Recipe

    device = torch.device("cpu" if shrunken else "cuda")
    with tempfile.TemporaryDirectory(prefix="finetune-layers-") as name:
        folder = Path(name)
        vocabulary = _save_layers(folder, device, shrunken=shrunken)
        small = SmallModel(folder, "LlamaForCausalLM", 2, 1, 0, frozenset())
        lora = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
        for way, adapters, recomputed, compute in (
            ("LoRA in bfloat16", lora, False, torch.bfloat16),
            ("LoRA in bfloat16, recomputed", lora, True, torch.bfloat16),
            ("all weights, float32 in bfloat16", None, False, torch.bfloat16),
            ("LoRA in float32", lora, False, None),
        ):
            recipe = Recipe.model_validate(
                {
                    "model": {"name_or_path": str(folder), "dtype": "bfloat16" if adapters and compute else "float32"},
                    "lora": adapters,
                    "data": {"train": [{"path": "json", "data_files": "none.jsonl"}], "max_length": 2048},
                    "training": {
                        "activation_checkpointing": recomputed,
                        "mixed_precision": "bf16" if compute else "no",
                        "max_steps": 1,
                        "learning_rate": 1e-4,
                    },
                }
            )
            side = library_side(recipe, small, device, compute)
            side.documents = _documents(vocabulary)
            side.__post_init__()  # its own figures, of these documents
            _compare(lines, way, recipe, side, device, shrunken=shrunken)
            del side
            if not shrunken:
                torch.cuda.empty_cache()


def _save_layers(folder: Path, device: Any, *, shrunken: bool) -> int:
    """A Llama of two layers in a folder, of 8B's widths unless it is shrunken; the size of its vocabulary."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    narrow = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "llama",
        vocab_size=512 if shrunken else 32_768,
        num_hidden_layers=2,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **(narrow if shrunken else wide),
    )
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for name, weight in model.named_parameters():
            if weight.ndim < 2:  # norms: of 1 alone a wrong one could not be told
                weight.add_(0.3 * torch.randn_like(weight))
            else:
                weight.normal_(std=0.5 if "embed" in name else weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return int(config.vocab_size)


def _documents(vocabulary: int) -> Any:
    from finetune.probe.documents import probe_documents

    return probe_documents(vocabulary, frozenset(range(2)), lengths=DOCUMENTS)


def _compare(lines: Lines, way: str, recipe: Any, side: Any, device: Any, *, shrunken: bool) -> None:
    """The kit's model as the recipe builds it, beside the library's: eager, and compiled where it is in 16 bits."""
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
    if eager is None or side.compute is None or (recipe.lora and not recipe.training.activation_checkpointing):
        return  # adapters without recomputation are compiled, and compared by the guard, in the recipe of 8B
    with lines.check(f"{way}, compiled") as found:
        compiled = CompiledLayers(required=False, log=lambda line: print(line, flush=True))
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


def proofs(lines: Lines, *, shrunken: bool) -> None:
    """The proofs of `finetune doctor --gpu` on one GPU, those side by side that do not wait for each other: they are
    tiny, and most of a proof is imports."""
    from finetune.preflight import ProofBench, ProofMachine, find_gpus, plan_proofs, write_proof_recipe

    machine = ProofMachine("cpu", "a CPU in a GPU's place", 1) if shrunken else replace(find_gpus(), count=1)
    planned = [_compiled_or_not(proof) for proof in plan_proofs(machine) if proof.ranks == 1]
    with tempfile.TemporaryDirectory(prefix="finetune-proofs-") as name:
        folder = Path(name)
        bench = ProofBench(machine, write_proof_recipe(folder), {proof.name: proof for proof in planned})
        waiting, ok = list(planned), set[str]()
        ended = set[str]()
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
            while waiting:
                now = [proof for proof in waiting if not proof.of or proof.of in ended]
                waiting = [proof for proof in waiting if proof not in now]
                lacking = partial(_lacking, ok)
                for done in as_completed([pool.submit(bench.outcome, proof, lacking(proof)) for proof in now]):
                    outcome = done.result()
                    ended.add(outcome["name"])
                    ok |= {outcome["name"]} if outcome["state"] == "ok" else set()
                    lines.add(**outcome, **_log_of(outcome, folder))


def _compiled_or_not(proof: Any) -> Any:
    if proof.name in COMPILED_PROOFS or proof.kind in ("resume", "export"):
        return proof  # one that resumes has the settings of the training that it continues
    return replace(proof, settings={**proof.settings, "training.compile": False})


def _lacking(ok: set[str], proof: Any) -> str:
    return proof.missing or (f"there is no {proof.of} to compare with" if proof.of and proof.of not in ok else "")


def _log_of(outcome: dict[str, Any], folder: Path) -> dict[str, str]:
    log = folder / outcome["name"].replace(" ", "_") / "run.log"
    if outcome["state"] != "failed" or not log.is_file():
        return {}
    return {"log": log.read_text("utf-8", errors="replace")[-TAIL:]}


def model(recipe_path: str, folder: Path, changes: Sequence[str], *, shrunken: bool) -> None:
    """The recipe's model in bfloat16, of random weights, and a tokenizer of its rows, in `folder`."""
    from finetune.preflight import END_TOKENS, sample_texts, shrink_model, train_tokenizer
    from finetune.recipe.loader import load_recipe

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
    with torch.device("cuda"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    half_made = folder.with_name(f"{folder.name}-half-made")  # it has its name when it is whole
    shutil.rmtree(half_made, ignore_errors=True)
    whole.save_pretrained(half_made)
    tokenizer.save_pretrained(half_made)
    half_made.rename(folder)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("environment", "layers", "proofs", "model"))
    parser.add_argument("words", nargs="+", metavar="OUT.jsonl, or RECIPE FOLDER")
    parser.add_argument("--shrunken", action="store_true")
    asked = parser.parse_args(words)
    if asked.kind == "model":
        model(asked.words[0], Path(asked.words[1]), asked.words[2:], shrunken=asked.shrunken)
        return 0
    checks = {"environment": environment, "layers": layers, "proofs": proofs}
    checks[asked.kind](Lines(Path(asked.words[0])), shrunken=asked.shrunken)
    return 0


if __name__ == "__main__":
    sys.exit(main())
