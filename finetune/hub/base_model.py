"""The base model's name on the Hub and its licence, from the model's own metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.base.location import in_hub_cache, read_origin, resolve_model_path
from finetune.errors import FinetuneError
from finetune.hub.already_there import parsed_card
from finetune.recipe.schema import ModelSection
from finetune.untrusted.json_files import read_bounded, read_object

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MOST_CARD = 4 * 2**20  # bytes of a model card
MAX_NAME = 96  # letters, by the Hub's rule
LICENCE_KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class BaseFacts:
    """The base model as a card names it."""

    name: str  # never a path
    repository: str | None  # on the Hub; None if unknown
    revision: str
    licence: Mapping[str, str]  # keys: LICENCE_KEYS; empty if unknown


def read_base(section: ModelSection, *, repository: str | None = None) -> BaseFacts:
    """The facts that this machine knows. Sends nothing to the Hub.

    The model's repository on the Hub is, in this order:

    - `repository`, if given;
    - the recipe's name, if it names a repository;
    - the package's record, for a `package:` model;
    - for a folder, its place in the Hub's cache, else its config.json.
    """
    name, revision = section.name_or_path, section.revision
    on_hub: str | None = None
    licence: dict[str, str] = {}
    display_name, folder = name, Path(resolve_model_path(name))
    if folder.is_dir():
        # A folder has no revision, and a branch of the Hub's repository may differ from the folder.
        revision = "main"
        display_name = folder.name
        if origin := read_origin(folder):
            display_name, on_hub = str(origin["package"]), origin.get("repository")
            if origin.get("licence") != "unknown":
                licence = {"license": str(origin["licence"]).lower()}
        else:
            on_hub, licence = _repository_of_folder(folder), _licence_in(folder / "README.md")
    else:
        if REPOSITORY.fullmatch(name):
            on_hub = name
        if card := in_hub_cache(name, "README.md", revision):
            licence = _licence_in(card)
    best_name = repository or on_hub
    return BaseFacts(best_name or display_name, best_name, revision, licence)


def ask_licence(base: BaseFacts, api: HfApi) -> BaseFacts:
    """Ask the Hub for the licence if this machine does not know it."""
    if base.licence or base.repository is None:
        return base
    try:
        card: Any = api.model_info(base.repository).card_data
    except Exception:  # the card then says that the licence is not known
        return base
    return replace(base, licence=_licence_fields(card.to_dict())) if card else base


def _repository_of_folder(folder: Path) -> str | None:
    # The Hub's cache names its folders models--OWNER--NAME/snapshots/COMMIT.
    cached = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", f"{folder.resolve()}/")
    if cached:
        return f"{cached[1]}/{cached[2]}"
    try:
        config = read_object(folder / "config.json")
    except FinetuneError:
        return None
    name = str(config.get("_name_or_path", ""))
    # A relative path also has the form owner/name. One that exists here is a folder.
    if REPOSITORY.fullmatch(name) and not Path(name).exists():
        return name
    return None


def _licence_in(card: Path) -> dict[str, str]:
    try:
        text = read_bounded(card, MOST_CARD).decode("utf-8", "replace")
    except FinetuneError:
        return {}
    try:
        return _licence_fields(parsed_card(text, str(card)).data.to_dict())
    except FinetuneError:
        return {}


def _licence_fields(values: Mapping[str, Any]) -> dict[str, str]:
    # A link or a name without `license` is no licence: the Hub reads them only beside `license: other`.
    facts = {key: values[key] for key in LICENCE_KEYS if isinstance(values.get(key), str)}
    return facts if "license" in facts else {}


def check_repository(name: str, place: str) -> str:
    """Return the name if the Hub would accept it. Raises FinetuneError otherwise."""
    owner, _, repository = name.partition("/")
    # Letters, digits, - _ . inside, no - or . at either end, and neither -- nor .. anywhere.
    part = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?")
    valid = part.fullmatch(owner) and part.fullmatch(repository)
    if not valid or len(name) > MAX_NAME or name.endswith(".git"):
        rules = "letters, digits, - _ . and not -- .. or .git at the end"
        raise FinetuneError(f"{place}: {name!r} is not a valid name on the Hub; write owner/name ({rules})")
    return name
