"""Facts about the base model for others: its name on the Hub and its licence, from its own metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from finetune.errors import FinetuneError
from finetune.model.packaged import PREFIX, in_hub_cache, read_origin, resolve_model_path
from finetune.recipe.schema import ModelSection
from finetune.recipe.yaml_text import yaml_value
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
    repository: str | None  # on the Hub; None where it is not known
    revision: str
    licence: Mapping[str, str]  # of LICENCE_KEYS; empty where it is not known


def read_base(section: ModelSection, *, repository: str | None = None) -> BaseFacts:
    """The facts as far as this machine knows them; sends nothing to the Hub.

    A name on the Hub is its own answer; a folder is recognised by its place in the Hub's cache or by its config.json,
    a `package:` model by the package. `repository` overrides all of them.
    """
    name = section.name_or_path
    folder = Path(resolve_model_path(name)) if name.startswith(PREFIX) else Path(name)
    if folder.is_dir():
        on_hub, licence = _name_of_folder(folder), _licence_in(folder / "README.md")
        origin = read_origin(folder) or {}
        if origin:
            on_hub = origin.get("repository")
            licence = {"license": str(origin["licence"]).lower()} if origin.get("licence") != "unknown" else {}
        display_name = folder.name if not name.startswith(PREFIX) else name.removeprefix(PREFIX)
    else:
        on_hub, display_name = name if REPOSITORY.fullmatch(name) else None, name
        card = in_hub_cache(name, "README.md", section.revision)
        licence = _licence_in(card) if card else {}
    best = repository or on_hub
    # A folder has no revision; a branch of the Hub's repository may differ from it.
    revision = "main" if folder.is_dir() else section.revision
    return BaseFacts(best or display_name, best, revision, licence)


def ask_licence(base: BaseFacts, api: HfApi) -> BaseFacts:
    """The same facts, with the licence that the Hub states where this machine knows none."""
    if base.licence or base.repository is None:
        return base
    try:
        card: Any = api.model_info(base.repository).card_data
    except Exception:  # the card then says that the licence is not known
        return base
    return replace(base, licence=_licence_of(card.to_dict() if card else {}))


def _name_of_folder(folder: Path) -> str | None:
    cached = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", f"{folder.resolve()}/")
    if cached:
        return f"{cached[1]}/{cached[2]}"
    try:
        config = read_object(folder / "config.json")
    except FinetuneError:
        return None
    name = str(config.get("_name_or_path", ""))
    return name if REPOSITORY.fullmatch(name) and not Path(name).exists() else None


def _licence_in(card: Path) -> dict[str, str]:
    try:
        text = read_bounded(card, MOST_CARD).decode("utf-8", "replace")
    except FinetuneError:
        return {}
    head = re.match(r"\A---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    try:
        values = yaml_value(head[1]) if head else None
    except yaml.YAMLError:
        values = None
    return _licence_of(values if isinstance(values, dict) else {})


def _licence_of(values: Mapping[str, Any]) -> dict[str, str]:
    facts = {key: values[key] for key in LICENCE_KEYS if isinstance(values.get(key), str)}
    return facts if "license" in facts else {}


def check_repository(name: str, place: str) -> str:
    """The name, if the Hub would accept it. Raises FinetuneError otherwise."""
    owner, _, own = name.partition("/")
    valid = all(re.fullmatch(r"(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", part) for part in (owner, own))
    if not valid or len(name) > MAX_NAME or name.endswith(".git"):
        rules = "letters, digits, - _ . and not -- .. or .git at the end"
        raise FinetuneError(f"{place}: {name!r} is not a valid name on the Hub; write owner/name ({rules})")
    return name
