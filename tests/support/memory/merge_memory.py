"""What merging holds: a process of its own that merges a run and prints the most anonymous memory it had.

Anonymous alone: pages of the base's files, which safetensors maps, are the kernel's to take back at any time.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path

import torch


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main(run: Path, dtype: str, shard_bytes: int, dequantized: bool) -> None:
    from finetune.finished_run import finished_run
    from finetune.hand_over import merged_weights as merge

    merge.SHARD_BYTES = shard_bytes
    device = torch.device("cpu")
    planned = merge.plan_merge(finished_run(run).recipe, run, device)
    largest = max(planned.shapes(), key=lambda name: torch.Size(planned.shapes()[name]).numel())
    # What is imported and set up at the first use is no part of the merge.
    planned.tensor(next(name for name in planned.shapes() if "q_proj" in name), torch.float32, dequantized=dequantized)
    before, seen, done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen[0] = max(seen[0], anonymous_bytes())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    chosen = getattr(torch, dtype)
    merge.write_merged(planned, run / "written", chosen, dequantized=dequantized, say=lambda _: None)
    done.set()
    watcher.join()
    files = [path.stat().st_size for path in (run / "written").glob("*.safetensors")]
    layer = torch.Size(planned.shapes()[largest]).numel() * 4
    print(json.dumps({"held": seen[0] - before, "shard": max(files), "layer": layer, "model": sum(files)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "dequantized")
