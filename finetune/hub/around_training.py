"""A training with `hub.push: true`: a permission check before it, and the push after it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from finetune.errors import FinetuneError, HubUnreachable
from finetune.hub.base_model import check_repository
from finetune.hub.client import check_permission, check_visibility, retry
from finetune.hub.push import RECORD, destination_of, push, refuse_offline
from finetune.recipe.schema import Recipe
from finetune.redaction import hide_secrets, known_secrets
from finetune.untrusted.json_files import read_object
from finetune.wording import counted

ATTEMPTS_BEFORE = 2


def check_before_training(recipe: Recipe, *, pause: Callable[[float], None] = time.sleep) -> tuple[str, ...]:
    """Check that the push at the end can work. Returns a note if the Hub cannot be reached now.

    Raises FinetuneError if it cannot work: no token, no right to write, a public repository, or HF_HUB_OFFLINE set.
    """
    from huggingface_hub import HfApi

    destination = destination_of(recipe)
    if not recipe.hub.push or destination is None:
        return ()
    refuse_offline()
    repo_id, api = check_repository(destination.repo_id, "hub.repo_id"), HfApi()

    def check() -> None:
        check_permission(api, repo_id)
        check_visibility(api, repo_id, public=destination.public)

    # Two attempts only: the user waits for the training to start, and the push itself tries again at its end.
    try:
        retry(check, attempts=ATTEMPTS_BEFORE, pause=pause, say=lambda _: None)
    except HubUnreachable as error:
        return (f"hub.push: {_hidden(error)}; training continues, and the push is tried at its end",)
    except FinetuneError as error:
        raise type(error)(f"hub.push: {_hidden(error)}") from error.__cause__
    return ()


def push_after_training(recipe: Recipe) -> None:
    """Push a finished run that is not on the Hub yet. A failed push is printed and does not fail the training."""
    destination, run_dir = destination_of(recipe), Path(recipe.run_dir)
    if not recipe.hub.push or destination is None:
        return
    try:
        last_push = read_object(run_dir / RECORD)
    except FinetuneError:  # no push was recorded, or its record is damaged: push
        last_push = {}
    expected = {
        "state": "pushed",
        "repo_id": destination.repo_id,
        "revision": destination.revision,
        "merged": destination.merged,
    }
    # Records of earlier releases have no `merged`: they could only push the adapter or the model.
    if expected.items() <= ({"merged": False} | last_push).items():
        return
    try:
        record = push(run_dir, destination)
    except FinetuneError as error:
        print(f"the training is finished and saved; the push failed:\n{error}", file=sys.stderr)
    else:
        visibility = "private" if record["private"] else "public"
        print(f"pushed: {record['url']} ({visibility}, {counted(len(record['files']), 'file')})")


def _hidden(error: FinetuneError) -> str:
    return hide_secrets(str(error), known_secrets())
