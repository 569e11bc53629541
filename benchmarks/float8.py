"""How far `model.load_in_fp8` moves a curve: SmolLM2-135M by LoRA, 50 steps with it and without it, on a CPU.

    python benchmarks/float8.py            (half an hour on one core: recipes/quickstart.yaml's data, 512 tokens a step)

A CPU emulates float8: numbers are quantised as on a GPU and multiplied in float32. Everything else is float32 on both
sides, because this kind of CPU emulates bfloat16 too. So the difference is float8's alone: rounding to bfloat16, 16
times finer, is not in it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from benchmarks.common import scratch, write_result

STEPS, LAST, BOUND = 50, 10, 0.01  # steps; steps whose mean loss is compared; the relative difference allowed
SETTINGS = {
    "training.max_steps": STEPS,
    "training.global_batch_size": 4,
    "training.per_device_batch_size": 4,
    "training.mixed_precision": "no",
    "training.warmup_steps": 5,
    "model.dtype": "float32",
    "data.max_length": 128,
    "data.truncation": "right",
    "data.eval": None,
    "training.early_stopping_patience": None,
    "training.load_best_model_at_end": False,
    "samples.count": 0,
    "save_steps": STEPS,
    "eval_steps": STEPS,
}


def curve(folder: Path, *, float8: bool) -> tuple[list[dict[str, Any]], float]:
    """A training's lines, one for each step, and its seconds."""
    run = folder / ("float8" if float8 else "float32")
    asked = SETTINGS | {"model.load_in_fp8": float8, "output_dir": str(run)}
    words = [f"{key}={json.dumps(value)}" for key, value in asked.items()]
    began = time.monotonic()
    command = [sys.executable, "finetune/train.py", str(ROOT / "recipes" / "quickstart.yaml"), *words]
    subprocess.run(command, cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line for line in lines if line["kind"] == "train"], time.monotonic() - began


def main() -> int:
    curves, seconds = {}, {}
    with scratch() as folder:
        for name, float8 in (("float32", False), ("float8", True)):
            curves[name], seconds[name] = curve(folder, float8=float8)
    losses = {name: [line["loss"] for line in lines] for name, lines in curves.items()}
    assert {len(each) for each in losses.values()} == {STEPS}
    pairs = list(zip(losses["float8"], losses["float32"], strict=True))
    last = {name: statistics.mean(each[-LAST:]) for name, each in losses.items()}
    result = {
        "steps": STEPS,
        "losses": losses,
        "gradient_norms": {name: [line["grad_norm"] for line in lines] for name, lines in curves.items()},
        "seconds": {name: round(each, 1) for name, each in seconds.items()},
        "first_relative": pairs[0][0] / pairs[0][1] - 1,
        "last_relative": pairs[-1][0] / pairs[-1][1] - 1,
        "furthest_relative": max(abs(ours / theirs - 1) for ours, theirs in pairs),
        "mean_of_last_relative": last["float8"] / last["float32"] - 1,
    }
    print(write_result("float8", result))
    print({key: value for key, value in result.items() if key.endswith("relative")})
    return int(abs(result["last_relative"]) > BOUND)


if __name__ == "__main__":
    sys.exit(main())
