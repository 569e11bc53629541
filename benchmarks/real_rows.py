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
    "products.jsonl": "9a67c7b34237d780964ab58df15bc2c0ae1295f8e0eac74858eb8bd0a4729a6b",
    "products_held_out.jsonl": "f16f24703219332fc44b7dc9a82f5833936b4d57b01061ffc5845eb7c511e4d8",
    "products_second.jsonl": "39a023c1edd9952b304929942b978d16d6a898420ff9eaba73ff2b0c026d1597",
    "sums.jsonl": "d4377a3ea7266de882691fa4f8133816a542ac58772834594e92b55a7cb1083a",
    "sums_held_out.jsonl": "8e26336b5ec86d5d80b4780d93398e8c99d5931fb0415fdd0a01b49181fb35b0",
    "sums_second.jsonl": "60d568d24e5d8ba0bde4f00608093ae6cfee90b6be0e4d8cfba82b4a3f2baa12",
    "three.jsonl": "de0af53d0719ee7868d24907c5b6b3c127640191c38cec3fdaac40d52f2722fd",
    "three_held_out.jsonl": "48b3abf18f5f846a30b339294f40a335d4d1a133b7e99c538f7efdec5525ea3d",
    "three_second.jsonl": "b9cc89bf1a133a24e287d68cbb5f1738f2ff4dc8611e359769631672813dfdcc",
}  # file: SHA-256
SYSTEM = "Reply with one number."
# A task: reasoning-gym's generator, its settings, and where the question begins and ends in its text. The rest of it
# says how to answer, as SYSTEM does in fewer tokens.
TASKS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "sums": ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, "problem: ", ""),
    "three": ("chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}, "problem: ", ""),
    "products": ("products", {"min_digits": 1, "max_digits": 2}, "multiplication: ", ". Give only"),
}
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
    import reasoning_gym

    generator, settings, begin, end = TASKS[task]
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
                turns = {"system": SYSTEM, "user": question, "assistant": str(item["answer"])}
                messages = [{"role": role, "content": text} for role, text in turns.items()]
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
