"""What `check` says of a recipe whose model or data the Hub has and this machine lacks: the lines that bring them."""

from __future__ import annotations

import glob
import os
import re
import shlex
from pathlib import Path

from finetune.recipe.adapter_config import names_a_folder
from finetune.recipe.names import is_repository
from finetune.recipe.schema import DataSet, Recipe
from finetune.recipe.sections.preferences import names_second_model

# What a training reads of a model. `hf` takes one pattern after each --include.
_READ = " ".join(f"--include '*.{suffix}'" for suffix in ("safetensors", "json", "jinja", "txt", "model"))


def download_lines(recipe: Recipe) -> list[str]:
    """Shell lines, each with the override that it needs; empty if everything is here. Asks nothing of a network."""
    model, section, lines = recipe.model, recipe.preferences, list[str]()
    named = [(model.name_or_path, model.revision)]
    if model.adapter is not None and not names_a_folder(model.adapter):
        named.append((model.adapter, model.adapter_revision))
    if section is not None and names_second_model(section):
        named.append((section.reference, "main"))
    for name, revision in dict.fromkeys(named):
        if is_repository(name) and not os.path.isdir(name) and not _cached(name, revision):
            lines.append(f"  hf download {name}{_at(revision)} {_READ}")
    entries = {f"data.train.{index}": entry for index, entry in enumerate(recipe.data.train)}
    if isinstance(recipe.data.eval, list):
        entries |= {f"data.eval.{index}": entry for index, entry in enumerate(recipe.data.eval)}
    folders: dict[tuple[str, str], str] = {}  # (repository, revision) -> its own folder
    for key, entry in entries.items():
        if not is_repository(entry.path) or os.path.exists(entry.path) or _prepared(entry):
            continue
        if (entry.path, entry.revision) not in folders:
            folder = f"data/{entry.path.rpartition('/')[2]}"
            if folder in folders.values():  # another owner's, or another revision
                folder += f"-{len(folders) + 1}"
            folders[entry.path, entry.revision] = folder
            lines.append(f"  hf download {entry.path}{_at(entry.revision)} --repo-type dataset --local-dir {folder}")
        files = f" {key}.name=null, and the files of {entry.name!r} there in {key}.data_files" if entry.name else ""
        lines.append(f"  with {key}.path={folders[entry.path, entry.revision]}{files}")
    if lines:
        lines.insert(0, "not on this machine yet; where there is no internet, bring these first:")
        lines.append("  then: HF_HUB_OFFLINE=1 finetune train ...")
    return lines


def _prepared(entry: DataSet) -> bool:
    """Whether the cache of `datasets` has the entry's configuration and commit: OWNER___NAME/CONFIG/VERSION/COMMIT."""
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    repository = entry.path.replace("/", "___").replace("_", "").lower()  # the cache writes TinyStories as tiny_stories
    configuration = glob.escape(entry.name or "") or "*"
    if entry.data_files:
        configuration += "-*"  # a hash of the files' names
    commit = "*" if entry.revision == "main" else glob.escape(entry.revision)
    infos = cache.glob(f"*/{configuration}/*/{commit}/dataset_info.json")
    return any(info.parents[3].name.replace("_", "").lower() == repository for info in infos)


def _cached(model: str, revision: str) -> bool:
    """Whether the Hub's cache has all the model's weights. The client's own question takes 0.1 s to import."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, f"models--{model.replace('/', '--')}")
    try:
        commit = (folder / "refs" / revision).read_text("utf-8")
    except OSError:
        commit = revision
    weights = [file.name for file in (folder / "snapshots" / commit).glob("*.safetensors")]
    shards = [int(match[1]) for name in weights if (match := re.search(r"-of-(\d+)\.", name))]
    return bool(weights) and len(weights) >= max(shards, default=1)


def _at(revision: str) -> str:
    return "" if revision == "main" else f" --revision {shlex.quote(revision)}"
