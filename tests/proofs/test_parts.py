"""Each verb stands on the parts of a training that docs/architecture.md names for it, by the source's call graph."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import finetune

PACKAGE = Path(finetune.__file__).parent
# The part's name in the documentation -> its function.
PARTS = {
    "recipe": "recipe.loader.load_recipe",
    "settings": "recipe.strategy_fit.refuse_recipe",
    "ranks": "recipe.strategy_fit.ranks_problem",
    "machine": "strategies.machine.machine_problems",
    "choose": "training.start.choose",
    "auto": "closed_form.recomputation.choose_recomputation",
    "probe": "probe.probe.probe",
    "prepare": "tokens.dataset.prepare",
    "assemble": "strategies.assemble.assemble",
    "steps": "training.loop.take_steps",
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@cache
def references() -> dict[str, set[str]]:
    """Function or class -> the package's functions, classes and modules that its body names."""
    graph: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module, tree = module_name(path), ast.parse(path.read_text("utf-8"))
        imported: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "finetune":
                source = (node.module or "").removeprefix("finetune").lstrip(".")
                imported |= {name.asname or name.name: f"{source}.{name.name}".lstrip(".") for name in node.names}
        if path.name == "__init__.py":  # what it passes on
            graph |= {f"{module}.{name}": {place} for name, place in imported.items()}
            for node in ast.walk(tree):  # plan = plan_recipe
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in imported:
                    graph[f"{module}.{ast.unparse(node.targets[0])}"] = {imported[node.value.id]}
        own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            named = graph.setdefault(f"{module}.{node.name}", set())
            for inner in ast.walk(node):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id in imported
                ):
                    named.add(f"{imported[inner.value.id]}.{inner.attr}")
                elif isinstance(inner, ast.Name) and inner.id in imported:
                    named.add(imported[inner.id])
                elif isinstance(inner, ast.Name) and inner.id in own:
                    named.add(f"{module}.{inner.id}")
    return graph


def parts_of(function: str) -> list[str]:
    """The parts that a function reaches, in their order."""
    graph, reached, waiting = references(), set(), [function]
    assert function in graph, function
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += graph.get(name, ())
    return [part for part, place in PARTS.items() if place in reached]


def drawn() -> dict[str, list[str]]:
    """Verb -> the parts that the documentation's table names for it."""
    text = (
        (PACKAGE.parent / "docs" / "architecture.md").read_text("utf-8").partition("## The verbs on the five parts")[2]
    )
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", text.partition("\n## ")[0], re.MULTILINE)
    return {verb: parts.split(", ") for verb, parts in rows}


def test_each_verb_stands_on_the_parts_that_are_drawn() -> None:
    entries = {name.rpartition(".")[2]: name for name in references() if name.startswith("cli.")}
    table = drawn()
    assert len(table) == 13
    assert table == {verb: parts_of(entries[verb]) for verb in table}


def test_a_part_that_a_verb_loses_is_seen() -> None:
    assert set(PARTS.values()) <= references().keys()
    assert parts_of("training.start.refuse") == ["settings", "ranks", "machine"]
    assert parts_of("launch.plan.plan_launch") == ["recipe", "settings", "ranks"]
    assert "assemble" in parts_of("planner.command.plan_in_words"), "by the planner's door"
    assert parts_of("training.start.prepare") == ["prepare"]
