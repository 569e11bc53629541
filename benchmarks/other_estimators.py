"""What other estimators say of publicly measured trainings: `accelerate estimate-memory` and DeepSpeed's, as installed.

    python benchmarks/other_estimators.py POINTS.csv

POINTS has a row a measurement: id, model, method, strategy, world, metric, measured, unit. Taken are peaks on a GPU of
models whose shape is known here; of GPT-2 large under DeepSpeed, whose readings are at the ends of phases, the largest
of three. Accelerate's answer is its own for "Training using Adam" in the point's number format: it takes no strategy,
batch or method. DeepSpeed's is for weights, gradients and states of ZeRO-2 and 3 with all weights trained, FSDP's too;
on one GPU, of ZeRO-2. Nothing is downloaded: Accelerate asks the Hub whether the model exists, and is answered here.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from accelerate.commands import estimate
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from transformers import AutoConfig, GPT2Config, LlamaConfig

from benchmarks.common import write_result
from finetune.model.known_configs import CONFIGS

UNITS = {"GiB": 2**30, "GB": 1e9}
SHIPPED = {
    "Llama-3.2-3B": "llama-3.2-3b",
    "Llama-3.1-8B": "llama-3.1-8b",
    "Llama-3.1-70B": "llama-3.3-70b",
    "Llama-3.1-405B": "llama-3.1-405b",
}
OTHERS = {
    "gpt2-large": GPT2Config(n_embd=1280, n_layer=36, n_head=20),
    "Llama-2-7B": LlamaConfig(),
    "Llama-2-70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    ),
}
PEAKS = ("reserved", "peak memory", "nvidia-smi", "allocated after forward")


def points(file: Path) -> Iterator[dict[str, Any]]:
    """The rows that an estimator can be asked about, with `bytes` measured."""
    for row in csv.DictReader(file.open(encoding="utf-8")):
        known = row["model"] in SHIPPED or row["model"] in OTHERS
        one_number = row["measured"].replace(".", "", 1).isdigit() and row["unit"] in UNITS
        parallel = any(word in row["strategy"] for word in ("TP", "PP", "CP"))
        if known and one_number and not parallel and any(word in row["metric"] for word in PEAKS):
            yield {**row, "bytes": float(row["measured"]) * UNITS[row["unit"]]}


def model_of(name: str) -> Any:
    """The model as Accelerate builds it, on meta."""
    config = OTHERS.get(name) or AutoConfig.for_model(**json.loads((CONFIGS / f"{SHIPPED[name]}.json").read_text()))
    known = SimpleNamespace(config={}, library_name="transformers")
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(estimate, "verify_on_hub", return_value=known):
        config.save_pretrained(folder)
        with redirect_stdout(io.StringIO()):
            return estimate.create_empty_model(folder, library_name="transformers")


def by_accelerate(model: Any, row: dict[str, Any]) -> float:
    total, _ = estimate.calculate_maximum_sizes(model)
    dtype = "float32" if row["precision"] == "fp32" else "float16" if "16" in row["precision"] else "bfloat16"
    return float(max(estimate.estimate_training_usage(total, dtype).values()))


def by_deepspeed(model: Any, row: dict[str, Any]) -> float | None:
    """None for ZeRO-1, of which DeepSpeed has no estimator."""
    total = sum({id(parameter): parameter.numel() for parameter in model.parameters()}.values())
    largest = max(sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules())
    strategy, offload = row["strategy"], "offload" in row["strategy"] or "offload" in row["conditions"]
    shape = {"num_gpus_per_node": int(row["world"] or 1), "num_nodes": 1, "cpu_offload": offload}
    if strategy.startswith(("ZeRO-3", "FSDP")):
        return float(estimate_zero3_model_states_mem_needs(total, largest, **shape, cpu_offload_params=offload)[1])
    if strategy == "ZeRO-1":
        return None
    return float(estimate_zero2_model_states_mem_needs(total, **shape)[1])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By group of points and estimator: how many, the median and the largest error, and how many are told too low."""
    found: dict[str, Any] = {}
    for row in rows:
        for name, error in row["errors"].items():
            found.setdefault(row["group"], {}).setdefault(name, []).append(error)
    return {
        group: {
            name: {
                "points": len(errors),
                "median_error": statistics.median(map(abs, errors)),
                "worst_error": max(errors, key=abs),
                "too_low": sum(error < 0 for error in errors),
            }
            for name, errors in estimators.items()
        }
        for group, estimators in found.items()
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    models: dict[str, Any] = {}
    rows = []
    for row in points(parser.parse_args(argv).points):
        model = models.get(row["model"]) or models.setdefault(row["model"], model_of(row["model"]))
        said = {"accelerate": by_accelerate(model, row), "deepspeed": by_deepspeed(model, row)}
        errors = {name: value / row["bytes"] - 1 for name, value in said.items() if value is not None}
        group = row["id"].split(":")[0].split("-")[0]
        rows.append({"id": row["id"], "group": group, "measured_bytes": row["bytes"], "said": said, "errors": errors})
    result = {"summary": summary(rows), "rows": rows}
    print(json.dumps(result["summary"], indent=1))
    print(write_result("other_estimators", result))


if __name__ == "__main__":
    main(sys.argv[1:])
