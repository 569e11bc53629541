"""Push a run's adapter or model to the Hub, with tokenizer, recipe and card: private by default, and repeatable."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import EnvironmentMismatch, FinetuneError, RecipeError
from finetune.files import write_json
from finetune.hub.already_there import marked_card, merged_card, obsolete_files
from finetune.hub.base_model import MOST_CARD, ask_licence, check_repository, read_base
from finetune.hub.client import PUSH_ATTEMPTS, check_permission, ensure_repository, retry
from finetune.hub.model_card import card_text
from finetune.hub.upload_files import Outgoing, check_no_secrets, collect, product_folder
from finetune.library_errors import library_errors
from finetune.recipe.loader import recipe_from_resolved
from finetune.recipe.schema import Recipe
from finetune.redaction import hide_secrets, known_secrets
from finetune.run_folder.facts import GENERATION, read_run
from finetune.tokens.conversation import read_conversation
from finetune.untrusted.json_files import read_bounded

if TYPE_CHECKING:
    from huggingface_hub import HfApi

RECORD = "hub.json"  # in the run's folder: how the last push ended


@dataclass(frozen=True)
class Destination:
    """The repository, and who may see it."""

    repo_id: str
    public: bool = False
    revision: str = "main"
    base: str | None = None  # the base model's name on the Hub, if the run folder does not have it
    merged: bool = False  # push the merged model instead of the adapter

    def command(self, run_dir: Path) -> str:
        """The command that pushes again."""
        words = ["finetune", "push", str(run_dir), self.repo_id]
        if self.public:
            words.append("--public")
        if self.revision != "main":
            words += ["--revision", self.revision]
        if self.base:
            words += ["--base", self.base]
        if self.merged:
            words.append("--merged")
        return shlex.join(words)


@dataclass(frozen=True)
class Upload:
    """The files and facts to send."""

    run_dir: Path
    files: Sequence[Outgoing]
    left_out: Sequence[str]
    card: str
    notes: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        listed = [{"path": file.path, "bytes": file.size} for file in self.files]
        return {"files": listed, "left_out": list(self.left_out), "notes": list(self.notes)}


def destination_of(recipe: Recipe) -> Destination | None:
    """The recipe's own destination; None if it names no repository."""
    hub = recipe.hub
    if not hub.repo_id:
        return None
    return Destination(hub.repo_id, not hub.private, hub.revision)


def chosen_destination(
    run_dir: Path, repo_id: str | None, *, public: bool, revision: str | None, base: str | None, merged: bool = False
) -> Destination:
    """The command line's destination, completed from the run's recipe. Raises FinetuneError."""
    product_folder(run_dir, merged=merged)
    hub = recipe_from_resolved(run_dir / "recipe.yaml").hub
    name = repo_id or hub.repo_id
    if name is None:
        raise FinetuneError(f"{run_dir}: its recipe has no hub.repo_id; name the repository: owner/name")
    # hub.private: false holds for the recipe's own repository only.
    is_public = public or (not hub.private and name == hub.repo_id)
    return Destination(name, is_public, revision or hub.revision, base, merged)


def describe_upload(upload: Upload, destination: Destination) -> str:
    """A dry run's page: the files with their bytes, files that stay here, notes, and the card."""
    visibility = "public" if destination.public else "private"
    place = f"{destination.repo_id}, branch {destination.revision}, {visibility}"
    lines = [f"would be pushed to {place}; nothing was sent:"]
    lines += [f"  {file.size:>14,} bytes  {file.path}" for file in upload.files]
    lines += [f"  stays here: {name}" for name in upload.left_out]
    lines += [f"note: {note}" for note in upload.notes]
    lines.append(
        "note: a dry run does not ask what is there. The push removes an earlier model's files (weights, settings, "
        "tokenizer) in the same commit and names them first; it keeps other files, and what others wrote in README.md"
    )
    return "\n".join([*lines, "", "README.md:", upload.card])


def prepare_upload(run_dir: Path, destination: Destination, *, api: HfApi | None = None) -> Upload:
    """Collect the upload, remove local paths, and search it for secrets. Sends nothing.

    Raises FinetuneError when the run is not finished, the name is not valid, or a file holds a secret or a local path.
    """
    check_repository(destination.repo_id, "the repository")
    product = product_folder(run_dir, merged=destination.merged)
    recipe = recipe_from_resolved(run_dir / "recipe.yaml")
    base = read_base(recipe.model, repository=destination.base and check_repository(destination.base, "--base"))
    if api is not None:
        base = ask_licence(base, api)
    facts = read_run(run_dir, recipe, merged=destination.merged)
    with library_errors(f"{run_dir}: its files are not those of a run"):
        is_chat, conversation = (product / "chat_template.jinja").is_file(), read_conversation(run_dir)
        text = card_text(
            destination.repo_id,
            facts,
            base,
            is_chat=is_chat,
            has_settings=facts.is_adapter and (product / GENERATION).is_file(),
            opening=conversation.opening() if conversation else (),
        )
    files, left_out = collect(run_dir, recipe, base=base.name, card=text, merged=destination.merged)
    check_no_secrets(files, known_secrets())
    # The card as it is sent: local paths in it are shortened.
    card = marked_card(next(file for file in files if file.path == "README.md").read().decode())
    files = [replace(file, content=card.encode()) if file.path == "README.md" else file for file in files]
    notes = []
    if base.repository is None:
        notes.append(f"the base model {base.name} has no name on the Hub; if it has one: --base owner/name")
    elif not base.licence:
        notes.append(f"the licence of {base.repository} is not known; the card says so")
    licence = str(base.licence.get("license", "")).lower()
    if licence.startswith("llama") and not destination.repo_id.split("/")[1].lower().startswith("llama"):
        notes.append(f"the licence of {base.repository} asks that the name begins with Llama")
    return Upload(run_dir, files, left_out, card, tuple(notes))


def push(
    run_dir: Path,
    destination: Destination,
    *,
    message: str | None = None,
    endpoint: str | None = None,
    attempts: int = PUSH_ATTEMPTS,
    pause: Callable[[float], None] = time.sleep,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Push a finished run. Returns the record hub.json and the uploaded files.

    Every attempt starts over and sends only files that are not on the Hub yet. In the run folder only the record
    changes.

    Args:
        message: The commit's message.
        endpoint: The Hub's address; None: HF_ENDPOINT's, or the Hub itself.
        pause: Sleeps for a number of seconds.

    Raises:
        FinetuneError: bad input; EnvironmentMismatch: the Hub refuses, or failed at each attempt. The
            message ends with the command that repeats the push.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)

    said: set[str] = set()

    def say_again(text: str) -> None:
        say(hide_secrets(text, known_secrets()))

    def say_once(text: str) -> None:  # each attempt finds the same files there
        if text not in said:
            said.add(text)
            say_again(text)

    try:
        refuse_offline()
        upload = prepare_upload(run_dir, destination, api=api)
        for note in upload.notes:
            say(f"note: {note}")
        title = message or f"{run_dir.resolve().name}: {product_folder(run_dir, merged=destination.merged).name}"
        sent = retry(
            lambda: _attempt(api, upload, destination, title, say_once), attempts=attempts, pause=pause, say=say_again
        )
    except FinetuneError as error:
        text = hide_secrets(str(error), known_secrets())
        _record(run_dir, destination, {"state": "failed", "error": text})
        remedy = f"nothing on this machine has changed; to push again:\n  {destination.command(run_dir)}"
        if isinstance(error, RecipeError):  # takes its mistakes as a list, one entry each
            raise RecipeError([*text.split("\n"), remedy]) from error.__cause__
        raise type(error)(f"{text}\n{remedy}") from error.__cause__
    except KeyboardInterrupt:
        say(f"stopped; to push again:\n  {destination.command(run_dir)}")
        raise
    record = _record(run_dir, destination, {"state": "pushed", **sent})
    return {**record, **upload.as_json()}


def refuse_offline() -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise EnvironmentMismatch("HF_HUB_OFFLINE is set, so nothing can be pushed; unset it")


def _attempt(
    api: HfApi, upload: Upload, destination: Destination, title: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Send everything once: check the rights, create the repository and branch, look at what is there, and commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.hf_api import RepoFile

    repo, branch = destination.repo_id, destination.revision
    check_permission(api, repo)
    private = ensure_repository(api, repo, public=destination.public)
    if branch != "main":
        api.create_branch(repo, branch=branch, exist_ok=True)
    # The listed commit is the new one's parent: the Hub refuses a branch that has moved since, and `retry` looks again.
    head = api.repo_info(repo, revision=branch).sha
    entries = [
        entry for entry in api.list_repo_tree(repo, recursive=True, revision=head) if isinstance(entry, RepoFile)
    ]
    on_hub = {entry.path: entry.lfs.sha256 if entry.lfs is not None else entry.blob_id for entry in entries}
    files, card = list(upload.files), ""
    if "README.md" in on_hub:
        with tempfile.TemporaryDirectory() as folder:
            file = api.hf_hub_download(repo, "README.md", revision=head, local_dir=folder)
            card = read_bounded(Path(file), MOST_CARD).decode("utf-8", "replace")
        merged, notes = merged_card(card, upload.card)
        for note in notes:
            say(f"note: {note}")
        files = [replace(file, content=merged.encode()) if file.path == "README.md" else file for file in files]
    # The client hashes each file and asks the Hub which ones it has already: a repeated attempt sends only the rest.
    adds = [CommitOperationAdd(file.path, file.content) for file in files]
    gone, staying = obsolete_files(on_hub, {file.path: file for file in files}, card)
    if gone:
        say(f"removed there, as an earlier model's: {', '.join(gone)}; the Hub's history keeps them")
    if staying:
        say(f"note: stays there, and some readers take it for this model: {', '.join(staying)}; delete it if it is not")
    operations: list[Any] = [*adds, *(CommitOperationDelete(path) for path in gone)]
    commit = api.create_commit(repo, operations, commit_message=title, revision=branch, parent_commit=head)
    url = f"{api.endpoint}/{repo}"
    if branch != "main":
        url += f"/tree/{branch}"
    return {"commit": commit.oid, "url": url, "private": private, "removed": gone}


def _record(run_dir: Path, destination: Destination, facts: dict[str, Any]) -> dict[str, Any]:
    record = {
        "repo_id": destination.repo_id,
        "revision": destination.revision,
        "merged": destination.merged,
        **facts,
        "command": destination.command(run_dir),
    }
    if (run_dir / "recipe.yaml").is_file():
        write_json(run_dir / RECORD, record)
    return record
