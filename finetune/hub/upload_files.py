"""Files of a run folder that may leave this machine: an allowlist, local paths removed, searched for secrets."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import string
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from finetune.errors import FinetuneError
from finetune.paths import leaves_folder
from finetune.recipe.schema import Data, Recipe
from finetune.redaction import find_secret, hide_secrets
from finetune.run_folder.facts import require_run_folder
from finetune.untrusted.json_files import read_object
from finetune.untrusted.safetensors_header import read_header

WHOLE_MODEL = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
WEIGHT_FILES = {"adapter": ADAPTER, "model": WHOLE_MODEL, "merged": WHOLE_MODEL}
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
RUN = ("recipe.yaml", "receipt.json", "metrics.jsonl", "report.html", "loss.png", "memory.png")
# Every word of these is a token: one that looks like a path is not a path.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
# These quote answers of models, which may name anybody's folders.
QUOTING = ("README.md", "report.html")
SOMEBODYS_HOME = re.compile(r"(?<![\w.~])(?:/home/|/Users/|/root/|[A-Za-z]:\\{1,2}Users\\)[\w.-]*")
SHARD_HEADER = 8  # bytes at the start of a safetensors file: the length of its JSON header


@dataclass(frozen=True)
class Outgoing:
    """One file of the upload; its content is a file on disk, or bytes where local paths were removed."""

    path: str  # in the repository
    content: Path | bytes

    @property
    def size(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    def read(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()

    def text(self) -> str:
        """The text to search: all of it, or a safetensors file's header, or a picture without its pixels."""
        if self.path.endswith(".png"):
            return "\n".join(_png_texts(self.read()))
        if isinstance(self.content, Path) and self.path.endswith(".safetensors"):
            read_header(self.content)
            with self.content.open("rb") as file:
                return file.read(int.from_bytes(file.read(SHARD_HEADER), "little")).decode(errors="replace")
        return self.read().decode("utf-8", errors="replace")

    def readings(self) -> Iterator[str]:
        """Other readings of the text: UTF-16, unescaped JSON, HTML and addresses, and joined lines. For tensors, the
        letters among their bytes."""
        if isinstance(self.content, Path) and self.path.endswith(".safetensors"):
            yield from _long_words(self.content)
            return
        text = self.text()
        if "\0" in text:
            yield text.replace("\0", "")
        plain = html.unescape(unquote(_ESCAPED.sub(lambda match: chr(int(match[1] or match[2], 16)), text)))
        if plain != text:
            yield plain
        if self.path not in VOCABULARIES:  # there each line is a separate word
            yield _LINE_END.sub("", plain)


_ESCAPED = re.compile(r"\\u([0-9A-Fa-f]{4})|\\x([0-9A-Fa-f]{2})")
_LINE_END = re.compile(r"[ \t\"']*\\?[ \t]*\r?\n[ \t\"']*")  # inside a text over several lines, quoted or not
_PNG_HEAD = 8  # bytes
_MOST_TEXT = 2**24  # bytes of a picture's compressed text
_WINDOW = 2**24  # bytes of tensors searched at once
_WORD = 16  # letters: no secret that a pattern knows is shorter
_AROUND = 4096  # bytes read before and after such a word
_PRINTABLE = bytes(code if 32 <= code < 127 else 32 for code in range(256))
_LETTER = np.isin(np.arange(256), list(b"+-./=_" + string.ascii_letters.encode() + string.digits.encode()))


def _png_texts(content: bytes) -> Iterator[str]:
    """Every chunk of a PNG except its pixels, and the bytes behind its end. Compressed texts are unpacked."""
    at = _PNG_HEAD
    while at + 8 <= len(content):
        size, kind = int.from_bytes(content[at : at + 4], "big"), content[at + 4 : at + 8]
        chunk = content[at + 8 : at + 8 + size]
        if kind != b"IDAT":
            yield chunk.decode("latin-1")
        if kind in (b"zTXt", b"iTXt"):
            for start in (match.end() for match in re.finditer(rb"\0", chunk)):
                with suppress(zlib.error):
                    packed = chunk[start + (kind == b"zTXt") :]  # zTXt names its compression method first
                    yield zlib.decompressobj().decompress(packed, _MOST_TEXT).decode("latin-1")
        at += size + 12
        if kind == b"IEND":
            break
    yield content[at:].decode("latin-1")


def _long_words(file: Path) -> Iterator[str]:
    """The text around each long run of letters in a file with numbers. Numbers practically never form such a run."""
    with file.open("rb") as stream:
        before = b""
        while window := stream.read(_WINDOW):
            content = before + window
            runs = _LETTER[np.frombuffer(content, np.uint8)]
            for shift in (1, 2, 4, 8):  # true where a run of _WORD letters begins
                runs = runs[:-shift] & runs[shift:]
            last = -_AROUND
            for place in np.flatnonzero(runs).tolist():
                if place >= last:
                    yield content[max(0, place - _AROUND) : place + _AROUND].translate(_PRINTABLE).decode("ascii")
                    last = place + _AROUND // 2
            before = content[-_AROUND:]


def product_folder(run_dir: Path, *, merged: bool = False) -> Path:
    """run_dir/adapter, run_dir/model of a fully trained run, or with `merged` run_dir/merged.

    Raises FinetuneError where it does not exist.
    """
    for name in ("merged",) if merged else ("adapter", "model"):
        if (run_dir / name).is_dir():
            return run_dir / name
    if merged and (run_dir / "adapter").is_dir():
        command = shlex.join(["finetune", "merge", str(run_dir)])
        raise FinetuneError(f"{run_dir}: is not merged yet; first: {command}")
    if merged and (run_dir / "model").is_dir():
        raise FinetuneError(f"{run_dir}: all weights were trained, there is nothing to merge; push it without --merged")
    require_run_folder(run_dir)
    raise FinetuneError(f"{run_dir}: this run has not finished: neither adapter/ nor model/ exists; resume it first")


def collect(
    run_dir: Path, recipe: Recipe, *, base: str, card: str, merged: bool = False
) -> tuple[list[Outgoing], list[str]]:
    """The upload's files, by their paths, and the names of result files that are not uploaded.

    Args:
        base: The base model's name for adapter_config.json.
        card: The README.md.
        merged: The merged model instead of the adapter.
    """
    product, short = product_folder(run_dir, merged=merged), path_replacements(recipe, run_dir)
    refuse_links(run_dir, product)
    product_files = _matching(product, (*WEIGHT_FILES[product.name], *TOKENIZER))
    files = [Outgoing("README.md", _shortened(card, short).encode())]
    for folder, names in ((product, product_files), (run_dir, _matching(run_dir, RUN))):
        files += [Outgoing(name, _cleaned(name, folder / name, short, base)) for name in names]
    present = {str(path.relative_to(product)) for path in product.rglob("*") if path.is_file()}
    return sorted(files, key=lambda file: file.path), sorted(present - set(product_files) - {"README.md"})


def refuse_links(run_dir: Path, product: Path) -> None:
    """Raise FinetuneError where a file to be sent, or its folder, is a link that leads out of the run's folder."""
    names = [*RUN, *(f"{product.name}/{name}" for name in (*WEIGHT_FILES[product.name], *TOKENIZER))]
    paths = [product, *(path for name in names for path in sorted(run_dir.glob(name)))]
    out = [path.relative_to(run_dir) for path in paths if leaves_folder(path, run_dir)]
    if out:
        lines = [f"{path}: is a link out of the run's folder; put the file itself here" for path in map(str, out)]
        raise FinetuneError("\n".join([f"nothing was pushed of {run_dir}:", *lines]))


def _matching(folder: Path, patterns: Iterable[str]) -> list[str]:
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(folder)) for path in files)


def _cleaned(name: str, path: Path, short: Mapping[str, str], base: str) -> Path | bytes:
    if path.suffix in (".safetensors", ".png") or name in VOCABULARIES:
        return path
    text = path.read_text(encoding="utf-8", errors="replace")
    if name == "adapter_config.json":
        text = json.dumps(read_object(path) | {"base_model_name_or_path": base}, indent=2) + "\n"
    return _shortened(text, short).encode()


def _shortened(text: str, short: Mapping[str, str]) -> str:
    for long, brief in short.items():
        text = text.replace(long, brief)
    return text


def path_replacements(recipe: Recipe, run_dir: Path) -> dict[str, str]:
    """This machine's absolute paths -> the text that others read instead; the longest first."""
    values = recipe.model_dump(mode="json")
    paths = [
        values["output_dir"],
        values["model"]["name_or_path"],
        values["model"]["adapter"],
        values["accelerate_config"],
    ]
    paths += [values["data"]["chat_template"] or "", *_data_paths(recipe.data)]
    names = {path: Path(path).name for path in paths if path and os.path.isabs(path) and "\n" not in path}
    names |= {str(run_dir.resolve()): run_dir.name}
    folders = {str(Path.cwd()): ".", str(Path.home()): "~"}
    names |= {f"{path}/": f"{brief}/" for path, brief in folders.items() if len(path) > 1}
    return dict(sorted(names.items(), key=lambda entry: -len(entry[0])))


def _data_paths(data: Data) -> Iterator[str]:
    for entry in data.sets:
        files = entry.data_files or []
        yield from [entry.path, *([files] if isinstance(files, str) else files)]


def check_no_secrets(files: Iterable[Outgoing], known: Iterable[str]) -> None:
    """Raises FinetuneError that names each file and line with a secret or a path of somebody's home in it."""
    mistakes = []
    for file in files:
        if (named := find_secret(file.path, known)) is not None:
            name = hide_secrets(file.path, known)
            mistakes.append(f"{name}: its name holds {named[1]}; rename the file, and revoke it if it was ever shown")
            continue
        text = file.text()
        if (secret := find_secret(text, known)) is not None:
            line, kind = secret
            mistakes.append(f"{file.path}:{line}: holds {kind}; remove it, and revoke it if it was ever shown")
        elif hidden := next(filter(None, (find_secret(reading, known) for reading in file.readings())), None):
            how = "among the bytes of its tensors" if file.path.endswith(".safetensors") else "in escapes or pieces"
            mistakes.append(f"{file.path}: holds {hidden[1]}, {how}; remove it, and revoke it if it was ever shown")
        elif file.path not in (*VOCABULARIES, *QUOTING) and (home := SOMEBODYS_HOME.search(text)) is not None:
            line = text.count("\n", 0, home.start()) + 1
            mistakes.append(
                f"{file.path}:{line}: holds a path of this machine ({home[0]}...); name it without the folder"
            )
    if mistakes:
        raise FinetuneError("\n".join(["nothing was pushed:", *mistakes]))
