"""Rows of real tasks from two packages, for benchmarks and tests: reasoning-gym's questions, and bfcl-eval's tool calls.

    python benchmarks/real_rows.py FOLDER                  both; downloads two wheels (9 MB) and what reasoning-gym needs
    python benchmarks/real_rows.py FOLDER reasoning_gym    one of them
    python benchmarks/real_rows.py FOLDER --check          write nothing; compare FOLDER's rows with ROWS

Both packages have the Apache-2.0 licence. The wheels are pinned by hash, and so are the rows: another wheel, another
version of a package below it or another Python that draws other numbers ends this script. bfcl-eval pins old libraries,
so its wheel is only unpacked. reasoning-gym runs in an environment of its own. The kit imports neither.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WHEELS = {
    "reasoning_gym": ("reasoning-gym==0.1.25", "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435"),
    "bfcl_eval": ("bfcl-eval==2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"),
}
ROWS = {
    "sums.jsonl": "",
    "sums_second.jsonl": "",
    "sums_held_out.jsonl": "",
}  # file: SHA-256
NUMBER = "\nReply with one number and nothing else."
# A task: reasoning-gym's generator, its settings, where the question begins and ends in its text, and what is added.
TASKS: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "sums": ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, ": ", "", NUMBER),
    "gcd": ("gcd", {"max_value": 20}, "", ". Give only the GCD", "." + NUMBER),
    "lcm": ("lcm", {"max_value": 20}, "", "", "." + NUMBER),
}
PARTS = {"": 96, "_second": 48, "_held_out": 100}  # rows to sample from, for the pairs that follow, and to score
SEED = 57
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}  # of bfcl's schemas, in JSON Schema
BFCL = {"simple_python": 400, "multiple": 200, "parallel": 200, "parallel_multiple": 200, "live_simple": 258}


def reasoning_rows(task: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """File and row of a task's parts. No question comes twice. Runs where reasoning_gym is installed."""
    import reasoning_gym

    generator, settings, begin, end, added = TASKS[task]
    drawn = iter(reasoning_gym.create_dataset(generator, seed=SEED, size=100 * sum(PARTS.values()), **settings))
    seen: set[str] = set()
    for part, count in PARTS.items():
        written = 0
        while written < count:
            item = next(drawn)
            question = item["question"].strip()
            if begin:
                question = question.split(begin, 1)[1]
            if end:
                question = question.split(end)[0]
            if question not in seen:
                seen.add(question)
                written += 1
                turns = {"user": question + added, "assistant": str(item["answer"])}
                messages = [{"role": role, "content": text} for role, text in turns.items()]
                yield f"{task}{part}.jsonl", {"messages": messages}


def bfcl_rows(wheel: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """File and row of bfcl's questions with one right call, or several: messages with `tools` and `tool_calls`.

    `possible` has each argument's right values, as bfcl's own checker reads them. "" among them: it may be left out. The
    answer has the first value that is none of "".
    """
    with zipfile.ZipFile(wheel) as files:
        for kind, count in BFCL.items():
            read = [
                [json.loads(line) for line in files.read(f"bfcl_eval/data/{name}").decode().splitlines()]
                for name in (f"BFCL_v4_{kind}.json", f"possible_answer/BFCL_v4_{kind}.json")
            ]
            assert [len(each) for each in read] == [count, count], kind
            for question, answer in zip(*read, strict=True):
                assert question["id"] == answer["id"]
                calls = [
                    {"name": name, "arguments": first_values(arguments)}
                    for call in answer["ground_truth"]
                    for name, arguments in call.items()
                ]
                answered = {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls]}
                tools = [
                    {"type": "function", "function": each | {"parameters": as_json_schema(each["parameters"])}}
                    for each in question["function"]
                ]
                (turns,) = question["question"]
                row = {"messages": [*turns, answered], "tools": tools, "possible": answer["ground_truth"]}
                yield f"bfcl_{kind}.jsonl", row


def first_values(possible: Any) -> Any:
    """The first right value of each argument, without arguments that may be left out and have no other value."""
    found = {}
    for name, values in possible.items():
        chosen = next((value for value in values if value != ""), None)
        if chosen is None:
            continue
        if isinstance(chosen, dict):
            chosen = first_values(chosen)
        elif isinstance(chosen, list):
            chosen = [first_values(each) if isinstance(each, dict) else each for each in chosen]
        found[name] = chosen
    return found


def as_json_schema(schema: Any) -> Any:
    """bfcl writes Python's names of types: dict is object, float is number, tuple is array, and any is no type at all."""
    if isinstance(schema, list):
        return [as_json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: as_json_schema(value) for key, value in schema.items()}
    if isinstance(kind := schema.get("type"), str) and kind in JSON_TYPES:
        found["type"] = JSON_TYPES[kind]
        if found["type"] is None:
            del found["type"]
    return found


def wheel_of(package: str, folder: Path) -> Path:
    """Download a wheel that has the pinned hash, unless it is there. pip refuses another one."""
    requirement, digest = WHEELS[package]
    wheels = folder / "wheels"
    if not (found := list(wheels.glob(f"{package}-*.whl"))):
        wheels.mkdir(parents=True, exist_ok=True)
        (wheels / "pinned.txt").write_text(f"{requirement} --hash=sha256:{digest}\n", "utf-8")
        words = ["download", "-q", "--no-deps", "--require-hashes", "-r", str(wheels / "pinned.txt"), "-d", str(wheels)]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        found = list(wheels.glob(f"{package}-*.whl"))
    if hashlib.sha256(found[0].read_bytes()).hexdigest() != digest:
        raise SystemExit(f"{found[0]}: is not the wheel that is pinned; remove it")
    return found[0]


def python_with_reasoning_gym(folder: Path) -> Path:
    """The Python of an environment that has the pinned reasoning-gym."""
    environment = folder / "environment"
    if not (environment / "bin" / "python").exists():
        venv.create(environment, with_pip=True)
        words = ["-m", "pip", "install", "-q", str(wheel_of("reasoning_gym", folder))]
        subprocess.run([str(environment / "bin" / "python"), *words], check=True)
    return environment / "bin" / "python"


def write(folder: Path, packages: list[str]) -> None:
    """Write the packages' rows into the folder. Raises SystemExit if they are others than the pinned ones."""
    lines: dict[str, list[str]] = {}
    for package in packages:
        if package == "bfcl_eval":
            found = bfcl_rows(wheel_of(package, folder))
        else:
            words = [str(python_with_reasoning_gym(folder)), __file__, "--draw", *TASKS]
            drawn = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
            found = iter(json.loads(line) for line in drawn.splitlines())
        for name, row in found:
            lines.setdefault(name, []).append(json.dumps(row, ensure_ascii=False) + "\n")
    for name, texts in lines.items():
        (folder / name).write_text("".join(texts), "utf-8")
    check(folder, list(lines))


def check(folder: Path, names: list[str]) -> None:
    for name in names:
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if digest != ROWS.get(name):
            raise SystemExit(f"{folder / name}: SHA-256 {digest}, and ROWS says {ROWS.get(name)}")


def main() -> int:
    words = sys.argv[1:]
    if words[:1] == ["--draw"]:  # in reasoning-gym's own environment
        for task in words[1:]:
            for found in reasoning_rows(task):
                print(json.dumps(found, ensure_ascii=False))
        return 0
    names = [word for word in words if not word.startswith("--")]
    if not names or {*names[1:]} - {*WHEELS}:
        raise SystemExit(__doc__)
    folder = Path(names[0])
    if "--check" in words:
        check(folder, list(ROWS))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, names[1:] or list(WHEELS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
