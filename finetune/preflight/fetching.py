"""`finetune fetch`: a recipe with its model, tokenizer and data in one folder, for a machine without a network.

    DIR/recipe.yaml                                          the recipe, with paths below DIR
        hub/models--OWNER--NAME/snapshots/COMMIT/            a model or an adapter; base_identity reads the commit here
        data/train-0/...                                     a data set's files, or the rows of one from the Hub
        fetch.json                                           commits; whether everything is here

All questions come first, so nothing is fetched of a recipe whose last repository refuses. The commits are written down
before the first file, so an interrupted fetch continues with them, wherever a branch points by then.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from finetune.data.sources import Source, files_below, resolve
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.files import FETCHED, TEMPORARY_PREFIX, check_output, disk_errors, remove_folder, write_json, write_text
from finetune.measure.units import GIB
from finetune.model.gguf_package import PREFIX
from finetune.output_stream import one_line
from finetune.preflight.disk import free_bytes
from finetune.recipe.adapter_config import names_a_folder
from finetune.recipe.names import is_repository
from finetune.recipe.resolved import LoadedRecipe, resolved_yaml
from finetune.recipe.schema import DataSet, Recipe
from finetune.recipe.sections.preferences import names_second_model
from finetune.recipe.strategy import CONFIG_FOLDER
from finetune.redaction import known_secrets, secret_key
from finetune.untrusted.json_files import read_object
from finetune.untrusted.library_words import in_one_line

# Files at the top of a repository that a training reads, and those that say what one may do with them.
FETCHED_WEIGHTS = ("model.safetensors", "model-*.safetensors", "adapter_model.safetensors")
FETCHED_BESIDE = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "README.md",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


@dataclass(frozen=True)
class Repository:
    """A repository on the Hub that a key of the recipe names."""

    key: str
    name: str
    revision: str
    kind: str = "model"  # or dataset


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository at its commit."""

    path: str
    nbytes: int
    sha256: str | None  # known of large files


def fetch(loaded: LoadedRecipe, folder: Path, log: Callable[[str], None]) -> dict[str, Any]:
    """Bring everything that the recipe names into the folder, and write its recipe.yaml there.

    Returns the folder, the commits by key, the bytes of models, and the notes in the recipe's head.

    Raises:
        FinetuneError: the folder holds something else; the recipe holds a token; a model has no safetensors.
        EnvironmentMismatch: the Hub refuses, or cannot be reached; the disk has no room.
    """
    check_output(folder, "--to", folder=True)
    recipe = loaded.recipe
    if (secret := secret_key(recipe.model_dump(mode="json"), known_secrets())) is not None:
        raise FinetuneError(f"{secret[0]}: holds {secret[1]}, which would be in the folder; remove it from the recipe")
    digest = hashlib.sha256(json.dumps(recipe.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
    commits = _earlier_commits(folder, digest)
    sources = {key: resolve(entry) for key, entry in _data_sets(recipe)}
    repositories = [
        *_models(recipe),
        *(
            Repository(key, source.entry.path, source.entry.revision, "dataset")
            for key, source in sources.items()
            if source.kind == "hub" and is_repository(source.entry.path)  # others are files by their addresses
        ),
    ]
    files: dict[str, list[RemoteFile]] = {}
    for each in repositories:
        with in_one_line(partial(_in_words, each)):
            commits[each.key], files[each.key] = _ask(each, commits.get(each.key), recipe.model.trust_remote_code)
    total = sum(file.nbytes for each in repositories if each.kind == "model" for file in files[each.key])
    if total > (free := free_bytes(folder)):
        raise EnvironmentMismatch(
            f"--to: {folder}: the models have {total / GIB:.1f} GiB, and {free / GIB:.1f} GiB of its disk are free; "
            "free some space, or name another folder"
        )

    record = {"recipe": digest, "commits": commits}
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FETCHED, {**record, "complete": False})
        changed: dict[str, str | None] = {}  # dotted key -> its new value
        for each in repositories:
            if each.kind == "model":
                log(f"{each.key}: {each.name} at {commits[each.key][:12]}")
                place = Path("hub", f"models--{each.name.replace('/', '--')}", "snapshots", commits[each.key])
                _download(each, commits[each.key], files[each.key], folder / place)
                changed[each.key] = str(place)
        data = {key: _bring_data(key, source, commits.get(key), folder, log) for key, source in sources.items()}
        fetched, notes = _with_places(recipe, folder, commits, changed, data)
        head = [f"# Made by: finetune fetch {loaded.path.name}. Start it from this folder:"]
        head += ["#   HF_HUB_OFFLINE=1 finetune train recipe.yaml"]
        head += [f"# {each.key}: {each.name} at {commits[each.key]}" for each in repositories]
        text = resolved_yaml(replace(loaded, recipe=fetched), keep_auto=True)
        write_text(folder / "recipe.yaml", "\n".join([*head, *(f"# {note}" for note in notes), text]))
        write_json(folder / FETCHED, {**record, "complete": True})
    return {"folder": str(folder), "commits": commits, "model_bytes": total, "notes": notes}


def _earlier_commits(folder: Path, digest: str) -> dict[str, str]:
    """The commits of an interrupted fetch of this recipe; none for a new folder. Raises FinetuneError for others."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return {}
    record = read_object(folder / FETCHED) if (folder / FETCHED).is_file() else {}
    commits = record.get("commits")
    if record.get("recipe") != digest or not isinstance(commits, dict):
        what = "another recipe's files" if record else "other files"
        raise FinetuneError(f"--to: {folder} holds {what}; name an empty or a new folder")
    return {str(key): str(commit) for key, commit in commits.items()}


def _data_sets(recipe: Recipe) -> Iterator[tuple[str, DataSet]]:
    yield from ((f"data.train[{index}]", entry) for index, entry in enumerate(recipe.data.train))
    if isinstance(recipe.data.eval, list):
        yield from ((f"data.eval[{index}]", entry) for index, entry in enumerate(recipe.data.eval))


def _models(recipe: Recipe) -> Iterator[Repository]:
    """The models and adapters on the Hub that the recipe names."""
    model, section = recipe.model, recipe.preferences
    if not model.name_or_path.startswith(PREFIX) and not Path(model.name_or_path).is_dir():
        yield Repository("model.name_or_path", model.name_or_path, model.revision)
    if model.adapter is not None and not names_a_folder(model.adapter):
        yield Repository("model.adapter", model.adapter, model.adapter_revision)
    if section is not None and names_second_model(section) and not Path(section.reference).is_dir():
        yield Repository(f"{recipe.training.objective}.reference", section.reference, "main")


def _ask(repository: Repository, commit: str | None, code: bool) -> tuple[str, list[RemoteFile]]:
    """The repository's commit, and its files there: all of a data set, and of a model what a training reads.

    Asks for the largest one's facts too: the Hub tells everybody about a gated repository, and gives its files to some.

    Args:
        commit: Of an interrupted fetch.
        code: Python files are read too.

    Raises FinetuneError for a model without safetensors, and the client's own errors.
    """
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url

    api, kind = HfApi(), repository.kind
    if commit is None:
        commit = str(api.repo_info(repository.name, revision=repository.revision, repo_type=kind).sha)
    tree: Any = api.list_repo_tree(repository.name, recursive=True, revision=commit, repo_type=kind)
    files = [RemoteFile(each.path, each.size, each.lfs and each.lfs.sha256) for each in tree if hasattr(each, "size")]
    if kind == "model":
        patterns = [*FETCHED_WEIGHTS, *FETCHED_BESIDE, *(["*.py"] if code else [])]
        files = [file for file in files if "/" not in file.path and any(fnmatch(file.path, each) for each in patterns)]
        if not any(fnmatch(file.path, each) for file in files for each in FETCHED_WEIGHTS):
            raise FinetuneError(
                f"{repository.key}: {repository.name} has no weights in safetensors; name a model that has them"
            )
    if files:
        largest = max(files, key=lambda file: file.nbytes)
        get_hf_file_metadata(hf_hub_url(repository.name, largest.path, revision=commit, repo_type=kind))
    return commit, files


def _in_words(repository: Repository, error: Exception) -> EnvironmentMismatch:
    """An error of the Hub's client in one line, with the recipe's key."""
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"https://huggingface.co/{'' if repository.kind == 'model' else 'datasets/'}{repository.name}"
    match error:
        case OfflineModeIsEnabled():
            why = "HF_HUB_OFFLINE is set; unset it, because this verb needs the network"
        case GatedRepoError():
            why = f"the Hub gives it to those alone who asked for access; ask on {page}, then: hf auth login"
        case RepositoryNotFoundError():
            why = "the Hub has none with this name, or does not show it to this token; correct it, or: hf auth login"
        case RevisionNotFoundError():
            why = f"the Hub has no revision {one_line(repository.revision, 80)} of it; correct the revision"
        case _:
            why = f"the Hub did not answer ({type(error).__name__}: {one_line(error, 160)}); start this again"
    return EnvironmentMismatch(f"{repository.key}: {one_line(repository.name, 120)}: {why}")


def _download(repository: Repository, commit: str, files: list[RemoteFile], place: Path) -> None:
    """Bring the files, or what is missing of them. Each has the Hub's size, and a large one its SHA-256."""
    from huggingface_hub import hf_hub_download

    for file in files:
        with in_one_line(partial(_in_words, repository)):
            hf_hub_download(repository.name, file.path, revision=commit, local_dir=place)
        path = place / file.path
        with open(path, "rb") as stream:
            is_whole = path.stat().st_size == file.nbytes
            if is_whole and file.sha256 is not None:
                is_whole = hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256
        if not is_whole:
            path.unlink()
            raise EnvironmentMismatch(f"{path}: is not what the Hub lists, and was removed; start this again")
    remove_folder(place / ".cache")  # what the client needs to continue


def _bring_data(key: str, source: Source, commit: str | None, folder: Path, log: Callable[[str], None]) -> DataSet:
    """Bring a data set's files, or the rows of one on the Hub. Returns the entry that reads them from the folder."""
    entry, place = source.entry, Path("data", key.removeprefix("data.").replace("[", "-").rstrip("]"))
    log(f"{key}: {source.name}{'' if commit is None else f' at {commit[:12]}'}")
    if source.kind == "hub":
        file = place / f"{entry.short_name}.parquet"
        if not (folder / file).is_file():
            rows = resolve(entry.model_copy(update={"revision": commit or entry.revision})).hub_data_set
            (folder / place).mkdir(parents=True, exist_ok=True)
            temporary = folder / place / f"{TEMPORARY_PREFIX}{file.name}"
            rows.to_parquet(str(temporary))
            os.replace(temporary, folder / file)
        read = {"path": "parquet", "name": None, "data_files": str(file), "split": "train"}
        return entry.model_copy(update={**read, "revision": commit or entry.revision})
    if entry.data_files is None and Path(entry.path).is_dir():
        top = place / (Path(entry.path).resolve().name or "files")
        for file in files_below(Path(entry.path)):
            _copy(file, folder / top / file.relative_to(entry.path))
        return entry.model_copy(update={"path": str(top)})
    # Several files may have one name. Each keeps it, because splits and data sets are known by their files' names.
    folders = [place / str(number) for number in range(len(source.files))] if len(source.files) > 1 else [place]
    names = [inner / file.name for inner, file in zip(folders, source.files, strict=True)]
    for file, name in zip(source.files, names, strict=True):
        _copy(file, folder / name)
    if entry.data_files is None:
        return entry.model_copy(update={"path": str(names[0])})
    listed: Any = str(names[0]) if len(names) == 1 else [str(name) for name in names]
    return entry.model_copy(update={"path": source.kind, "data_files": listed})


def _copy(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    temporary = to.with_name(f"{TEMPORARY_PREFIX}{to.name}")
    shutil.copyfile(file, temporary)
    os.replace(temporary, to)


def _with_places(
    recipe: Recipe,
    folder: Path,
    commits: Mapping[str, str],
    changed: dict[str, str | None],
    data: Mapping[str, DataSet],
) -> tuple[Recipe, list[str]]:
    """The recipe with places in the folder, where other local files are copied too; and notes for its head."""
    model, section = recipe.model, recipe.preferences
    locals_ = {"model.name_or_path": model.name_or_path, "model.adapter": model.adapter}
    if section is not None and names_second_model(section):
        locals_[f"{recipe.training.objective}.reference"] = section.reference
    locals_ |= {"data.chat_template": recipe.data.chat_template, "eval.generate.file": recipe.eval.generate.file}
    if not (CONFIG_FOLDER / f"{recipe.accelerate_config}.yaml").is_file():
        locals_["accelerate_config"] = recipe.accelerate_config
    for key, name in locals_.items():
        if key in changed or name is None or name.startswith(PREFIX) or not os.path.exists(name):
            continue
        path, place = Path(name), Path("local", key, Path(name).resolve().name)
        for file in files_below(path) if path.is_dir() else [path]:
            _copy(file, folder / place / file.relative_to(path))
        changed[key] = str(place)
    notes = []
    if recipe.hub.push or recipe.hub.checkpoints is not None:
        changed |= {"hub.push": False, "hub.checkpoints": None}  # type: ignore[dict-item]
        notes.append("hub.push, hub.checkpoints: off, because they need a network; finetune push RUN sends the result")
    if recipe.run.storage is not None:
        changed["run.storage"] = None
        notes.append("run.storage: off, because it needs a network")
    if model.name_or_path.startswith(PREFIX):
        notes.append(f"{model.name_or_path}: comes with an installed package, which the other machine needs too")

    values = recipe.model_dump()
    changed |= {"model.revision": commits.get("model.name_or_path", model.revision)}
    changed |= {"model.adapter_revision": commits.get("model.adapter", model.adapter_revision)}
    if os.path.isabs(recipe.run_dir):
        changed["output_dir"] = f"runs/{Path(recipe.run_dir).name}"
    for dotted, value in changed.items():
        *sections, last = dotted.split(".")
        inner = values
        for name in sections:
            inner = inner[name]
        inner[last] = value
    for key, entry in data.items():
        name, _, index = key.removeprefix("data.").rstrip("]").partition("[")
        values["data"][name][int(index)] = entry.model_dump()
    return Recipe.model_validate(values), notes
