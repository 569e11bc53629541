"""Where the package asks whether it is on a GPU, and what the answers were while tests ran.

Importing this with GPU_BRANCHES set has every answer that was not heard before written to the file of that name, by
each process: a test's forks and trainings too, where a sitecustomize imports it. See benchmarks/gpu_branches.py.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PACKAGE, FILE = "finetune", "GPU_BRANCHES"
heard: set[tuple[str, bool]] = set()


def questions(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Each expression that asks for the kind of the device, named by the function that it is in and its own text.

    A text that a function has several times is numbered.
    """
    counted: Counter[str] = Counter()
    for name, node in _asking(tree, ""):
        counted[name] += 1
        yield name if counted[name] == 1 else f"{name} ({counted[name]})", node


def _asking(tree: ast.AST, place: str) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.iter_child_nodes(tree):
        inner = place
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = f"{place}.{node.name}".lstrip(".")
        if _passed_on(tree, node):
            continue
        if isinstance(node, ast.expr) and _asks(node):
            yield f"{inner}: {ast.unparse(node)}", node
        else:
            yield from _asking(node, inner)


def _passed_on(call: ast.AST, node: ast.AST) -> bool:
    """An `on_cpu` that is given to a function, which decides."""
    named = isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).split(".")[-1] == "on_cpu"
    return named and isinstance(call, ast.Call | ast.keyword)


def _asks(node: ast.expr) -> bool:
    """`device.type == "cuda"` and the like, `torch.cuda.is_available()`, `on_cpu` where it decides."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        kinds = [side for side in sides if isinstance(side, ast.Constant) and side.value in ("cuda", "cpu")]
        return bool(kinds) and any("type" in ast.unparse(side) for side in sides)
    if isinstance(node, ast.Call):
        return ast.unparse(node) == "torch.cuda.is_available()"
    named = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    return named and ast.unparse(node).split(".")[-1] == "on_cpu"


class _Recording(ast.NodeTransformer):
    """Around each question a call that keeps its answer."""

    def __init__(self, file: str, tree: ast.AST) -> None:
        self.names = {id(node): f"{file} {name}" for name, node in questions(tree)}

    def visit(self, node: ast.AST) -> Any:
        name = self.names.get(id(node))
        if name is None:
            return self.generic_visit(node)
        call = ast.Call(ast.Name("answer_of_a_gpu", ast.Load()), [ast.Constant(name), node], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def _answer(name: str, value: Any) -> Any:
    if (name, bool(value)) not in heard:
        heard.add((name, bool(value)))
        with open(os.environ[FILE], "a", encoding="utf-8") as file:
            file.write(json.dumps([name, bool(value)]) + "\n")
    return value


class _Finder(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Loads the package's modules with their questions recorded."""

    def __init__(self) -> None:
        pass

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name.split(".")[0] != PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        tree = ast.parse(Path(self.path).read_text("utf-8"))
        tree = _Recording(str(Path(self.path).relative_to(ROOT)), tree).visit(tree)
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["answer_of_a_gpu"] = _answer
        super().exec_module(module)


def all_questions() -> list[str]:
    """Every question of the package, in order of the files."""
    found = []
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        found += [f"{file.relative_to(ROOT)} {name}" for name, _ in questions(tree)]
    return found


if FILE in os.environ:
    sys.meta_path.insert(0, _Finder())
