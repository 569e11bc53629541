"""The run folder's files that may leave this machine: an allowlist, without local paths, searched for secrets."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from finetune.errors import FinetuneError
from finetune.paths import leaves_folder
from finetune.recipe.schema import Recipe
from finetune.redaction import find_secret, hide_secrets
from finetune.run_folder.facts import not_finished_yet, require_run_folder
from finetune.untrusted.json_files import read_object
from finetune.untrusted.safetensors_header import read_header

WHOLE_MODEL = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "*.py",  # of a base with code of its own, which config.json names
)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "generation_config.json")
WEIGHT_FILES = {"adapter": ADAPTER, "model": WHOLE_MODEL, "merged": WHOLE_MODEL}
TOKENIZER = tuple(
    "tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json vocab.json "
    "vocab.txt merges.txt chat_template.jinja additional_chat_templates/*.jinja".split()
)
RUN = tuple(
    "recipe.yaml receipt.json conversation.json metrics.jsonl report.html loss.png rewards.png memory.png".split()
)
# Every word of these is a token: one that looks like a path is not a path.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
# These quote answers of models, which may name anybody's folders.
QUOTING = ("README.md", "report.html", "samples.jsonl")
SOMEBODYS_HOME = re.compile(r"(?<![\w.~])(?:/home/|/Users/|/root/|[A-Za-z]:\\{1,2}Users\\)[\w.-]*")
SHARD_HEADER = 8  # bytes at the start of a safetensors file: the length of its JSON header

_ESCAPED = re.compile(r"\\u([0-9A-Fa-f]{4})|\\x([0-9A-Fa-f]{2})")
_LINE_END = re.compile(r"[ \t\"']*\\?[ \t]*\r?\n[ \t\"']*")  # inside a text over several lines, quoted or not


@dataclass(frozen=True)
class Outgoing:
    """One file of the upload. Its content is a file on disk, or bytes if local paths were removed."""

    path: str  # in the repository
    content: Path | bytes

    @property
    def size(self) -> int:
        if isinstance(self.content, bytes):
            return len(self.content)
        return self.content.stat().st_size

    def read(self) -> bytes:
        if isinstance(self.content, bytes):
            return self.content
        return self.content.read_bytes()

    def text(self) -> str:
        """The text to search: the whole file, or a safetensors file's header."""
        if isinstance(self.content, Path) and self.path.endswith(".safetensors"):
            read_header(self.content)
            with self.content.open("rb") as file:
                return file.read(int.from_bytes(file.read(SHARD_HEADER), "little")).decode(errors="replace")
        return self.read().decode("utf-8", errors="replace")


def plain_texts(text: str) -> Iterator[str]:
    """Yield the unescaped text (JSON, HTML, URL) if it differs, then that text with its lines joined."""
    plain = html.unescape(unquote(_ESCAPED.sub(lambda match: chr(int(match[1] or match[2], 16)), text)))
    if plain != text:
        yield plain
    yield _LINE_END.sub("", plain)  # a secret split over two lines


def product_folder(run_dir: Path, *, merged: bool = False) -> Path:
    """run_dir/adapter, run_dir/model of a fully trained run, or with `merged` run_dir/merged.

    Raises FinetuneError if it does not exist.
    """
    names = ("merged",) if merged else ("adapter", "model")
    for name in names:
        if (run_dir / name).is_dir():
            return run_dir / name
    if merged and (run_dir / "adapter").is_dir():
        command = shlex.join(["finetune", "merge", str(run_dir)])
        raise FinetuneError(f"{run_dir}: is not merged yet; first: {command}")
    if merged and (run_dir / "model").is_dir():
        raise FinetuneError(f"{run_dir}: all weights were trained, there is nothing to merge; push it without --merged")
    require_run_folder(run_dir)
    raise not_finished_yet(run_dir)


def collect(
    run_dir: Path, recipe: Recipe, *, base: str, card: str, merged: bool = False
) -> tuple[list[Outgoing], list[str]]:
    """The upload's files, sorted by path, and the names of result files that are not uploaded.

    Args:
        base: The base model's name for adapter_config.json.
        card: The README.md.
        merged: Upload the merged model instead of the adapter.
    """
    product, replacements = product_folder(run_dir, merged=merged), path_replacements(recipe, run_dir)
    names = [*RUN, *(f"{product.name}/{name}" for name in (*WEIGHT_FILES[product.name], *TOKENIZER))]
    paths = [product, *(path for name in names for path in sorted(run_dir.glob(name)))]
    if outside := [path.relative_to(run_dir) for path in paths if leaves_folder(path, run_dir)]:
        lines = [f"{path}: is a link out of the run's folder; put the file itself here" for path in outside]
        raise FinetuneError("\n".join([f"nothing was pushed of {run_dir}:", *lines]))
    product_files = _matching(product, (*WEIGHT_FILES[product.name], *TOKENIZER))
    files = [Outgoing("README.md", without_local_paths(card, replacements).encode())]
    for folder, names in ((product, product_files), (run_dir, _matching(run_dir, RUN))):
        for name in names:
            path = folder / name
            # Tensors, pictures and vocabularies are sent as they are: a replaced text would change what they mean.
            if path.suffix in (".safetensors", ".png") or name in VOCABULARIES:
                files.append(Outgoing(name, path))
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            if name == "adapter_config.json":
                text = json.dumps(read_object(path) | {"base_model_name_or_path": base}, indent=2) + "\n"
            files.append(Outgoing(name, without_local_paths(text, replacements).encode()))
    present = {str(path.relative_to(product)) for path in product.rglob("*") if path.is_file()}
    return sorted(files, key=lambda file: file.path), sorted(present - set(product_files) - {"README.md"})


def _matching(folder: Path, patterns: Iterable[str]) -> list[str]:
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(folder)) for path in files)


def without_local_paths(text: str, replacements: Mapping[str, str]) -> str:
    for path, replacement in replacements.items():
        text = text.replace(path, replacement)
    return text


def path_replacements(recipe: Recipe, run_dir: Path) -> dict[str, str]:
    """This machine's absolute paths -> the text that others read instead.

    The longest path comes first: /home/me/runs/devils becomes devils before /home/me/ becomes ~/.
    """
    values = recipe.model_dump(mode="json")
    paths = [
        values["output_dir"],
        values["model"]["name_or_path"],
        values["model"]["adapter"],
        values["accelerate_config"],
        values["data"]["chat_template"],
    ]
    for entry in recipe.data.sets:
        files = entry.data_files or []
        paths += [entry.path, *([files] if isinstance(files, str) else files)]
    names = {path: Path(path).name for path in paths if path and os.path.isabs(path) and "\n" not in path}
    names |= {str(run_dir.resolve()): run_dir.name}
    folders = {str(Path.cwd()): ".", os.path.expanduser("~"): "~"}
    # "/" alone, as a working directory or a home, would replace every slash.
    names |= {f"{path}/": f"{brief}/" for path, brief in folders.items() if len(path) > 1}
    return dict(sorted(names.items(), key=lambda entry: -len(entry[0])))


def check_no_secrets(files: Iterable[Outgoing], known: Iterable[str]) -> None:
    """Raise FinetuneError with each file and line that holds a secret or a path of somebody's home."""
    mistakes = []
    for file in files:
        if (secret := find_secret(file.path, known)) is not None:
            # The message must not print the secret in the file's name.
            name = hide_secrets(file.path, known)
            mistakes.append(f"{name}: its name holds {secret[1]}; rename the file, and revoke it if it was ever shown")
            continue
        text = file.text()
        # In a vocabulary each line is a separate word.
        readings = () if file.path in VOCABULARIES else plain_texts(text)
        if (secret := find_secret(text, known)) is not None:
            line, kind = secret
            mistakes.append(f"{file.path}:{line}: holds {kind}; remove it, and revoke it if it was ever shown")
        elif hidden := next(filter(None, (find_secret(reading, known) for reading in readings)), None):
            # No line here: places in such a reading are not those in the file.
            mistakes.append(
                f"{file.path}: holds {hidden[1]}, in escapes or pieces; remove it, and revoke it if it was ever shown"
            )
        elif file.path not in (*VOCABULARIES, *QUOTING) and (home := SOMEBODYS_HOME.search(text)) is not None:
            line = text.count("\n", 0, home.start()) + 1
            mistakes.append(
                f"{file.path}:{line}: holds a path of this machine ({home[0]}...); name it without the folder"
            )
    if mistakes:
        raise FinetuneError("\n".join(["nothing was pushed:", *mistakes]))
