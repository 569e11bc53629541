"""Are the tests a net? Realistic faults go into a copy of the code one at a time; each must turn a default test red.

    python benchmarks/seeded_faults.py [NAME ...] [--jobs 2]

A fault is a file of the package, a text in it (found exactly once), what replaces it, and the tests that must notice.
The same tests have to be green without a fault. It writes benchmarks/results/seeded_faults.json; with NAMEs, parts of
faults' names or files, it runs those alone and keeps what the file has of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from benchmarks.common import RESULTS, Fault, write_result
from benchmarks.faults_of_families import FAULTS_OF_FAMILIES
from benchmarks.faults_of_foreign_text import FAULTS_OF_FOREIGN_TEXT
from benchmarks.faults_of_gpus import FAULTS_OF_GPUS
from benchmarks.faults_of_launches import FAULTS_OF_LAUNCHES
from benchmarks.faults_of_lectures import FAULTS_OF_LECTURES
from benchmarks.faults_of_pipelines import FAULTS_OF_PIPELINES
from benchmarks.faults_of_runs import FAULTS_OF_RUNS
from benchmarks.faults_of_settings import FAULTS_OF_SETTINGS
from benchmarks.faults_of_strangers import FAULTS_OF_STRANGERS
from benchmarks.faults_of_updates import FAULTS_OF_UPDATES

COPIED = ("finetune", "tests", "benchmarks", "recipes", "accelerate_configs", "data", "docs", "pyproject.toml")
RECEIPT = "strategies/test_receipt.py"
FAULTS = (
    Fault(
        "the last incomplete chunk of the loss is dropped",
        "architecture/loss.py",
        "supervised.split(size))",
        "tuple(c for c in supervised.split(size) if len(c) == size))",
        "architecture/test_loss.py",
    ),
    Fault(
        "attention ignores the model's scale",
        "architecture/attention.py",
        "-0.5 if scaling is None else scaling",
        "-0.5",
        "architecture/test_attention.py -k one_document",
    ),
    Fault(
        "attention ignores the sliding window",
        "architecture/attention.py",
        "Attended(lengths, scale, sliding_window,",
        "Attended(lengths, scale, None,",
        "architecture/test_attention.py -k one_document",
    ),
    Fault(
        "the end of text is learned twice",
        "tokens/encoder.py",
        "completion = completion.removesuffix(end)",
        "pass",
        "tokens/test_encoder.py",
    ),
    Fault(
        "dropout is the same in every step",
        "training/step/seeds.py",
        "[plan.seed, step, plan.rank, *(",
        "[plan.seed, plan.rank, *(",
        "training/test_loop.py -k dropout",
    ),
    Fault(
        "dropout is the same on every rank",
        "training/step/seeds.py",
        "[plan.seed, step, plan.rank, *(",
        "[plan.seed, step, *(",
        "training/test_loop.py -k dropout",
    ),
    Fault(
        "an evaluation drops its last rows",
        "training/batch_plan.py",
        "range(0, len(rows), share)",
        "range(0, len(rows) - share + 1, share)",
        "training/test_loop.py -k evaluation",
    ),
    Fault(
        "files are renamed before they are synced",
        "files.py",
        "            os.fsync(file.fileno())\n        os.replace(temporary, path)",
        "        os.replace(temporary, path)",
        "run_folder/test_kill_points.py",
    ),
    Fault(
        "metrics are not synced before a checkpoint",
        "run_folder/checkpoint.py",
        "sync(lines)",
        "pass",
        "run_folder/test_kill_points.py",
    ),
    Fault(
        "a resumed run forgets its best evaluation",
        "run_folder/train_state.py",
        'float(saved["best_eval_loss"])',
        "math.inf",
        "training/test_loop.py -k json",
    ),
    Fault(
        "fp4 weights are taken for nf4",
        "model/quantization.py",
        "quant_type=quantization.bnb_4bit_quant_type",
        'quant_type="nf4"',
        "model/test_quantization.py",
    ),
    Fault(
        "a quantised layer loses its bias",
        "model/quantization.py",
        "bias = None if layer.bias is None else layer.bias.to(compute)",
        "bias = None",
        "model/test_quantization.py",
    ),
    Fault(
        "adapters' copies of modules stay in bfloat16",
        "model/adapters.py",
        "parameter.data = parameter.data.float()",
        "pass",
        "model/test_build.py",
    ),
    Fault(
        "FSDP reduces in the format of the computation",
        "strategies/fsdp.py",
        "reduce_dtype=compute_dtype and torch.float32",
        "reduce_dtype=compute_dtype",
        RECEIPT,
    ),
    Fault(
        "weights stay gathered after an evaluation",
        "strategies/fsdp.py",
        "            module.reshard()",
        "            pass",
        "strategies/test_fsdp.py",
    ),
    Fault(
        "ZeRO accumulates gradients in bfloat16",
        "strategies/zero.py",
        '"data_types": {"grad_accum_dtype": "fp32"}',
        '"data_types": {"grad_accum_dtype": "bf16"}',
        "strategies/test_zero_one_rank.py",
    ),
    Fault("the receipt refuses nothing", "strategies/receipt.py", "    if differing:", "    if False:", RECEIPT),
    Fault(
        "any optimizer state passes",
        "strategies/receipt.py",
        'if not set(dtypes.split(", ")) <= set(requested):',
        "if False:",
        RECEIPT,
    ),
    Fault(
        "an optimizer state that is not sharded passes",
        "strategies/receipt.py",
        "ranks > 1 and share > 0.9",
        "False",
        RECEIPT,
    ),
    *(
        Fault(f"the receipt does not look at {what}", "strategies/receipt.py", text, instead, RECEIPT)
        for what, text, instead in (
            ("the computation's format", 'computes, receipt["dtypes"]["compute"]),', "0, 0),"),
            ("the reduction's format", 'reduces, receipt["dtypes"]["reduce"]),', "0, 0),"),
            ("loss scaling", 'precision == "fp16", receipt["loss_scaling"] is not None),', "0, 0),"),
            ("attention", 'attention_name(recipe), receipt["attention"]),', "0, 0),"),
            ("the weights' format", 'expected_master, receipt["dtypes"]["master"]),', "0, 0),"),
            ("adapters", 'recipe.lora is not None, receipt["adapted_layers"] > 0),', "0, 0),"),
            ("trained weights", 'True, receipt["parameters"]["trained"] > 0),', "0, 0),"),
            ("sharded weights", 'receipt["sharding"]["sharded_parameters"] > 0,', "strategy.shards_parameters,"),
            (
                "quantised layers",
                '_asked_layers(recipe), list(receipt["quantized_layers"])),',
                "0, 0),",
            ),
            (
                "recomputed layers",
                '            receipt["checkpointed_layers"],',
                "            -(-receipt['layers'] // every) if every else 0,",
            ),
        )
    ),
    Fault(
        "Google's keys are not secrets",
        "redaction.py",
        '    ("a Google key", r"\\bAIza[0-9A-Za-z_-]{35}"),\n',
        "",
        "test_redaction.py",
    ),
    Fault(
        "private keys are not secrets",
        "redaction.py",
        '("a private key", r"-----BEGIN',
        '("a private key", r"-----BEGUN',
        "test_redaction.py",
    ),
    Fault(
        "a merge adds in the base's format",
        "finished_run/merge.py",
        "adapter.merged(layer, weight.float())",
        "adapter.merged(layer, weight)",
        "finished_run/test_merge.py",
    ),
    Fault(
        "the allocator splits off a rest of exactly 1 MiB",
        "planner/depth/caching_allocator.py",
        "remainder > SMALL)",
        "remainder >= SMALL)",
        "planner/test_caching_allocator.py",
    ),
    *FAULTS_OF_SETTINGS,
    *FAULTS_OF_UPDATES,
    *FAULTS_OF_FAMILIES,
    *FAULTS_OF_GPUS,
    *FAULTS_OF_RUNS,
    *FAULTS_OF_STRANGERS,
    *FAULTS_OF_FOREIGN_TEXT,
    *FAULTS_OF_LECTURES,
    *FAULTS_OF_LAUNCHES,
    *FAULTS_OF_PIPELINES,
)


def run_tests(fault: Fault, *, seeded: bool) -> tuple[bool, float, str]:
    """Whether the tests were red, how long they took, and their last line."""
    with tempfile.TemporaryDirectory(prefix="seeded-") as folder:
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, Path(folder, name))
        if seeded:
            file = Path(folder, "finetune", fault.file)
            text = file.read_text("utf-8")
            assert text.count(fault.text) == 1, (
                f"{fault.name}: its text is {text.count(fault.text)} times in {file.name}"
            )
            file.write_text(text.replace(fault.text, fault.instead), "utf-8")
        began, (path, *options) = time.monotonic(), fault.tests.split()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-n0",
            "-p",
            "no:cacheprovider",
            f"tests/{path}",
            *options,
        ]
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED") or " passed" in line]
        assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
        return done.returncode == 1, time.monotonic() - began, lines[0] if lines else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults whose name or file holds one of these; none: all")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if not options.names or any(map(fault.is_named, options.names))]
    clean = list({fault.tests: fault for fault in chosen}.values())
    with ThreadPoolExecutor(options.jobs) as pool:
        unseeded = list(pool.map(lambda fault: run_tests(fault, seeded=False), clean))
        for fault, (red, _, line) in zip(clean, unseeded, strict=True):
            print(f"{'RED ' if red else 'green'}  without a fault: {fault.tests}: {line}", flush=True)
        rows = []
        for fault, (red, seconds, line) in zip(
            chosen, pool.map(lambda f: run_tests(f, seeded=True), chosen), strict=True
        ):
            print(f"{'red' if red else 'NOT NOTICED'}  {seconds:5.1f} s  {fault.name}: {line}", flush=True)
            seen = {"fault": fault.name, "file": fault.file, "tests": fault.tests, "noticed": red}
            rows.append(seen | {"by": line.removeprefix("FAILED ").partition(" - ")[0]})
    if not any(red for red, _, _ in unseeded):
        file = RESULTS / "seeded_faults.json"
        kept = json.loads(file.read_text("utf-8"))["faults"] if options.names and file.is_file() else []
        found = {row["fault"]: row for row in [*kept, *rows]}
        write_result("seeded_faults", {"faults": [found[fault.name] for fault in FAULTS if fault.name in found]})
    return 0 if all(row["noticed"] for row in rows) and not any(red for red, _, _ in unseeded) else 1


if __name__ == "__main__":
    sys.exit(main())
