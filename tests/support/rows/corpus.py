"""The corpus of strangers' files: a case's folder as its page says, and what this program makes of it.

A case has a name in one of the YAML files of tests/corpus/, one file a kind. Keys:
  class     the number of the failure in the list of faults that it is an example or a neighbour of
  do        what reads it: a name of ACTS
  start     what the folder holds before: a name of make_starts (tests/support/rows/corpus_starts.py); else nothing
  files     path in the folder -> what is changed: see `write`
  recipe    sections over a plain recipe, or (for `check`) the whole file, as text
  args      overrides; for a verb its words
  code      the exit code that is expected, 2 without it; 0: it must be accepted
  says      a part of the one line, or a list of parts
  keeps     a part that must not be in it
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
import resource
import shutil
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.runs.recipes import merged, tiny_lora

SECONDS = 10  # of processor time, of any case and its children
WALL_SECONDS = 60  # of any case, where the machine has other work
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1, "C64": 8}


@dataclass(frozen=True)
class Outcome:
    """How a case ended: an exit code, and all that was printed or raised."""

    code: int
    text: str


def lay_out(case: Mapping[str, Any], folder: Path, starts: Mapping[str, Path]) -> None:
    """The folder of a case, its files changed as the page says."""
    if start := case.get("start"):
        shutil.copytree(starts[start], folder, dirs_exist_ok=True)
    for name, change in (case.get("files") or {}).items():
        write(folder / name, change)


def write(path: Path, change: Any) -> None:
    """One file. `change`: text, or one of
    {json: value}  {set: {key/key: value}} in a JSON file that is there  {bytes: escapes}  {repeat: [text, times]}
    {safetensors: {name: [format, shape]}, length:, data:, raw:}  {keep: bytes}: cut off  {delete: true}
    {link: target}  {pipe: true}  {folder: true}  {socket: true}  {again: true}: the hash of a manifest made anew,
    and what else WRITERS has; or a list of such changes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(change, list):
        for each in change:
            write(path, each)
        return
    if isinstance(change, str):
        path.unlink(missing_ok=True)
        path.write_text(change, "utf-8")
        return
    kind = next(iter(change))
    WRITERS[kind](path, change[kind], change)


def _set(path: Path, values: Mapping[str, Any], _: Mapping[str, Any]) -> None:
    content = json.loads(path.read_text("utf-8"))
    for dotted, value in values.items():
        *above, last = dotted.split("/")
        place = content
        for part in above:
            place = place[int(part) if isinstance(place, list) else part]
        if value == "(remove)":
            place.pop(last)
        else:
            place[int(last) if isinstance(place, list) else last] = value
    path.write_text(json.dumps(content), "utf-8")


def _safetensors(path: Path, tensors: Mapping[str, Any], change: Mapping[str, Any]) -> None:
    """A file by its header alone: name -> [format, shape, begin and end where they are not the true ones]."""
    header, at = {}, 0
    for name, (dtype, shape, *offsets) in tensors.items():
        end = at + (math.prod(shape) if all(type(size) is int for size in shape) else 0) * BYTES.get(dtype, 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets or [at, end]}
        at = end
    text = change.get("raw", json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", change.get("length", len(text))) + text + bytes(change.get("data", at)))


def _again(path: Path, _: Any, __: Any) -> None:
    """The manifest's own hash, as a stranger would write it."""
    import hashlib

    content = json.loads(path.read_text("utf-8"))
    content.pop("sha256", None)
    for name, facts in content["files"].items() if isinstance(content.get("files"), dict) else ():
        file = path.parent / name
        if isinstance(facts, dict) and file.is_file() and file.parent == path.parent:
            facts |= {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "bytes": file.stat().st_size}
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content), "utf-8")


def _rehash(path: Path, _: Any, __: Any) -> None:
    """The same where the manifest is one; else it stays as it is."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        _again(path, _, __)


def _header(path: Path, parts: Mapping[str, Any], _: Any) -> None:
    """A safetensors file whose header are these bytes, of this length, so it says; zeros follow."""
    text = parts["bytes"].encode().decode("unicode_escape").encode("latin-1")
    path.write_bytes(struct.pack("<Q", parts["length"]) + text + bytes(max(0, parts["data"])))


def _replace(path: Path, pair: list[str], _: Any) -> None:
    path.write_text(path.read_text("utf-8").replace(*pair), "utf-8")


def _json_repeat(path: Path, words: list[Any], _: Any) -> None:
    """A key whose value is a list of so many equal values, in a JSON file that is there."""
    content = json.loads(path.read_text("utf-8"))
    content[words[0]] = [words[1]] * words[2]
    path.write_text(json.dumps(content), "utf-8")


def _gzip(path: Path, words: list[Any], _: Any) -> None:
    """The first bytes of a compressed text."""
    path.write_bytes(gzip.compress(words[0].encode())[: words[1]])


def _delete(path: Path, _: Any, __: Any) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _link(path: Path, target: str, _: Any) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target.replace("FOLDER", str(path.parent)))


def _pipe(path: Path, _: Any, __: Any) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _folder(path: Path, _: Any, __: Any) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _socket(path: Path, _: Any, __: Any) -> None:
    path.unlink(missing_ok=True)
    here = os.getcwd()
    os.chdir(path.parent)  # its name may have 107 letters at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _keep(path: Path, count: int, _: Any) -> None:
    path.write_bytes(path.read_bytes()[:count])


def _fill(path: Path, value: float, change: Mapping[str, Any]) -> None:
    """Tensors of a safetensors file filled with a number; `name`: that one alone."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name in [change["name"]] if "name" in change else list(tensors):
        tensors[name] = torch.full_like(tensors[name], value)
    save_file(tensors, path, metadata={"format": "pt"})


def _cast(path: Path, dtype: str, change: Mapping[str, Any]) -> None:
    """Tensors of a safetensors file in another number format; `name`: that one alone."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name in [change["name"]] if "name" in change else list(tensors):
        tensors[name] = tensors[name].to(getattr(torch, dtype))
    save_file(tensors, path, metadata={"format": "pt"})


WRITERS: dict[str, Callable[[Path, Any, Mapping[str, Any]], Any]] = {
    "json": lambda path, value, _: path.write_text(json.dumps(value), "utf-8"),
    "set": _set,
    "bytes": lambda path, text, _: path.write_bytes(text.encode().decode("unicode_escape").encode("latin-1")),
    "repeat": lambda path, pair, _: path.write_text(pair[0] * pair[1], "utf-8"),
    "append": lambda path, text, _: path.write_text(path.read_text("utf-8") + text, "utf-8"),
    "safetensors": _safetensors,
    "replace": _replace,
    "json_repeat": _json_repeat,
    "gzip": _gzip,
    "keep": _keep,
    "fill": _fill,
    "cast": _cast,
    "delete": _delete,
    "link": _link,
    "pipe": _pipe,
    "folder": _folder,
    "socket": _socket,
    "again": _again,
    "rehash": _rehash,
    "header": _header,
    "move": lambda path, target, _: path.rename(path.parent / target),
    "copy": lambda path, source, _: shutil.copy(path.parent / source, path),
}


def outcome_of(case: Mapping[str, Any], folder: Path) -> Outcome:
    """Do what the case says in its folder, within WALL_SECONDS."""
    from finetune.errors import FinetuneError

    printed = io.StringIO()
    with _within(WALL_SECONDS), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = ACTS[case["do"]](case, folder) or 0
        except FinetuneError as error:
            return Outcome(error.exit_code, f"{printed.getvalue()}{error}")
    return Outcome(code, printed.getvalue())


def processor_seconds() -> float:
    """Of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@contextlib.contextmanager
def _within(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def recipe_of(case: Mapping[str, Any], folder: Path) -> Path:
    """recipe.yaml of the case: its own text, or a plain one with its sections; {folder} is the case's folder."""
    path, own = folder / "recipe.yaml", case.get("recipe") or {}
    if path.exists() or path.is_symlink():
        return path
    if isinstance(own, str):
        path.write_text(own.replace("{folder}", str(folder)), "utf-8")
        return path
    rows = folder / "rows.jsonl"
    if not rows.exists():
        turns = [{"role": "user", "content": "a river"}, {"role": "assistant", "content": "the sea"}]
        rows.write_text(f"{json.dumps({'messages': turns})}\n" * 4, "utf-8")
    base = folder if case.get("start") in ("model", "sharded") else Path("someone/model")
    plain = tiny_lora(base, rows, output_dir=str(folder / "out"))
    content = json.dumps(merged(plain, own)).replace("{folder}", str(folder))
    path.write_text(content, "utf-8")
    return path


def _loaded(case: Mapping[str, Any], folder: Path) -> Any:
    from finetune.recipe.loader import load_recipe

    return load_recipe(recipe_of(case, folder), case.get("args", ()), here=True).recipe


def _verb(*words: str) -> Callable[[Mapping[str, Any], Path], int]:
    """A verb with the case's recipe and words; in a verb's words RECIPE and FOLDER are the case's."""

    def act(case: Mapping[str, Any], folder: Path) -> int:
        from finetune.cli.main import main

        recipe = str(recipe_of(case, folder)) if "RECIPE" in words else ""
        named = [word.replace("RECIPE", recipe).replace("FOLDER", str(folder)) for word in words]
        return main([*named, *map(str, case.get("args", ()))])

    return act


def _weights(case: Mapping[str, Any], folder: Path) -> None:
    import torch

    from finetune.model.build import load_base

    load_base(_loaded(case, folder), torch.device("cpu"))


def _structure(case: Mapping[str, Any], folder: Path) -> None:
    from finetune.model.build import refuse_early

    refuse_early(_loaded(case, folder))


def _tokenizer(case: Mapping[str, Any], folder: Path) -> None:
    """The tokenizer, and the case's rows through its template."""
    from finetune.model.new_tokens import load_tokenizer
    from finetune.tokens.dataset import prepare

    recipe = _loaded(case, folder)
    prepare(recipe, load_tokenizer(recipe))


def _start_adapter(case: Mapping[str, Any], folder: Path) -> None:
    from finetune.training.start_adapter import find_start_adapter

    find_start_adapter(_loaded(case, folder))


def _talk(case: Mapping[str, Any], folder: Path) -> None:
    from finetune.answers.chat import open_run

    open_run(folder / "run")


def _merge(case: Mapping[str, Any], folder: Path) -> None:
    from finetune.hand_over.merge import merge_run

    merge_run(folder / "run", dtype=None, base=None, prompts=0, say=lambda _: None)


def _evaluate(case: Mapping[str, Any], folder: Path) -> None:
    from finetune.finished_run import best_device, finished_run
    from tests.support.runs.finished import held_out_figures

    held_out_figures(finished_run(folder / "run"), best_device())


def _resume(case: Mapping[str, Any], folder: Path) -> None:
    """Claim the run's folder as a start does, and print where it would go on."""
    from finetune.run_folder.checkpoint import read_checkpoint
    from finetune.run_folder.folder import RunIdentity, claim_run_folder, lock_run_folder

    claim = claim_run_folder(
        lock_run_folder(folder / "run", wait_seconds=0), resume="auto", identity=RunIdentity({"a": 1}), command="c"
    )
    try:
        print(*claim.notes, claim.status, claim.checkpoint.step if claim.checkpoint else "no checkpoint", sep="\n")
        if claim.checkpoint:
            read_checkpoint(claim.checkpoint)
    finally:
        claim.release()


def _environment(case: Mapping[str, Any], folder: Path) -> None:
    from finetune.launch.launcher import read_launch
    from finetune.launch.slurm import slurm_ranks

    environment = {name: str(value) for name, value in case["environment"].items()}
    read_launch(environment | slurm_ranks(environment))


def _show(case: Mapping[str, Any], folder: Path) -> None:
    """Print a text as every verb prints."""
    import typer

    from finetune.output_stream import plain_output

    with plain_output():
        typer.echo(case["text"], color=True)


def _secrets(case: Mapping[str, Any], folder: Path) -> None:
    from finetune.hub.upload_files import Outgoing, check_no_secrets

    check_no_secrets([Outgoing("README.md", case["text"].replace("~", "").encode())], [])


def _streamed(case: Mapping[str, Any], folder: Path) -> None:
    """What a model writes, as `chat` streams it."""
    from finetune.answers.chat import PlainStreamer
    from tests.support.models.tiny import tiny_tokenizer

    PlainStreamer(tiny_tokenizer()).on_finalized_text(case["text"], stream_end=True)


ACTS: dict[str, Callable[[Mapping[str, Any], Path], Any]] = {
    "check": _verb("check", "RECIPE"),
    "check data": _verb("check", "--data", "RECIPE"),
    "preview": _verb("preview", "RECIPE"),
    "plan": _verb("plan", "RECIPE", "--gpus", "cpu"),
    "rehearse": _verb("rehearse", "RECIPE"),
    "report": _verb("report", "FOLDER/run"),
    "push": _verb("push", "--dry-run", "FOLDER/run", "me/it"),
    "chat verb": _verb("chat", "FOLDER/run", "--prompt", "a"),
    "verb": lambda case, folder: _verb(*case["words"])(case | {"args": ()}, folder),
    "weights": _weights,
    "structure": _structure,
    "tokenizer": _tokenizer,
    "start adapter": _start_adapter,
    "chat": _talk,
    "merge": _merge,
    "eval": _evaluate,
    "resume": _resume,
    "environment": _environment,
    "show": _show,
    "secrets": _secrets,
    "streamed": _streamed,
}
