"""Several short trainings under DeepSpeed in one process group: `torchrun tests/zero_worker.py FOLDER JOBS.json`.

Each job names a strategy and a method; its curve and what was seen of the engine go to FOLDER/NAME.json.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetune import attention
from finetune.loop import NotFinite, optimizer_step
from finetune.model import _add_adapters, put_loss_into_forward
from finetune.optimizer import make_optimizer
from finetune.phases import Phases
from finetune.recipe import Lora
from finetune.zero import prepare_zero, require_deepspeed, zero_environment, zero_plugin
from finetune.zero_pieces import full_weights, load_pieces, sharded_share, trained_pieces
from tests.tiny import flat_batch

MICRO_BATCHES = 4  # of a step, over all ranks
PEAK, MAX_GRAD_NORM, WEIGHT_DECAY = {"full": 3e-3, "lora": 5e-3, "qlora": 5e-3}, 0.5, 0.1
LORA = Lora(r=4, lora_alpha=16.0, target_modules="all-linear")


def lengths_of(step: int, index: int) -> tuple[int, int]:
    return 7 + step, 12 + 3 * index


def micro_batches(step: int) -> list[dict[str, Any]]:
    return [flat_batch(lengths_of(step, index), seed=10 * step + index) for index in range(MICRO_BATCHES)]


def learning_rate(method: str, step: int, steps: int) -> float:
    return PEAK[method] * (steps - step) / steps


def settings_of(strategy: str) -> dict[str, Any]:
    import yaml

    file = Path(__file__).resolve().parent.parent / "accelerate_configs" / f"{strategy}.yaml"
    return dict(yaml.safe_load(file.read_text("utf-8")))


def build(job: dict[str, Any], folder: Path) -> tuple[Accelerator, Any, Any]:
    training = SimpleNamespace(
        per_device_batch_size=1,
        max_grad_norm=MAX_GRAD_NORM,
        mixed_precision=job.get("precision", "no"),
        pure_bf16=False,
        weight_decay=WEIGHT_DECAY,
        learning_rate=1.0,
        optim="adamw",
    )
    recipe: Any = SimpleNamespace(training=training, run_dir=str(folder / job["name"]))
    settings = settings_of(job["strategy"])
    require_deepspeed(job["strategy"], settings)
    world = int(os.environ["WORLD_SIZE"])
    plugin = zero_plugin(recipe, settings, world_size=world, on_cpu=True)
    handlers = [InitProcessGroupKwargs(backend="gloo")]
    precision = training.mixed_precision
    accelerator = Accelerator(mixed_precision=precision, deepspeed_plugin=plugin, kwargs_handlers=handlers)
    model = base_model(job, folder)
    return accelerator, *prepare_zero(accelerator, model, make_optimizer(model, recipe))


def base_model(job: dict[str, Any], folder: Path) -> Any:
    options: dict[str, Any] = {}
    dtype = torch.bfloat16 if job.get("precision") == "bf16" else torch.float32
    if job["method"] == "qlora":
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype,
        )
    model = AutoModelForCausalLM.from_pretrained(
        folder / job.get("model", "tiny"), dtype=dtype, attn_implementation=attention.NAME, **options
    )
    model.config.use_cache = False
    put_loss_into_forward(model)
    if job["method"] == "full":
        return model
    torch.manual_seed(3)
    return _add_adapters(model, LORA, False)


def run(job: dict[str, Any], folder: Path) -> None:
    accelerator, model, optimizer = build(job, folder)
    first = 0
    if "resume" in job:
        first = job["from_step"]
        load_pieces(model, reader(folder / job["resume"]), step=first)
    model.train()
    curve = []
    for step in range(first, job["stop"]):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job["method"], step, job["steps"])
        batches = micro_batches(step)
        mine = batches[accelerator.process_index :: accelerator.num_processes]
        result = optimizer_step(
            accelerator,
            model,
            optimizer,
            iter(mine),
            micro_steps=len(mine),
            supervised_tokens=sum(int((batch["shift_labels"] != -100).sum()) for batch in batches),
            max_grad_norm=MAX_GRAD_NORM,
            seed=step,
            stop=False,
            phases=Phases(accelerator.device, False),
        )
        curve.append((result.loss, result.grad_norm))
    facts: dict[str, Any] = {"curve": curve, "sharded": sharded_share(model)}
    facts["swapped_bytes"] = sum(file.stat().st_size for file in (folder / job["name"]).rglob("*.swp"))
    save_pieces(trained_pieces(model), folder / job["name"])
    whole = {name: tensor.float().clone() for name, tensor in full_weights(model)}
    if "bad" in job:
        facts["bad"] = spoil(accelerator, model, optimizer, whole)
    if accelerator.is_main_process:
        save_file(whole, folder / f"{job['name']}.safetensors")
        (folder / f"{job['name']}.json").write_text(json.dumps(facts), "utf-8")
    model.destroy()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def spoil(accelerator: Accelerator, model: Any, optimizer: Any, before: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One step with a loss that is not finite on the last rank only; then whether anything moved."""
    last = accelerator.process_index == accelerator.num_processes - 1
    pieces = trained_pieces(model)

    class Spoilt(torch.nn.Module):
        def forward(self, **batch: Any) -> torch.Tensor:
            loss = model(**batch)
            return loss * math.inf if last else loss

    batches = micro_batches(0)
    mine = batches[accelerator.process_index :: accelerator.num_processes]
    try:
        optimizer_step(
            accelerator,
            Spoilt(),
            optimizer,
            iter(mine),
            micro_steps=len(mine),
            supervised_tokens=sum(int((batch["shift_labels"] != -100).sum()) for batch in batches),
            max_grad_norm=MAX_GRAD_NORM,
            seed=0,
            stop=False,
            phases=Phases(accelerator.device, False),
        )
        refused = False
    except NotFinite:
        refused = True
    now = trained_pieces(model)
    moved = [
        f"{group} {name}"
        for group, named in pieces.items()
        for name, piece in named.items()
        if not torch.equal(piece.values, now[group][name].values)
    ]
    moved += [name for name, tensor in full_weights(model) if not torch.equal(before[name], tensor.float())]
    return {"refused": refused, "moved": moved}


def save_pieces(groups: dict[str, dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rank = torch.distributed.get_rank()
    for group, pieces in groups.items():
        save_file({name: piece.values for name, piece in pieces.items()}, folder / f"{group}-{rank}.safetensors")
        facts = {name: (piece.shape, piece.start) for name, piece in pieces.items()}
        (folder / f"{group}-{rank}.json").write_text(json.dumps(facts), "utf-8")
    torch.distributed.barrier()


def whole_pieces(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """All ranks' pieces put together; every element must have been written by exactly one rank."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    seen: dict[tuple[str, str], int] = {}
    for file in sorted(folder.glob("*-*.safetensors")):
        group = file.stem.rpartition("-")[0]
        facts = json.loads(file.with_suffix(".json").read_text("utf-8"))
        for name, values in load_file(file).items():
            shape, start = facts[name]
            whole = found.setdefault((group, name), torch.full((math.prod(shape),), math.nan))
            whole[start : start + values.numel()] = values
            seen[group, name] = seen.get((group, name), 0) + values.numel()
    assert seen == {key: whole.numel() for key, whole in found.items()}
    return found


def reader(folder: Path) -> Any:
    whole = whole_pieces(folder)
    return lambda group, name, start, end: whole[group, name][start:end]


def main() -> None:
    folder, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text("utf-8"))
    warnings.filterwarnings("ignore", category=FutureWarning)
    zero_environment(on_cpu=True)
    attention.register()
    set_seed(0)
    for job in jobs:
        run(job, folder)


if __name__ == "__main__":
    main()
