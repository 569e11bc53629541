"""A recipe of recipes/ trained as it is written: only its model is a tiny one, and its data come from the loopback Hub.

Batch, lengths, rates, schedule, precision, strategy, epochs and evaluation are the recipe's. What a CPU lacks is
replaced as in a rehearsal: the GPUs by gloo ranks, paged optimizers by their unpaged ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from math import ceil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from finetune.base.location import online_name
from finetune.files import read_lines
from finetune.launch.launcher import environment_for_child
from finetune.launch.watched_job import TrainingJob, failure_reason
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import DataSet, Recipe
from finetune.recipe.strategy import read_strategy
from finetune.rehearse.changes import changes, processes_of
from finetune.rehearse.shrink import BUILT_IN, shrink_model, train_tokenizer
from finetune.run_folder.checkpoint import newest_valid, read_checkpoint
from tests.support.hub import Hub, running_hub
from tests.support.hub.data_sets import DATA_SETS, DEFAULT, rows_of, serve
from tests.support.hub.server import TOKEN
from tests.support.models.chat_families import GEMMA, QWEN3
from tests.support.models.thinking_families import GPT_OSS, QWEN35, SMOLLM3
from tests.support.runs.cells import ROOT
from tests.support.runs.recipe_results import sha256_of

STEPS = 6  # of a recipe whose rows are the Hub's: so many rows are served
HELD_OUT = 20  # rows of each other split
TIMEOUT_SECONDS = 900
OWNER = "your-name"  # as recipes have it in hub.repo_id
# Of what a rehearsal changes, that without which the recipe does not run here; not one key of data or schedule.
NEEDED = ("budget.", "accelerate_config", "model.", "training.optim")
SAMPLED = 50
# Of the families whose recipes give their template variables, or whose template is not ChatML; of the tokens that end a
# turn the tiny tokenizer has one.
_END = "<|im_end|>"
_PROMPT = "{{ '<|im_start|>assistant\n' }}{% endif %}"
_SWITCH = "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
# The variables that SmolLM3's rows give: its own template writes them into the system turn.
_TOOLS_AND_MORE = "{{- custom_instructions or '' }}{%- if xml_tools or python_tools %}{{- 'tools' }}{% endif %}"
TEMPLATES = {
    "Qwen/Qwen3-": QWEN3.replace(_PROMPT, _PROMPT.replace("{% endif %}", _SWITCH + "{% endif %}")),
    "Qwen/Qwen3.5-": QWEN35,
    "google/gemma-3-": GEMMA.replace("<end_of_turn>", _END),
    "HuggingFaceTB/SmolLM3-": f"{_TOOLS_AND_MORE}{SMOLLM3}",
    "unsloth/gpt-oss-": GPT_OSS.replace("<|return|>", _END),
}


def train_as_written(path: Path, folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """Train the recipe into `folder`/run on rows for so many steps; what was seen, a row of the results.

    `ok` says that each step had a rate, that the held-out loss fell and that every trained tensor changed. Norms may
    stay under training.pure_bf16: next to 1 a bfloat16 moves by 0.004 or not at all.
    """
    recipe = load_recipe(path).recipe
    strategy, began = read_strategy(recipe.accelerate_config), time.monotonic()
    ranks = processes_of(strategy, 2)
    model = shrink_model(recipe.model.name_or_path, recipe.model.revision, recipe.data, folder / "model")
    name_base(recipe.model.name_or_path, model.folder)
    give_template(recipe.model.name_or_path, model.folder)
    made = changes(recipe, strategy, model, processes=ranks, folder=folder)
    settings = {key: value for change in made for key, value in change.settings.items() if key.startswith(NEEDED)}
    adapter = None
    if recipe.model.adapter is not None:
        adapter = adapter_of_first(Path(recipe.model.adapter), model.folder, ranks, folder / "first", steps)
        settings["model.adapter"] = str(adapter)
    words = tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())
    job = TrainingJob(path.resolve(), words, ranks, folder)
    with running_hub(users=writer()) as hub:
        serve_data_of(recipe, hub, steps)
        code = run(job, hub)
        row: dict[str, Any] = {
            "sha256": sha256_of(path),
            "processes": ranks,
            "replaced": sorted(settings),
            "data_sets": loaded(hub),
        }
        if recipe.hub.push:
            row["pushed"] = sorted(hub.repository(str(recipe.hub.repo_id)).files()) if not code else []
    row["seconds"] = round(time.monotonic() - began, 1)
    if code:
        return row | {"ok": False, "reason": failure_reason(job.run_dir, job.log.read_text("utf-8"))}
    return row | seen(recipe, job.run_dir, model.folder, adapter)


def adapter_of_first(named: Path, model: Path, ranks: int, folder: Path, steps: int) -> Path:
    """The adapter that a recipe goes on with: of the recipe that its path names, trained on the same tiny model."""
    path = ROOT / "recipes" / f"{named.parent.name}.yaml"
    recipe = load_recipe(path).recipe
    folder.mkdir()
    # Of its model and strategy alone: its data, rates and schedule are as written.
    words = [f"model.name_or_path={model}", "model.revision=main", "budget.gpus=0", "budget.nodes=1"]
    job = TrainingJob(path.resolve(), tuple(words), ranks, folder)
    with running_hub(users=writer()) as hub:
        serve_data_of(recipe, hub, steps)
        code = run(job, hub)
    assert code == 0, failure_reason(job.run_dir, job.log.read_text("utf-8"))
    return job.run_dir / named.name


def name_base(name: str, folder: Path) -> None:
    """The tiny model's config says which model it stands for, as the card of a push wants it."""
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps(config | {"_name_or_path": online_name(name)}), "utf-8")


def give_template(name: str, folder: Path) -> None:
    """The family's own chat template to the tiny model's tokenizer, where it is here."""
    for start, template in TEMPLATES.items():
        if name.startswith(start):
            tokenizer = AutoTokenizer.from_pretrained(folder)
            tokenizer.chat_template = template
            tokenizer.save_pretrained(folder)


def writer() -> dict[str, dict[str, Any]]:
    """The Hub's one user: the one whose name recipes have in hub.repo_id."""
    return {TOKEN: {"name": OWNER, "auth": {"accessToken": {"displayName": "tests", "role": "write"}}}}


def serve_data_of(recipe: Recipe, hub: Hub, steps: int) -> None:
    """Its data sets of the Hub, each with rows for so many steps."""
    for entry in recipe.data.sets:
        if entry.path in DATA_SETS and ("dataset", entry.path) not in hub.repositories:
            serve(hub, entry.path, rows=rows_for(recipe, entry, steps), held_out=HELD_OUT)


def rows_for(recipe: Recipe, entry: DataSet, steps: int) -> int:
    """So many that their tokens are those of the steps over the recipe's epochs; without packing, themselves. A row of
    preferences is a pair, or an answer."""
    training = recipe.training
    if not recipe.data.packing or recipe.preferences is not None:
        return ceil(steps * training.global_batch_size / training.num_train_epochs)
    tokenizer, page = train_tokenizer(BUILT_IN), DATA_SETS[entry.path]
    rows = rows_of(entry.path, entry.name or DEFAULT, page.splits[0], SAMPLED)
    texts = [json.dumps(row.get("messages", row), ensure_ascii=False) for row in rows]
    each = sum(len(tokenizer.encode(text)) for text in texts) / SAMPLED
    return ceil(steps * training.global_batch_size * recipe.data.max_length / training.num_train_epochs / each)


def run(job: TrainingJob, hub: Hub) -> int:
    """The recipe by its launcher, its Hub the loopback one; the exit code."""
    environment = {name: value for name, value in environment_for_child().items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(job.folder / "hf")}
    environment |= {"HF_HUB_DISABLE_XET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"FINETUNE_CACHE": str(job.folder / "cache")}
    environment |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with job.log.open("wb") as log:
        try:
            done = subprocess.run(
                job.command(), env=environment, cwd=ROOT, stdout=log, stderr=log, timeout=TIMEOUT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:  # a reason in the results, and the other recipes are trained
            log.write(f"not done after {TIMEOUT_SECONDS} s\n".encode())
            return 124
    return done.returncode


def loaded(hub: Hub) -> list[str]:
    """The data sets of which a file was sent."""
    return sorted({name for kind, name in hub.repositories if kind == "dataset" and _was_sent(hub, name)})


def _was_sent(hub: Hub, name: str) -> bool:
    address = f"/datasets/{name}/resolve/"
    return any(line.path.startswith(address) and ".parquet" in line.path and line.status < 400 for line in hub.log)


def seen(recipe: Recipe, run_dir: Path, base: Path, adapter: Path | None = None) -> dict[str, Any]:
    """What a finished run's files say, and whether it is what a training should be."""
    lines = read_lines(run_dir / "metrics.jsonl")
    rates = [line["learning_rate"] for line in lines if line["kind"] == "train"]
    losses = [line["loss"] for line in lines if line["kind"] == "eval"]
    unchanged = sorted({*unchanged_tensors(recipe, run_dir, base, adapter), *stated_unchanged(run_dir)})
    row = {"steps": len(rates), "first_rate": rates[0], "highest_rate": max(rates), "last_rate": rates[-1]}
    row |= {"loss_before": losses[0], "loss_after": losses[-1], "evaluations": len(losses), "unchanged": unchanged}
    stay = [name for name in unchanged if not (recipe.training.pure_bf16 and "norm" in name)]
    trained = min(rates) > 0 and max(rates) == recipe.training.learning_rate
    return row | {"ok": trained and losses[-1] < losses[0] and not stay}


def stated_unchanged(run_dir: Path) -> list[str]:
    """The tensors that the run itself says it did not change."""
    receipt = json.loads((run_dir / "receipt.json").read_text("utf-8"))
    return list(receipt["change"]["unchanged_tensors"])


def unchanged_tensors(recipe: Recipe, run_dir: Path, base: Path, adapter: Path | None = None) -> list[str]:
    """Of the last checkpoint's: a weight that is the base's, an adapter's second matrix that is still zero, or still
    that of the adapter that it began with."""
    newest, _ = newest_valid(run_dir)
    assert newest is not None
    trained = read_checkpoint(newest)[0]["model"]
    if recipe.lora is not None:
        assert any("lora_B" in name for name in trained)
        if adapter is not None:
            began = load_file(adapter / "adapter_model.safetensors")
            names = {name: name.replace(".default", "") for name in trained}
            assert {*names.values()} == began.keys()
            return [name for name in trained if torch.equal(trained[name].float(), began[names[name]].float())]
        return [name for name, tensor in trained.items() if "lora_B" in name and not tensor.any()]
    start = load_file(base / "model.safetensors")
    assert trained.keys() <= start.keys()
    return [name for name, tensor in trained.items() if torch.equal(tensor, start[name].to(tensor.dtype))]
