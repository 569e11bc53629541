"""Python code that comes with a model: only the user's own recipe may allow it, never a run folder alone.

A training here with `model.trust_remote_code: true` records the consent as an empty file in the cache folder's
`trusted/`. A run folder's recipe may be a stranger's.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.library_errors import library_errors
from finetune.output_stream import one_line
from finetune.paths import open_regular
from finetune.untrusted.programs import is_trusted, trust

CONSENT = "FINETUNE_TRUST_REMOTE_CODE"


def trust_code(name: str, revision: str) -> None:
    """Record the user's consent to this model's code: by name and revision, and in a local folder by content."""
    trust(_key(name, revision))


def refuse_unknown_code(run_dir: Path, name: str, revision: str) -> None:
    """Raise FinetuneError if no training here has run this model's code, and the environment does not allow it."""
    if os.environ.get(CONSENT) != "1" and not is_trusted(_key(name, revision)):
        raise FinetuneError(
            f"{run_dir / 'recipe.yaml'}: model.trust_remote_code: true would run the Python code that comes with "
            f"{one_line(name, 100)}, and no training on this machine has run it; read that code, then repeat with "
            f"{CONSENT}=1"
        )


def refuse_other_code(product: Path, base: Path | None, name: str) -> None:
    """Raise FinetuneError if an export's code is not its base's, and the environment does not allow it.

    Args:
        base: The folder with the base's files; None: they are not on this machine.
    """
    if base is None or os.environ.get(CONSENT) == "1":
        return
    for file in sorted(product.rglob("*.py")):
        own = base / file.relative_to(product)
        if not own.is_file() or _hash(own) != _hash(file):
            raise FinetuneError(
                f"{one_line(file, 200)}: differs from the code that comes with {one_line(name, 100)}, the only "
                f"accepted code; read the file, then repeat with {CONSENT}=1"
            )


def _key(name: str, revision: str) -> str:
    folder = Path(os.path.expanduser(name))
    files = sorted(folder.glob("*.py")) if folder.is_dir() else []
    hashes = {str(file.resolve()): _hash(file) for file in files}
    return hashlib.sha256(json.dumps(["model code", name, revision, hashes]).encode()).hexdigest()


def _hash(file: Path) -> str:
    with library_errors(reading=file), open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
