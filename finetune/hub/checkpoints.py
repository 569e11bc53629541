"""Push checkpoints to a branch on the Hub during training.

A thread that mostly waits for the network sends one checkpoint at a time. Then it sends the newest one saved meanwhile.
The branch holds one checkpoint: each commit deletes the previous one. A failure is logged, the next checkpoint is
another attempt, and training is not disturbed.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import TEMPORARY_PREFIX, remove_folder
from finetune.hub.client import ensure_repository, retry
from finetune.recipe.schema import Recipe
from finetune.redaction import hide_secrets, known_secrets
from finetune.run_folder.checkpoint import step_folder

CHECKPOINT_ATTEMPTS = 3  # the next checkpoint is another chance


class CheckpointPusher:
    """Push checkpoints from the main process. Does nothing if the recipe names no branch."""

    def __init__(
        self,
        recipe: Recipe,
        log: Callable[[str], None] = print,
        *,
        endpoint: str | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._hub, self._run_dir = recipe.hub, Path(recipe.run_dir)
        self._log, self._endpoint, self._pause = log, endpoint, pause
        self._lock = threading.Lock()
        self._next: int | None = None
        self._sent: list[str] = []  # folders on the branch that this process pushed
        self._thread: threading.Thread | None = None

    def push(self, step: int) -> None:
        """Send a complete checkpoint now, or after the one that is being sent."""
        if self._hub.checkpoints is None:
            return
        with self._lock:
            if self._next is not None:
                # The newer checkpoint replaces the one that still waits.
                self._log(f"hub.checkpoints: step {self._next} is replaced by the next one and is not pushed")
                remove_folder(self._staged(self._next))
            self._stage(step)
            self._next = step
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoints to the Hub", daemon=True)
                self._thread.start()

    def close(self, *, wait: bool) -> None:
        """End the pushes. `wait` until the checkpoints of earlier steps are on the Hub."""
        thread = self._thread
        if thread is not None and wait:
            self._log(f"waiting for the last checkpoint to reach {self._hub.repo_id}, branch {self._hub.checkpoints}")
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                step, self._next = self._next, None
                if step is None:
                    self._thread = None
                    return
            # The lock is free while the network is slow, so that push() never makes the training wait.
            try:
                retry(lambda: self._send(step), attempts=CHECKPOINT_ATTEMPTS, pause=self._pause, log=lambda _: None)  # noqa: B023  # called at once
            except Exception as error:  # a failed upload must not end a training
                reason = hide_secrets(str(error), known_secrets())
                if not isinstance(error, FinetuneError):
                    reason = f"{type(error).__name__}: {reason}"
                self._log(f"hub.checkpoints: step {step} was not pushed: {reason}; the training continues")
            finally:
                remove_folder(self._staged(step))

    def _send(self, step: int) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        api, name = HfApi(endpoint=self._endpoint), step_folder(self._run_dir, step).name
        repo, branch = str(self._hub.repo_id), str(self._hub.checkpoints)
        ensure_repository(api, repo, public=not self._hub.private)
        api.create_branch(repo, branch=branch, exist_ok=True)
        changes: list[Any] = [
            CommitOperationAdd(f"{name}/{file.name}", str(file)) for file in sorted(self._staged(step).iterdir())
        ]
        # One commit adds the new checkpoint and deletes the old one, so the branch always holds a complete one.
        changes += [CommitOperationDelete(f"{old}/", is_folder=True) for old in self._sent if old != name]
        api.create_commit(repo, changes, commit_message=f"checkpoint of step {step}", revision=branch)
        self._sent = [name]

    def _staged(self, step: int) -> Path:
        return self._run_dir / f"{TEMPORARY_PREFIX}push-{step}"

    def _stage(self, step: int) -> None:
        """Keep the files while they are sent, even if the checkpoint is pruned. Hard links take no space."""
        staged = self._staged(step)
        staged.mkdir(exist_ok=True)
        for file in step_folder(self._run_dir, step).iterdir():
            try:
                os.link(file, staged / file.name)
            except OSError:  # a file system without hard links
                shutil.copyfile(file, staged / file.name)
