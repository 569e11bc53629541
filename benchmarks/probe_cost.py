"""CPU seconds of the probe of a model, the first time and the second, beyond what a training imports anyway.

python benchmarks/probe_cost.py        (a minute; on a quiet machine: neighbours make CPU seconds longer)

Each model in a process of its own, which has probed a tiny Llama first: that loads what libraries import late.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "google/gemma-3-4b-it", "google/gemma-3-12b-it")
TURNS = 3


def seconds_of(name: str) -> list[float]:
    """Of the first and of the second time, in this process."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    from finetune.model.known_configs import decoder_config
    from finetune.probe.probe import probe
    from tests.support.models.tiny import save_tiny
    from tests.support.runs.recipes import least_recipe

    with tempfile.TemporaryDirectory() as folder:
        os.environ["FINETUNE_CACHE"] = f"{folder}/cache"
        probe(least_recipe(save_tiny(Path(folder, "tiny")), lora={}))
        config = decoder_config(name)[0]
        MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[config["model_type"]]]  # its own module, which training imports
        seconds = []
        for _ in range(2):
            began = time.process_time()
            probe(least_recipe(name, lora={}), offline=True)
            seconds.append(time.process_time() - began)
    return seconds


def main() -> int:
    if sys.argv[1:]:
        print(json.dumps(seconds_of(sys.argv[1])))
        return 0
    from benchmarks.common import write_result

    rows = {}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for name in MODELS:
        command = [sys.executable, __file__, name]
        done = (
            subprocess.run(command, check=True, capture_output=True, text=True, env=environment) for _ in range(TURNS)
        )
        turns = [json.loads(each.stdout.splitlines()[-1]) for each in done]  # torch prints before it
        first, second = (statistics.median(each) for each in zip(*turns, strict=True))
        rows[name] = {"first": first, "second": second}
        print(f"{name}: {first:.2f} s, {second:.3f} s the second time", flush=True)
    print(write_result("probe_cost", {"what": "CPU seconds, median", "turns": TURNS, "models": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
