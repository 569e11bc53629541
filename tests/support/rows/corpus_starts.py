"""What cases of the corpus and of the fuzzer begin with: folders that are copied before a file in them is changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from finetune.run_folder.checkpoint import write_checkpoint
from finetune.run_folder.folder import RunIdentity, claim_run_folder, lock_run_folder
from finetune.run_folder.train_state import TrainState
from tests.support.runs.finished import finished_run

MEASURED = Path(__file__).parents[1] / "fuzzing" / "measured_run"


def make_starts(folder: Path, model: Path) -> dict[str, Path]:
    """name -> folder:
    model        a tiny model and its tokenizer, as given
    sharded      the same, its weights in two files and an index
    run          a finished run of it; its recipe names the model that is beside it, by the folder it was made in
    measured     the same with the metrics, the receipt, the state and the samples of a training
    checkpoints  a run's folder with two checkpoints
    """
    run = finished_run(folder / "run", model)
    (run.parent / "recipe.yaml").unlink()
    shutil.copytree(run.parent, folder / "measured")
    for record in MEASURED.iterdir():
        shutil.copy(record, folder / "measured" / "run" / record.name)
    return {
        "model": model,
        "sharded": _sharded(folder / "sharded", model),
        "run": run.parent,
        "measured": folder / "measured",
        "checkpoints": _saved(folder / "checkpoints"),
    }


def _sharded(folder: Path, model: Path) -> Path:
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + ('layers.1' in name)}-of-00002.safetensors" for name in tensors}
    for file in sorted({*files.values()}):
        own = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return folder


def _saved(folder: Path) -> Path:
    folder.mkdir()
    claim = claim_run_folder(
        lock_run_folder(folder / "run", wait_seconds=0), resume="auto", identity=RunIdentity({"a": 1}), command="c"
    )
    for step in (1, 2):
        tensors = {
            "model": {"w": torch.full((4, 3), float(step)), "v": torch.ones(2)},
            "optimizer": {"m": torch.ones(5)},
        }
        write_checkpoint(folder / "run", step, tensors, TrainState(step=step).as_json(), keep=2)
    claim.release()
    return folder
