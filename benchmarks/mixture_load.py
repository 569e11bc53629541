"""How much host memory a mixture takes while it is loaded in 4 bits: gpt-oss-20b in 1 GB, on a CPU.

    python benchmarks/mixture_load.py            (five minutes on one core, 5 GB of disk, 3 GB of memory)

It has the 24 layers and 32 experts of gpt-oss-20b, whose widths are divided by 3.5.

Once from files in MXFP4, as OpenAI publishes them, and once from files in bfloat16, whose experts become NF4 with
double quantisation. A child process loads each by the kit's own `build_model`, as a training does. The increase of what
the process holds is sampled every 5 ms and compared with the quantised bytes. Two increases are recorded:
memory that the process must have (anonymous and shared pages), and with it the pages of mapped files, which the kernel
takes back when it needs them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import scratch, write_result

EXPERTS, HIDDEN, LAYERS, VOCABULARY = 32, 832, 24, 8192  # experts' width is HIDDEN too
BOUND = 1.2  # times the quantised file, or the model where the file is in bfloat16
KINDS = ("mxfp4", "nf4")


def write_base(folder: Path, kind: str) -> None:
    """A base of random numbers, a file for each layer and one for the rest."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "num_local_experts": EXPERTS}
    settings |= {"num_attention_heads": 16, "num_key_value_heads": 2}
    config = AutoConfig.for_model("gpt_oss", **settings, hidden_size=HIDDEN, intermediate_size=HIDDEN)
    config.architectures = ["GptOssForCausalLM"]
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    files: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in shapes.items():
        file = f"layer-{name.split('.')[2]}.safetensors" if ".layers." in name else "rest.safetensors"
        files.setdefault(file, {})[name] = tensor.shape
    folder.mkdir()
    index: dict[str, str] = {}
    for file, wanted in files.items():
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in wanted.items():
            if kind == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                groups = (shape[0], shape[2], shape[1] // 32)
                tensors[f"{name}_blocks"] = torch.randint(256, (*groups, 16), dtype=torch.uint8)
                tensors[f"{name}_scales"] = torch.randint(119, 122, groups, dtype=torch.uint8)
            else:
                tensors[name] = 0.02 * torch.randn(shape, dtype=torch.bfloat16)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    written = json.loads(config.to_json_string())
    if kind == "mxfp4":
        written["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(written), "utf-8")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}), "utf-8")


def held() -> tuple[int, int]:
    """Bytes that this process holds: those that it must have, and all with the pages of mapped files."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    own = kib["RssAnon"] + kib["RssShmem"]
    return 1024 * own, 1024 * (own + kib["RssFile"])


def load(folder: Path) -> dict[str, Any]:
    """Load the base in this process, with adapters on attention: the largest increase meanwhile."""
    from finetune.model.build import build_model
    from finetune.recipe.schema import Recipe

    content = {
        "model": {"name_or_path": str(folder), "dtype": "bfloat16"},
        "quantization": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        "lora": {"target_modules": ["q_proj", "v_proj"], "target_parameters": []},
        "data": {"train": [{"path": "json"}]},
    }
    recipe = Recipe.model_validate(content)
    build_model(recipe, torch.device("meta"))  # whatever is imported and allocated once
    before, peak, ended = held(), [0, 0], threading.Event()

    def sample() -> None:
        while not ended.is_set():
            for place, now in enumerate(held()):
                peak[place] = max(peak[place], now - before[place])
            time.sleep(0.005)

    watch = threading.Thread(target=sample)
    watch.start()
    began = time.monotonic()
    model = build_model(recipe, torch.device("cpu"))
    seconds = time.monotonic() - began
    ended.set()
    watch.join()
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return {
        "model_bytes": sum(tensors.values()),
        "increase_bytes": peak[0],
        "increase_with_files_bytes": peak[1],
        "seconds": round(seconds, 1),
    }


def main() -> int:
    if len(sys.argv) > 1:
        print(json.dumps(load(Path(sys.argv[1]))))
        return 0
    result: dict[str, Any] = {"bound": BOUND}
    with scratch() as folder:
        for kind in KINDS:
            write_base(folder / kind, kind)
            done = subprocess.run([sys.executable, __file__, str(folder / kind)], check=True, capture_output=True)
            figures = json.loads(done.stdout.splitlines()[-1])
            figures["file_bytes"] = sum(file.stat().st_size for file in (folder / kind).glob("*.safetensors"))
            quantised = figures["file_bytes"] if kind == "mxfp4" else figures["model_bytes"]
            figures["times_the_quantised"] = round(figures["increase_bytes"] / quantised, 3)
            result[kind] = figures
            print(kind, figures, flush=True)
    print(write_result("mixture_load", result))
    return int(any(result[kind]["times_the_quantised"] > BOUND for kind in KINDS))


if __name__ == "__main__":
    sys.exit(main())
