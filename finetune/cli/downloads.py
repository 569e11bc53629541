"""What `check` says of a recipe whose model or data the Hub has and this machine lacks: the lines that bring them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from finetune.model.gguf_package import PREFIX
from finetune.recipe.adapter_config import names_a_folder
from finetune.recipe.names import is_repository
from finetune.recipe.schema import DataSet, Recipe
from finetune.recipe.sections.preferences import names_second_model

# What a training reads of a model. `hf` takes one pattern after each --include.
_READ = " ".join(f"--include '*.{suffix}'" for suffix in ("safetensors", "json", "jinja", "txt", "model"))


def download_lines(recipe: Recipe) -> list[str]:
    """Shell lines, each with the override that it needs; empty if everything is here. Asks nothing of a network."""
    lines = [*_model_lines(recipe), *_data_lines(recipe)]
    if lines:
        lines = ["not on this machine yet; where there is no internet, bring these first:", *lines]
        lines.append("  then: HF_HUB_OFFLINE=1 finetune train ...")
    return lines


def _model_lines(recipe: Recipe) -> Iterator[str]:
    model, section = recipe.model, recipe.preferences
    named = [(model.name_or_path, model.revision)]
    if model.adapter is not None and not names_a_folder(model.adapter):
        named.append((model.adapter, model.adapter_revision))
    if section is not None and names_second_model(section):
        named.append((section.reference, "main"))
    for name, revision in dict.fromkeys(named):
        if (
            is_repository(name)
            and not name.startswith(PREFIX)
            and not os.path.isdir(name)
            and not _cached(name, revision)
        ):
            yield f"  hf download {shlex.quote(name)}{_at(revision)} {_READ}"


def _data_lines(recipe: Recipe) -> Iterator[str]:
    entries = {f"data.train.{index}": entry for index, entry in enumerate(recipe.data.train)}
    if isinstance(recipe.data.eval, list):
        entries |= {f"data.eval.{index}": entry for index, entry in enumerate(recipe.data.eval)}
    brought: set[str] = set()
    for key, entry in entries.items():
        if not _is_on_the_hub(entry):
            continue
        folder = f"data/{entry.path.rpartition('/')[2]}"
        if folder not in brought:
            at = _at(entry.revision)
            yield f"  hf download {shlex.quote(entry.path)}{at} --repo-type dataset --local-dir {shlex.quote(folder)}"
        brought.add(folder)
        line = f"  with {shlex.quote(f'{key}.path={folder}')}"
        if entry.name is not None:
            line += f" {shlex.quote(f'{key}.name=null')}, and the files of {entry.name!r} there in {key}.data_files"
        yield line


def _is_on_the_hub(entry: DataSet) -> bool:
    """Whether the entry is the Hub's, and no earlier training has left it in the cache of `datasets`."""
    from huggingface_hub import constants

    if not is_repository(entry.path) or os.path.exists(entry.path):
        return False
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    return not (cache / entry.path.replace("/", "___")).is_dir()


def _cached(model: str, revision: str) -> bool:
    """Whether the Hub's cache has the model's weights. The client's own question takes 0.1 s to import."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, f"models--{model.replace('/', '--')}")
    try:
        commit = (folder / "refs" / revision).read_text("utf-8")
    except OSError:
        commit = revision
    return any((folder / "snapshots" / commit).glob("*.safetensors"))


def _at(revision: str) -> str:
    return "" if revision == "main" else f" --revision {shlex.quote(revision)}"
