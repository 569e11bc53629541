"""The proofs of `finetune doctor --gpu`, then every recipe for one GPU: tokens a second, peak memory, the receipt.

    python benchmarks/gpu.py                    (one or two minutes a recipe after ten of proofs)
    python benchmarks/gpu.py RECIPE ...         (some recipes, without the proofs)
    python benchmarks/gpu.py --shrunken         (without a GPU: tries this script itself on small models)

Llama 3.2 1B and 3.1 8B with random weights from their configurations, which is what memory and speed depend on. Each
recipe trains as it stands, but for the device's budget, rows drawn here that fill `max_length`, two micro-batches a
step and no checkpoint: once for speed, with nothing measured beside it, and a few steps more for the memory of each
phase. Writes benchmarks/results/gpu.json, and gpu.md to be read, after the proofs and each recipe, and keeps what it
has of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import RESULTS, write_result
from finetune.files import read_lines
from finetune.model.known_configs import full_config
from finetune.preflight.gpu_proof.command import prove_gpus
from finetune.preflight.gpu_proof.machine import ProofMachine
from finetune.preflight.job_failure import failure_reason
from finetune.preflight.shrink import sample_texts, shrink_model, shrunken_config, train_tokenizer
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("Llama-3.2-1B", "Llama-3.1-8B")
STEPS, SKIPPED = 20, 5  # the first steps warm caches and the allocator
MEMORY_STEPS = 3  # of a second run: AdamW's state is there from the second on
MICRO_STEPS = 2


def recipes() -> dict[str, Path]:
    """The recipes for one GPU and one of the two models."""
    found = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.yaml"))}
    return {name: path for name, path in found.items() if _is_for_one_gpu(load_recipe(str(path), []).recipe)}


def _is_for_one_gpu(recipe: Recipe) -> bool:
    name = recipe.model.name_or_path
    return recipe.budget.gpus == recipe.budget.nodes == 1 and any(model in name for model in MODELS)


def random_model(recipe: Recipe, folder: Path, *, shrunken: bool) -> Path:
    """A folder with the recipe's model in bfloat16, of random weights, and a tokenizer of the recipe's rows."""
    name = recipe.model.name_or_path
    place = folder / (Path(name).name + "-shrunken" * shrunken)
    if place.is_dir():
        return place
    if shrunken:
        return shrink_model(name, recipe.model.revision, recipe.data, place).folder
    tokenizer = train_tokenizer(sample_texts(recipe.data))
    config, _ = full_config(name, recipe.model.revision)
    special = shrunken_config(config, len(tokenizer))  # the tokenizer's own special tokens, whatever the size
    config |= {key: special[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    del model
    torch.cuda.empty_cache()
    return place


def write_rows(file: Path, *, tokens: int, max_length: int) -> Path:
    """Chats of random words, nearly all of them learned, a sixth to nearly all of `max_length` long."""
    draw = random.Random(0)
    words = ["the", "river", "turns", "a", "wheel", "that", "was", "built", "by", "hand", "in", "spring"]
    with file.open("w", encoding="utf-8") as out:
        while tokens > 0:
            length = draw.randint(max_length // 6, max_length * 4 // 9)
            answer = " ".join(draw.choices(words, k=length))  # a word is one token or two here
            chat = [{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": chat}) + "\n")
            tokens -= length
    return file


def measure(path: Path, folder: Path, *, shrunken: bool) -> dict[str, Any]:
    """One recipe's figures: a row of the results.

    Its speed is that of a run without `measure_phases`, which waits for the GPU at the end of each phase and looks at
    each operation from Python: 0.3 to 0.5 s of a step whose kernels take 0.34 s.
    """
    run_dir, reason = train(path, folder, shrunken=shrunken, phases=False)
    if reason:
        return {"ok": False, "reason": reason}
    row = {"ok": True, **speed(run_dir)}
    run_dir, reason = train(path, folder, shrunken=shrunken, phases=True, steps=MEMORY_STEPS)
    return {"ok": False, "reason": reason} if reason else row | {"phases": memory(run_dir)}


def train(
    path: Path,
    folder: Path,
    changes: Sequence[str] = (),
    *,
    shrunken: bool,
    phases: bool,
    steps: int | None = None,
) -> tuple[Path, str | None]:
    """A recipe, with `changes` as key=value, for `steps` on rows that fill it: the run's folder, and why it failed, if
    it did. With `phases` each phase is measured, at the cost of speed."""
    recipe, steps = load_recipe(str(path), changes).recipe, steps or STEPS
    training, length = recipe.training, recipe.data.max_length
    rows = MICRO_STEPS * training.per_device_batch_size
    run_dir, data = folder / "run", folder / "rows.jsonl"
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = {
        "output_dir": str(run_dir),
        "model.name_or_path": str(random_model(recipe, folder, shrunken=shrunken)),
        "data.train": [{"path": "json", "data_files": str(write_rows(data, tokens=rows * length, max_length=length))}],
        "data.eval": None,
        "training.max_steps": steps,
        "training.global_batch_size": rows,
        "training.warmup_steps": 0,
        "training.warmup_ratio": 0,
        "training.early_stopping_patience": None,
        "training.load_best_model_at_end": None,
        "samples.count": 0,
        "logging_steps": 1,
        "save_steps": steps,
        "measure_phases": phases,
    }
    settings |= {"budget.gpus": 0} if shrunken else {"budget.gpu_memory_gb": _memory_gb()}
    words = [*changes, *(f"{key}={json.dumps(value)}" for key, value in settings.items())]
    launch = ["--cpu"] if shrunken else []
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, "--num_processes", "1"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "FINETUNE_CACHE": str(folder / "cache")}
    command += ["finetune/train.py", str(path), *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return run_dir, failure_reason(run_dir, done.stdout + done.stderr) if done.returncode else None


def _memory_gb() -> float:
    return round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1)


def speed(run_dir: Path) -> dict[str, Any]:
    """Of a finished run: median speed after the first steps, and the receipt."""
    train = [line for line in read_lines(run_dir / "metrics.jsonl") if line["kind"] == "train"][SKIPPED:]
    return {
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in train),
        "step_seconds": statistics.median(line["step_seconds"] for line in train),
        "final_loss": train[-1]["loss"],
        "receipt": json.loads((run_dir / "receipt.json").read_text("utf-8")),
    }


def memory(run_dir: Path) -> dict[str, dict[str, float]]:
    """Of a run that measured its phases: the peak of each, and what stays allocated after it."""
    phases: dict[str, dict[str, float]] = {}
    for line in (line for line in read_lines(run_dir / "metrics.jsonl") if line["kind"] == "phase"):
        phase = phases.setdefault(line["phase"], {"peak_gib": 0.0, "allocated_gib": 0.0})
        for key in phase:
            phase[key] = max(phase[key], line[key])
    return phases


def prove(*, shrunken: bool) -> dict[str, Any]:
    """The report of the proofs, which are printed; `shrunken` on a CPU in the GPU's place."""
    machine = ProofMachine("cpu", "a CPU in a GPU's place", 1) if shrunken else None
    return prove_gpus(lambda line: print(line, flush=True), machine)


def save(proofs: Mapping[str, Any] | None, rows: Mapping[str, Any]) -> None:
    """gpu.json, and gpu.md that shows it."""
    file = write_result("gpu", {"proofs": proofs, "recipes": rows})
    page = page_lines(json.loads(file.read_text("utf-8")))
    file.with_suffix(".md").write_text("\n".join(page) + "\n", "utf-8")


def page_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The page of gpu.json: a table of the proofs, one of the recipes, one of their memory; failures with reasons."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    yield f"# On one GPU: {result['device']}\n\nWritten by `python benchmarks/gpu.py`, {result['date']}; {versions}."
    yield "\n## Proofs\n"
    if result["proofs"] is None:
        yield "Not run."
    else:
        yield "| proof | what is shown | | seconds | seen |\n|---|---|---|---:|---|"
        for proof in result["proofs"]["proofs"]:
            cells = (proof["name"], proof["claim"], proof["state"], f"{proof['seconds']:.0f}", proof["seen"])
            yield f"| {' | '.join(cells)} |"
    yield "\n## Speed, with nothing measured beside it\n"
    yield "| recipe | tokens a second | seconds a step |\n|---|---:|---:|"
    for name, row in result["recipes"].items():
        speeds = f"{row['tokens_per_second']:,.0f} | {row['step_seconds']:.3f}" if row["ok"] else f"{row['reason']} |"
        yield f"| {name} | {speeds} |"
    phases = list(dict.fromkeys(phase for row in result["recipes"].values() for phase in row.get("phases", {})))
    yield "\n## Memory, of a second run: GiB at the peak of each phase\n"
    yield f"| recipe | {' | '.join(phases)} |\n|---|{'---:|' * len(phases)}"
    for name, row in result["recipes"].items():
        if row["ok"]:
            peaks = [f"{row['phases'][phase]['peak_gib']:.2f}" if phase in row["phases"] else "" for phase in phases]
            yield f"| {name} | {' | '.join(peaks)} |"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="RECIPE")
    parser.add_argument("--shrunken", action="store_true", help="small models on the CPU; prints, writes nothing")
    arguments = parser.parse_args(words)
    every, shrunken = recipes(), arguments.shrunken
    if unknown := [name for name in arguments.names if name not in every]:
        parser.error(f"no recipe for one GPU and {' or '.join(MODELS)}: {', '.join(unknown)}")
    if not shrunken and not torch.cuda.is_available():
        parser.error("no GPU here; --shrunken tries the script without one")
    file = RESULTS / "gpu.json"
    known = json.loads(file.read_text("utf-8")) if file.is_file() and not shrunken else {}
    proofs, found = known.get("proofs"), known.get("recipes", {})
    if not arguments.names:
        proofs = prove(shrunken=shrunken)
    with tempfile.TemporaryDirectory() as folder:
        for name in (asked := arguments.names or list(every)):
            if not shrunken:
                save(proofs, {key: found[key] for key in every if key in found})
            found[name] = row = measure(every[name], Path(folder), shrunken=shrunken)
            said = f"{row['tokens_per_second']:,.0f} tokens/s" if row["ok"] else row["reason"]
            print(f"{name}: {said}", flush=True)
    if not shrunken:
        save(proofs, {key: found[key] for key in every if key in found})
    proved = bool(arguments.names) or (proofs is not None and proofs["ok"])
    return 0 if proved and all(found[name]["ok"] for name in asked) else 1


if __name__ == "__main__":
    sys.exit(main())
