"""The eight inputs: each makes cases in the form of the corpus, out of valid files of this repository.

A case has the corpus's keys (tests/support/rows/corpus.py), and `place`: what a refusal must name.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.support.fuzzing.mutations import Raw, changed, changed_yaml, dumped, spoilt
from tests.support.rows.corpus_starts import MEASURED

ROOT = Path(__file__).resolve().parents[3]
Case = dict[str, Any]
SCHEMA = json.loads((ROOT / "finetune" / "recipe.schema.json").read_text("utf-8"))


@dataclass(frozen=True)
class Input:
    """One kind of a stranger's file."""

    what: str
    make: Callable[[Random, Mapping[str, Path]], Case]
    place: str  # a regular expression, of which a refusal must hold something


def case_of(name: str, seed: int, number: int, starts: Mapping[str, Path]) -> Case:
    """The case of an input by its seed and number: the same in every process, for the same valid files."""
    kind = INPUTS[name]
    return {"class": 7, **kind.make(Random(f"{name} {seed} {number}"), starts), "place": kind.place}


def escaped(content: bytes) -> dict[str, str]:
    """Bytes as the corpus writes them."""
    return {"bytes": "".join(chr(byte) if 32 <= byte < 127 and byte != 92 else f"\\x{byte:02x}" for byte in content)}


def times(draw: Random) -> int:
    """How many changes: one in most cases, so that what is behind the first refusal is reached."""
    return draw.choice([1, 1, 1, 2, 3])


def json_file(draw: Random, value: Any) -> dict[str, Any]:
    """A JSON file, changed in its values and keys; one of six in its bytes, one of fifty by being no file."""
    content = dumped(changed(draw, value, times(draw))).encode("utf-8", "surrogatepass")
    if draw.random() < 0.17:
        content = spoilt(draw, dumped(value).encode())
    return escaped(content) if draw.random() < 0.98 else no_file(draw)


def no_file(draw: Random) -> dict[str, Any]:
    """What is in a file's place."""
    return draw.choice([{"pipe": True}, {"link": "/dev/zero"}, {"link": "FOLDER/absent"}, {"link": "/proc/self/mem"}])


# -- recipe text


@cache
def _recipes() -> list[str]:
    return [path.read_text("utf-8") for path in sorted((ROOT / "recipes").glob("*.yaml"))]


@cache
def _others() -> list[str]:
    from tests.support.rows import others_configs

    examples = [value for value in vars(others_configs).values() if isinstance(value, dict | list | tuple)]
    found = [each for value in examples for each in (value.values() if isinstance(value, dict) else value)]
    return [yaml.safe_dump(each.values, sort_keys=False) for each in found if isinstance(each, others_configs.Example)]


@cache
def _keys() -> list[str]:
    """Every key of the schema, dotted."""
    found = []
    for name, entry in SCHEMA["properties"].items():
        texts = re.findall(r"#/\$defs/(\w+)", json.dumps(entry))
        inner = [key for text in texts for key in SCHEMA["$defs"].get(text, {}).get("properties", {})]
        found += [f"{name}.{key}" for key in inner] or [name]
    return found


def recipe(draw: Random, starts: Mapping[str, Path]) -> Case:
    """A recipe, an Accelerate configuration that it names, or another tool's configuration."""
    words = [
        ["check", "RECIPE"], ["check", "RECIPE"], ["check", "--resolved", "RECIPE"], ["check", "--json", "RECIPE"],
        ["launch", "RECIPE"], ["launch", "--on", "slurm", "RECIPE"],
    ]  # fmt: skip
    kind = draw.random()
    if kind < 0.2:
        text = _yaml(draw, draw.choice(_others()))
        return {"do": "verb", "words": ["import", "RECIPE"], "files": {"recipe.yaml": text}}
    if kind < 0.35:
        strategy = draw.choice(sorted((ROOT / "accelerate_configs").glob("*.yaml"))).read_text("utf-8")
        files = {"recipe.yaml": draw.choice(_recipes()), "strategy.yaml": _yaml(draw, strategy)}
        return {"do": "verb", "words": [*draw.choice(words), "accelerate_config=strategy.yaml"], "files": files}
    text = draw.choice(_recipes())
    overrides = [f"{draw.choice(_keys())}={draw.choice(YAML_WORDS)}"] if kind > 0.85 else []
    chosen = draw.choice(words)
    return {"do": "verb", "words": [*chosen, *overrides], "files": {"recipe.yaml": _yaml(draw, text)}}


def _yaml(draw: Random, text: str) -> Any:
    """By its lines, by its values (JSON is YAML), or by its bytes."""
    kind = draw.random()
    if kind < 0.55:
        for _ in range(times(draw)):
            text = changed_yaml(draw, text)
        return escaped(text.encode("utf-8", "surrogatepass"))
    if kind < 0.85:
        value = json.loads(json.dumps(yaml.safe_load(text), default=str))
        return escaped(dumped(changed(draw, value, times(draw))).encode("utf-8", "surrogatepass"))
    return escaped(spoilt(draw, text.encode())) if kind < 0.98 else no_file(draw)


YAML_WORDS = (
    "", "null", "-1", "0", "1", "2", "1e400", ".nan", ".inf", "9223372036854775808", "1e18", "[1]", "{a: 1}", "[",
    "a", "~", "true", "'", "*a", "!!python/name:os.system x", "0.5", "1e-9", "1000000", "all-linear", "auto",
    "2001-01-01", "\x1b[2J",
)  # fmt: skip


# -- rows of data

TURNS = [{"role": "user", "content": "a river"}, {"role": "assistant", "content": "the sea"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
ROWS: Sequence[dict[str, Any]] = (
    {"messages": TURNS},
    {"messages": [{"role": "system", "content": "be brief"}, *TURNS, *TURNS]},
    {"messages": [TURNS[0], {"role": "assistant", "content": "x", "tool_calls": [CALL]}, TURNS[1]], "tools": [TOOL]},
    {"messages": [TURNS[0], TURNS[1] | {"reasoning_content": "it flows"}]},
    {"prompt": "a river ", "completion": "the sea"},
    {"prompt": TURNS[:1], "completion": TURNS[1:]},
    {"text": "a river carries the boat down to the sea"},
    {"instruction": "where to", "input": "a river", "output": "the sea"},
    {"conversations": [{"from": "human", "value": "a river"}, {"from": "gpt", "value": "the sea"}]},
    {"question": "a river", "answer": "the sea"},
    {"tools": json.dumps([TOOL]), "messages": TURNS, "id": 7},
)


def rows(draw: Random, starts: Mapping[str, Path]) -> Case:
    """A file of rows: JSON Lines, one array, CSV, Parquet; checked, or rendered and tokenised."""
    row = draw.choice(ROWS)
    given = [
        changed(draw, row, times(draw)) if draw.random() < 0.5 else dict(row) for _ in range(draw.choice([1, 3, 60]))
    ]
    if draw.random() < 0.7:
        given.append(dict(row))
    kind = draw.choice(["jsonl", "jsonl", "json", "csv", "parquet"])
    content = WRITTEN[kind](draw, given)
    if draw.random() < 0.3:
        content = spoilt(draw, content)
    name = f"rows.{kind}"
    if draw.random() < 0.1:
        name, content = f"{name}.gz", spoilt(draw, gzip.compress(content, mtime=0))
    data: Case = {"train": [{"path": "{folder}/" + name}], "eval": None}
    act = draw.choice(["check data", "check data", "check data", "tokenizer", "preview"])
    return {
        "do": act,
        "start": "model",
        "files": {name: escaped(content) if draw.random() < 0.99 else no_file(draw)},
        "recipe": {"data": data},
    }


def _as_csv(draw: Random, given: list[Any]) -> bytes:
    names = list(dict.fromkeys(key for row in given if isinstance(row, dict) for key in row))
    page = io.StringIO()
    writer = csv.writer(page)
    writer.writerow(names)
    for row in given:
        cells = [row.get(name) for name in names] if isinstance(row, dict) else [row]
        writer.writerow([cell if isinstance(cell, str) else dumped(cell) for cell in cells])
    return page.getvalue().encode("utf-8", "replace")


def _as_parquet(draw: Random, given: list[Any]) -> bytes:
    """The rows that a table can hold, a column of another type among them."""
    import datetime
    from decimal import Decimal

    import pyarrow
    import pyarrow.parquet

    odd: list[Any] = [
        Decimal("1.5"), datetime.datetime(2001, 1, 1), datetime.timedelta(days=10**6), b"\xff", [1], {"a": None},
        datetime.date(1, 1, 1), float("nan"), 2**62, True, datetime.time(1), [[b"\x00"]],
    ]  # fmt: skip
    table = [json.loads(json.dumps(row, default=str)) for row in given if _is_plain(row)] or [dict(ROWS[0])]
    name = draw.choice([*table[0], "more", "messages"])
    if draw.random() < 0.5:
        value = draw.choice(odd)
        table = [row | {name: value} for row in table]
    try:
        columns = pyarrow.Table.from_pylist(table)
        pyarrow.parquet.write_table(columns, io.BytesIO())
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):
        columns = pyarrow.Table.from_pylist([dict(ROWS[0])] * 3)
    sink = io.BytesIO()
    if draw.random() < 0.2:
        columns = columns.rename_columns(
            [draw.choice(["a\x1b[2J", "", "text", "messages", "é"]), *columns.column_names[1:]]
        )
    if draw.random() < 0.1:
        columns = columns.append_column(columns.column_names[0], columns.column(0))
    pyarrow.parquet.write_table(columns, sink, compression=draw.choice(["none", "snappy", "zstd", "gzip"]))
    return sink.getvalue()


def _is_plain(row: Any) -> bool:
    try:
        return isinstance(row, dict) and bool(row) and json.loads(dumped(row)) is not None
    except (ValueError, RecursionError):
        return False


WRITTEN: Mapping[str, Callable[[Random, list[Any]], bytes]] = {
    "jsonl": lambda draw, given: "".join(dumped(row) + "\n" for row in given).encode("utf-8", "surrogatepass"),
    "json": lambda draw, given: dumped(given).encode("utf-8", "surrogatepass"),
    "csv": _as_csv,
    "parquet": _as_parquet,
}


# -- what a model's folder holds


def _document(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def config(draw: Random, starts: Mapping[str, Path]) -> Case:
    """config.json of a tiny model or of a family, generation_config.json, adapter_config.json."""
    kind = draw.random()
    if kind < 0.2:
        adapter = _document(starts["run"] / "run" / "adapter" / "adapter_config.json")
        act = draw.choice(["chat", "merge", "eval"])
        return {"do": act, "start": "run", "files": {"run/adapter/adapter_config.json": json_file(draw, adapter)}}
    if kind < 0.35:
        own = _document(starts["model"] / "generation_config.json")
        return {"do": "weights", "start": "model", "files": {"generation_config.json": json_file(draw, own)}}
    if kind < 0.5:
        family = draw.choice(sorted((ROOT / "finetune" / "model" / "configs").glob("*.json")))
        value = json_file(draw, _shrunk(_document(family)))
        return {"do": "structure", "start": "model", "files": {"config.json": value}}
    value = json_file(draw, _document(starts["model"] / "config.json"))
    act = draw.choice(["structure", "weights", "weights"])
    return {"do": act, "start": "model", "files": {"config.json": value}}


def _shrunk(value: Any) -> Any:
    """A family's configuration with two layers."""
    if isinstance(value, dict):
        value = {key: 2 if key == "num_hidden_layers" else _shrunk(item) for key, item in value.items()}
        if isinstance(kinds := value.get("layer_types"), list):
            value["layer_types"] = kinds[:2]
    return value


TEMPLATE_PARTS = (
    "{{ 1/0 }}", "{% for a in range(10**9) %}{% endfor %}", "{{ 'a' * 10**9 }}", "{% if %}", "{% endif %}", "{{",
    "}}", "{%", "{{ raise_exception('\\x1b[2J no') }}", "{{ messages[5].x.y }}", "{{ ''.__class__.__mro__ }}",
    "{% include 'a' %}", "{% generation %}", "{% endgeneration %}", "{{ messages | tojson }}",
    "{% set messages = [] %}", "{{ namespace() }}", "{{ lipsum(10**5) }}", "{{ cycler }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ strftime_now('%Y') }}", "\x1b", "{% break %}",
    "{{ messages[0]['content'].format(messages) }}", "{{ 9**9**9 }}", "{{ 'x'.encode() }}", "{# ", "\ud7ff\uffff",
    "{{ messages | map(attribute='role') | list }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "<|im_end|>",
)  # fmt: skip


def tokenizer(draw: Random, starts: Mapping[str, Path]) -> Case:
    """tokenizer.json, tokenizer_config.json, a chat template, the files of special tokens."""
    folder, kind = starts["model"], draw.random()
    if kind < 0.5:
        name, change = "tokenizer.json", json_file(draw, _document(folder / "tokenizer.json"))
    elif kind < 0.75:
        name, change = "tokenizer_config.json", json_file(draw, _document(folder / "tokenizer_config.json"))
    elif kind < 0.85:
        name = draw.choice(["special_tokens_map.json", "added_tokens.json", "chat_template.json", "vocab.json"])
        valid = {
            "eos_token": "<|im_end|>",
            "additional_special_tokens": ["<a>"],
            "<b>": 600,
            "chat_template": "{{ 1 }}",
        }
        change = json_file(draw, valid)
    else:
        text = (folder / "chat_template.jinja").read_text("utf-8")
        at = draw.randint(0, len(text))
        text = text[:at] + draw.choice(TEMPLATE_PARTS) + text[at + draw.choice([0, 0, 3, 30]) :]
        name, change = "chat_template.jinja", escaped(text.encode("utf-8", "surrogatepass"))
        if draw.random() < 0.2:
            change = escaped(spoilt(draw, text.encode()))
    return {"do": "tokenizer", "start": "model", "files": {name: change}, "recipe": {"data": {"eval": None}}}


def safetensors(draw: Random, starts: Mapping[str, Path]) -> Case:
    """The header of a base's weights, or of an adapter's."""
    adapter = draw.random() < 0.35
    name = "run/adapter/adapter_model.safetensors" if adapter else "model.safetensors"
    start = "run" if adapter else "model"
    content = (starts[start] / name).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header.setdefault("__metadata__", {"format": "pt"})
    text = dumped(changed(draw, header, times(draw))).encode("utf-8", "surrogatepass")
    if draw.random() < 0.2:
        text = spoilt(draw, content[8 : 8 + length])
    stated = (
        len(text) if draw.random() < 0.9 else draw.choice([0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1])
    )
    size = len(content) - 8 - length + draw.choice([0] * 9 + [-1, 1, 4, -4])
    change: Any = {"header": {"length": stated, "bytes": escaped(text)["bytes"], "data": size}}
    if draw.random() < 0.03:
        change = no_file(draw)
    act = draw.choice(["chat", "merge", "eval"]) if adapter else "weights"
    return {"do": act, "start": start, "files": {name: change}}


def index(draw: Random, starts: Mapping[str, Path]) -> Case:
    """The index of a base whose weights are in two files."""
    name = "model.safetensors.index.json"
    value = _document(starts["sharded"] / name)
    if draw.random() < 0.5:
        tensor = draw.choice(sorted(value["weight_map"]))
        value["weight_map"][tensor] = draw.choice(FILE_NAMES)
    return {"do": "weights", "start": "sharded", "files": {name: json_file(draw, value)}}


FILE_NAMES: Sequence[Any] = (
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "pytorch_model.bin", "../out.safetensors",
    "/etc/passwd", "config.json", "x.safetensors", ".safetensors", "a/b.safetensors", "x.safetensors\x00", "model.gguf",
    "MODEL-00001-OF-00002.SAFETENSORS", "a\x1b[2J.safetensors", "tokenizer.json", ".", "", "\ud800.safetensors",
    "a" * 300 + ".safetensors", "a\n.safetensors", None, 7, Raw('"\\ud800.safetensors"'),
)  # fmt: skip


# -- what a run leaves


def manifests(draw: Random, starts: Mapping[str, Path]) -> Case:
    """MANIFEST.json and state.json of a checkpoint, its hashes made anew or not; the headers of its tensors."""
    step = draw.choice(["step-00000001", "step-00000002"])
    place = f"run/checkpoints/{step}"
    folder = starts["checkpoints"] / place
    again = {f"{place}/MANIFEST.json": {"rehash": True}} if draw.random() < 0.85 else {}
    kind = draw.random()
    if kind < 0.6:
        change = json_file(draw, _document(folder / "MANIFEST.json"))
        files = {f"{place}/MANIFEST.json": [change, {"rehash": True}] if again and "bytes" in change else change}
    elif kind < 0.8:
        files = {f"{place}/state.json": json_file(draw, _document(folder / "state.json")), **again}
    elif kind < 0.9:
        files = {"run/run_state.json": json_file(draw, _document(starts["checkpoints"] / "run" / "run_state.json"))}
    else:
        name = draw.choice(["model-00000.safetensors", "optimizer-00000.safetensors"])
        files = {f"{place}/{name}": escaped(spoilt(draw, (folder / name).read_bytes())), **again}
    return {"do": "resume", "start": "checkpoints", "files": files}


def metrics(draw: Random, starts: Mapping[str, Path]) -> Case:
    """metrics.jsonl of a run's folder, and the records beside it, as reports, audits and model cards read them."""
    name = draw.choice(["metrics.jsonl"] * 4 + ["receipt.json", "run_state.json", "samples.jsonl", "environment.json"])
    text = (MEASURED / name).read_text("utf-8")
    if name.endswith(".json"):
        change = json_file(draw, json.loads(text))
    else:
        lines = [json.loads(line) for line in text.splitlines()]
        lines = changed(draw, lines, times(draw))
        if not isinstance(lines, list):
            lines = [lines]
        content = "".join(dumped(line) + "\n" for line in lines).encode("utf-8", "surrogatepass")
        change = escaped(spoilt(draw, content) if draw.random() < 0.2 else content)
    words = [
        ["report", "FOLDER/run"],
        *[["plan", "--audit", "FOLDER/run"], ["push", "--dry-run", "FOLDER/run", "me/it"]] * 2,
    ]  # fmt: skip
    return {"do": "verb", "words": draw.choice(words), "start": "measured", "files": {f"run/{name}": change}}


INPUTS: Mapping[str, Input] = {
    "recipe": Input(
        "recipe text, Accelerate configurations, other tools' configurations", recipe, r"(?m)^\S*[\w.\]]+:? "
    ),
    "rows": Input("rows: JSON Lines, arrays, CSV, Parquet", rows, r"rows\.\w+"),
    "config": Input("config.json, generation_config.json, adapter_config.json", config, r"config\.json|model\.|FOLDER"),
    "tokenizer": Input("tokenizer.json and what is beside it", tokenizer, r"token|template|rows"),
    "safetensors": Input("headers of safetensors", safetensors, r"model\.safetensors|adapter|model\."),
    "index": Input("the index of weights", index, r"index\.json|\.safetensors|model\."),
    "manifests": Input("manifests of checkpoints", manifests, r"FOLDER"),
    "metrics": Input("metrics and records of a run", metrics, r"FOLDER"),
}
