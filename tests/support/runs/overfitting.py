"""A run that learns four chats by heart, so that an early evaluation is the best, and what it leaves on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from finetune.run_folder.checkpoint import Checkpoint, examine, read_checkpoint, step_folder
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import merged, tiny_lora, write_recipe

STEPS = 12


def write_sets(folder: Path) -> dict[str, Path]:
    """Chats to learn by heart, and others whose loss then rises."""
    held_out = {"held": [35, 55, 40], "more": [62, 33]}
    files = {name: write_chats(folder / f"{name}.jsonl", of, seed=100) for name, of in held_out.items()}
    return files | {"train": write_chats(folder / "train.jsonl", [30, 45, 60, 50])}


def overfitting(folder: Path, base: Path, sets: Mapping[str, Path], **sections: Any) -> Path:
    """12 steps on four chats at a rate at which the held-out loss falls for six steps and then rises.

    The head is trained too: adapters of a random model alone cannot learn four chats by heart.
    """
    held_out = [{"path": "json", "data_files": str(sets["held"])}]
    training = {"max_steps": STEPS, "learning_rate": 0.01, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    training |= {"load_best_model_at_end": True}
    lora = {"r": 4, "modules_to_save": ["lm_head"]}
    content = tiny_lora(
        base, sets["train"], lora=lora, data={"eval": held_out}, training=training, output_dir=str(folder / "run")
    )
    folder.mkdir(exist_ok=True)
    return write_recipe(folder, merged(content, {"eval_steps": 2, "save_steps": 2, "save_total_limit": 1}, sections))


def evaluations(run: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == "eval"}


def document(run: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / name).read_text("utf-8"))
    return content


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def trained_at(run: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = examine(step_folder(run, step))
    assert isinstance(checkpoint, Checkpoint), checkpoint
    return read_checkpoint(checkpoint)[0]["model"]


def exported(run: Path) -> dict[str, torch.Tensor]:
    """By the names of the training."""
    if (run / "model").is_dir():
        return load_file(run / "model" / "model.safetensors")
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    kinds = {name: "default" if "lora_" in name else "modules_to_save.default" for name in adapter}
    return {f"{name.removesuffix('weight')}{kinds[name]}.weight": tensor for name, tensor in adapter.items()}


def check_exported(run: Path, step: int) -> None:
    """The export is the checkpoint of this step, to the bit, and not that of the last."""
    expected, actual = trained_at(run, step), exported(run)
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []
    newest = saved_steps(run)[-1]
    if step != newest:
        last = trained_at(run, newest)
        assert all(not torch.equal(actual[name], last[name]) for name in actual)
