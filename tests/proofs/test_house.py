"""The house rules that a machine can check: import order, names that shadow nothing."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.recipes import tiny_lora, write_recipe

PACKAGE = Path(__file__).resolve().parents[2] / "finetune"
# From the ground up: a room imports from the floors below its own, never from its neighbours.
FLOORS = [
    ["errors", "output_stream", "paths", "redaction", "trial_limit", "wording"],
    ["library_errors"],
    ["recipe", "files"],
    ["architecture", "untrusted", "scoring"],
    ["base"],
    ["importers", "measure", "launch", "model", "data"],
    ["strategies", "tokens", "closed_form"],
    ["generation", "ranks"],
    ["probe"],
    ["run_folder"],
    ["hub", "report", "finished_run"],
    ["storage"],
    ["training"],
    ["planner", "rehearse", "compare", "doctor", "hand_over", "new_recipe"],
    ["answers"],
    ["train"],
    ["cli"],
]
# Entered by verbs and by each other; a training needs none of them.
ANNEXES = ("planner", "rehearse", "compare", "doctor", "hand_over", "answers", "importers", "new_recipe")
WITH_A_DOOR = ("planner", "importers", "new_recipe")  # other packages import their `__init__` alone
# The same within the planner; "planner" are the modules next to its two folders.
PLANNER_FLOORS = [["planner.trace"], ["planner.depth"], ["planner"]]
# These import no torch, not through others either, so that checking a recipe, listing recipes and help are instant.
LIGHT = """
errors library_errors output_stream paths redaction trial_limit wording files train untrusted
recipe data importers new_recipe compare doctor cli closed_form scoring base.location base.package_models
launch.cpu_memory launch.gpu_environment launch.launcher launch.local_ranks launch.script launch.signals launch.slurm
launch.plan_request launch.watched_job launch.with_parent
model.known_configs
tokens.assistant_spans tokens.cache tokens.chat_template tokens.conversation tokens.dataset
tokens.encoder tokens.marks tokens.mixture tokens.packing tokens.tokenizer
run_folder.facts ranks.heartbeat run_folder.status
hub.around_training hub.base_model hub.client hub.model_card hub.push hub.upload_files
report.curves report.html report.pictures report.run_page
training.batch_notes training.batch_plan
planner.arithmetic planner.candidates planner.command planner.remedies planner.run_plans planner.__main__
""".split()
SLOW_TO_IMPORT = {"torch", "transformers", "accelerate", "peft", "datasets"}


@cache
def parsed() -> dict[str, ast.Module]:
    """Every file of the package but the __init__, parsed."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.stem != "__init__"
    }


def named(nodes: Iterable[ast.AST]) -> set[str]:
    """Every name that import statements among these nodes bring, dotted from its package: torch.nn.Linear."""
    result: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            result |= {f"{node.module}.{alias.name}" for alias in node.names}
    return result


def own_modules(names: Iterable[str]) -> set[str]:
    """The modules of this package among them, or in which they are."""
    below = {name.removeprefix("finetune.") for name in names if name.startswith("finetune.")}
    return {module for name in below for module in (name, name.rpartition(".")[0]) if module in parsed()}


def room(module: str) -> str:
    return module.split(".")[0]


def planner_room(module: str) -> str:
    folder = module.rpartition(".")[0]
    return folder if folder.startswith("planner.") else "planner"


def upward(uses: dict[str, set[str]]) -> list[str]:
    """Imports from a floor above or from a neighbour; `uses`: module -> modules that it imports."""
    floor = {
        name: number for floors in (FLOORS, PLANNER_FLOORS) for number, names in enumerate(floors) for name in names
    }
    top = {name: number for number, names in enumerate(FLOORS) for name in names}
    wrong = []
    for module, others in uses.items():
        for other in others:
            here, there = room(module), room(other)
            levels = top
            if here == there == "planner":
                here, there, levels = planner_room(module), planner_room(other), floor
            if here != there and levels[there] >= levels[here]:
                wrong.append(f"{module} imports {other}")
    return sorted(wrong)


@cache
def imports() -> dict[str, list[tuple[ast.AST, bool]]]:
    """Module -> its import statements, each with whether only type checkers see it."""
    found = {}
    for module, tree in parsed().items():
        nodes = list(ast.walk(tree))
        hidden = {id(each) for node in nodes if is_for_types(node) for each in ast.walk(node)}
        found[module] = [(node, id(node) in hidden) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return found


@cache
def uses(*, at_run_time: bool = False) -> dict[str, set[str]]:
    """Module -> modules that it imports; `at_run_time`: without those that only type checkers see."""
    return {
        module: own_modules(named(node for node, for_types in nodes if not (at_run_time and for_types))) - {module}
        for module, nodes in imports().items()
    }


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def circle(uses: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports; empty without a circle."""
    try:
        graphlib.TopologicalSorter(uses).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_has_its_floor() -> None:
    assert {room(module) for module in parsed()} == {name for floor in FLOORS for name in floor}
    planner = {planner_room(module) for module in parsed() if room(module) == "planner"}
    assert planner == {name for floor in PLANNER_FLOORS for name in floor}


def test_both_drawings_show_every_room() -> None:
    root = PACKAGE.parent
    drawing = (root / "docs" / "architecture.md").read_text("utf-8").split("```")[1]
    drawn = [
        re.findall(r"\w+", re.split(r"\s{3,}", line)[0].replace(".py", "")) for line in drawing.strip().splitlines()
    ]
    assert list(map(sorted, drawn[::-1])) == list(map(sorted, FLOORS))
    layout = (root / "AGENTS.md").read_text("utf-8").partition("## Layout")[2].split("```")[1]
    named_there = re.findall(r"\w+", layout.partition("  cli ")[0])
    assert {name for floor in FLOORS for name in floor} - {*named_there} == {"cli"}


def test_imports_go_down() -> None:
    assert upward(uses()) == []


def to_annexes(uses: dict[str, set[str]]) -> list[str]:
    """Imports of an annex by the core."""
    return sorted(
        f"{module} imports {other}"
        for module, others in uses.items()
        if room(module) not in (*ANNEXES, "cli")
        for other in others
        if room(other) in ANNEXES
    )


def test_the_core_imports_no_annex() -> None:
    assert to_annexes(uses()) == []
    assert to_annexes({"training.session": {"planner.pick"}}) == ["training.session imports planner.pick"]


def past_the_door(modules: dict[str, ast.Module]) -> list[str]:
    """Imports of an annex's inside by something outside it, where its `__init__` is the only door."""
    return sorted(
        f"{module} imports {name}"
        for module, tree in modules.items()
        for name in named(ast.walk(tree))
        for annex in WITH_A_DOOR
        if name.startswith(f"finetune.{annex}.") and not module.startswith((f"finetune.{annex}.", f"{annex}."))
        if any(name == f"finetune.{inside}" or name.startswith(f"finetune.{inside}.") for inside in parsed())
    )


def test_annexes_are_entered_by_their_public_module() -> None:
    root = PACKAGE.parent
    outside = {
        ".".join(path.relative_to(root).with_suffix("").parts): ast.parse(path.read_text())
        for folder in ("lectures", "benchmarks")
        for path in (root / folder).rglob("*.py")
    }
    assert past_the_door({f"finetune.{name}": tree for name, tree in parsed().items()} | outside) == []
    inside = next(name for name in parsed() if name.startswith("planner."))
    assert past_the_door({"finetune.cli.main": ast.parse(f"import finetune.{inside}")})


# Stops a training at its first step, and prints the files of this package that it has loaded until then.
AT_FIRST_STEP = """
import os, sys
from pathlib import Path
from finetune.training import step

def stopped(*arguments, **named):
    package = Path(step.__file__).parents[1]
    files = {Path(module.__file__) for name, module in sys.modules.items() if name.startswith("finetune.")}
    print("LOADED", *sorted(str(file.relative_to(package)) for file in files), flush=True)
    os._exit(0)

step.optimizer_step = stopped  # before the modules that take it from there
from finetune.train import process_main
sys.exit(process_main(sys.argv[1:]))
"""


@pytest.mark.thorough
def test_a_training_loads_no_annex_no_hub_no_report_and_few_files(tmp_path: Path) -> None:
    base, chats = save_tiny(tmp_path / "base"), write_chats(tmp_path / "chats.jsonl", [24] * 10)
    recipe = write_recipe(tmp_path, tiny_lora(base, chats, training={"max_steps": 3}))
    command = [sys.executable, "-c", AT_FIRST_STEP, str(recipe), f"output_dir={tmp_path / 'run'}"]
    environment = os.environ | {"FINETUNE_CACHE": str(tmp_path / "cache")}
    process = subprocess.run(command, cwd=PACKAGE.parent, env=environment, capture_output=True, text=True)
    said = [line for line in process.stdout.splitlines() if line.startswith("LOADED ")]
    assert len(said) == 1, process.stdout + process.stderr
    loaded = [file for file in said[0].split()[1:] if not file.endswith("__init__.py")]
    rooms = {file.removesuffix(".py").split("/")[0] for file in loaded}
    assert {"training", "recipe", "train"} <= rooms
    assert rooms.isdisjoint({*ANNEXES, "cli", "hub", "report"})
    lines = sum((PACKAGE / file).read_text("utf-8").count("\n") for file in loaded)
    # What a reader may have to open. Lower both numbers when files or lines go.
    assert len(loaded) <= 135
    assert lines <= 31_263


def held_functions(modules: dict[str, ast.Module]) -> list[str]:
    """Fields of dataclasses that hold a function. A method says where its code is."""
    return [
        f"{module}.{each.name}.{ast.unparse(field.target)}"
        for module, tree in modules.items()
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef) and any("dataclass" in ast.unparse(by) for by in each.decorator_list)
        for field in each.body
        if isinstance(field, ast.AnnAssign) and "Callable[" in ast.unparse(field.annotation)
    ]


def test_no_object_of_a_training_holds_a_function() -> None:
    assert held_functions({module: tree for module, tree in parsed().items() if room(module) == "training"}) == []
    example = "@dataclass(frozen=True)\nclass Run:\n    save: Callable[[int], None]\n    step: int"
    assert held_functions({"training.run": ast.parse(example)}) == ["training.run.Run.save"]


def test_the_five_functions_of_a_training_are_a_page_each() -> None:
    lines = {
        each.name: each.end_lineno - each.lineno + 1
        for module in ("training.start", "training.session")
        for each in parsed()[module].body
        if isinstance(each, ast.FunctionDef) and each.end_lineno is not None
    }
    pages = [lines[name] for name in ("refuse", "choose", "prepare", "build", "train")]
    assert max(pages) <= 80, pages


def test_imports_go_in_no_circle() -> None:
    assert circle(uses(at_run_time=True)) == []
    # Type checkers' imports count too: a file can be understood without the files that use it.
    for name in ("training", "run_folder", "strategies", "tokens"):
        inside = {module: {other for other in others if room(other) == name} for module, others in uses().items()}
        assert circle({module: others for module, others in inside.items() if room(module) == name}) == []


# Circles that only type checkers see, which are still to be cut.
UNCUT: dict[str, set[str]] = {}


def circle_in(package: str, uses: dict[str, set[str]]) -> list[str]:
    """The modules of one circle inside a package, imports for type checkers included."""
    inside = {module: {other for other in others if room(other) == package} for module, others in uses.items()}
    return circle({module: others for module, others in inside.items() if room(module) == package})


def test_no_package_holds_a_circle() -> None:
    for package in {room(module) for module in parsed()}:
        found = {module.rpartition(".")[2] for module in circle_in(package, uses())}
        assert found <= UNCUT.get(package, set()), f"a circle in {package}: {found}"
    looped = uses() | {"recipe.sections.data": {"recipe.schema"}}
    assert {"recipe.schema", "recipe.sections.data"} <= {*circle_in("recipe", looped)}


@pytest.mark.parametrize(
    ("module", "other"),
    [
        ("recipe.schema", "training.loop"),
        ("architecture.loss", "data.readers"),
        ("strategies.zero", "tokens.cache"),
        ("closed_form.rank", "planner.trace.trace"),
        ("planner.trace.trace", "planner.depth.fork"),
        ("planner.depth.fork", "planner.candidates"),
        ("doctor", "planner.depth.fork"),
        ("run_folder.folder", "cli.main"),
    ],
)
def test_an_import_upward_or_sideways_is_seen(module: str, other: str) -> None:
    assert upward({module: {other}}) == [f"{module} imports {other}"]


def test_a_circle_is_seen() -> None:
    circle_found = circle(uses(at_run_time=True) | {"recipe.schema": {"recipe.loader"}})
    assert {"recipe.schema", "recipe.loader"} <= set(circle_found)


def unshared(modules: dict[str, ast.Module]) -> list[str]:
    """What a test file or a benchmark takes from another one: what two of them need is in tests/support.

    A test of tests/benchmarks/ is of one benchmark script, which it imports.
    """
    wrong = []
    for module, tree in modules.items():
        for name in named(ast.walk(tree)):
            is_test = name.startswith("tests.") and not name.startswith("tests.support.")
            script = name.startswith("benchmarks") and not module.startswith(("benchmarks.", "tests.benchmarks."))
            if is_test or script:
                wrong.append(f"{module} imports {name}")
    return sorted(wrong)


@pytest.mark.thorough
def test_tests_and_benchmarks_share_through_support_alone() -> None:
    files = [path for folder in ("tests", "benchmarks") for path in (PACKAGE.parent / folder).rglob("*.py")]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files]
    assert unshared({name: ast.parse(path.read_text()) for name, path in zip(names, files, strict=True)}) == []


@pytest.mark.parametrize(
    ("module", "line", "forbidden"),
    [
        ("tests.architecture.test_loss", "from tests.training.test_loop import Bench", True),
        ("tests.support.models.tiny", "from tests.training import test_loop", True),
        ("tests.architecture.test_loss", "def test(): from benchmarks.common import RESULTS", True),
        ("tests.support.models.tiny", "import benchmarks.common", True),
        ("benchmarks.tokenise", "from tests.architecture.test_loss import inputs", True),
        ("benchmarks.tokenise", "from tests.support.models.tiny import save_tiny", False),
        ("benchmarks.tokenise", "from benchmarks.common import write_result", False),
        ("tests.benchmarks.test_fuzz", "from benchmarks import fuzz", False),
    ],
)
def test_a_test_that_takes_from_another_is_seen(module: str, line: str, forbidden: bool) -> None:
    assert bool(unshared({module: ast.parse(line)})) == forbidden


def importers(library: str) -> set[str]:
    """Our files that import this library, or a name in it, other than for types."""
    found = set()
    for module, nodes in imports().items():
        names = named(node for node, for_types in nodes if not for_types)
        if any(fnmatch(name, library) or name.startswith(f"{library}.") for name in names):
            found.add(f"{module.replace('.', '/')}.py")
    return found


def test_the_table_says_who_imports_a_library() -> None:
    page = (PACKAGE.parent / "AGENTS.md").read_text("utf-8").partition("| only these files import it |")[2]
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for library, cell in rows:
        patterns = re.findall("`([^`]+)`", cell)
        found = importers(library)
        assert [file for file in found if not any(fnmatch(file, each) for each in patterns)] == [], library
        assert [each for each in patterns if not any(fnmatch(file, each) for file in found)] == [], library


def test_model_and_tokens_share_tokenizers_alone() -> None:
    """Only a micro-batch passes between them in a step."""
    imported = {other for module, others in uses().items() if room(module) == "tokens" for other in others}
    assert {other for other in imported if room(other) == "model"} == {"model.new_tokens"}
    assert not [
        module for module, others in uses().items() if room(module) == "model" and "tokens" in map(room, others)
    ]


def listed(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in LIGHT)


def test_light_modules_import_no_torch() -> None:
    waiting = {module: module for module in parsed() if listed(module)}  # module: what imports it
    assert len(waiting) > 100
    seen = set()
    while waiting:
        module, importer = waiting.popitem()
        seen.add(module)
        names = named(parsed()[module].body)
        assert not {name.split(".")[0] for name in names} & SLOW_TO_IMPORT, (module, importer)
        waiting |= dict.fromkeys(own_modules(names) - seen, module)


def test_light_names_are_modules() -> None:
    assert not [name for name in LIGHT if not any(m == name or m.startswith(f"{name}.") for m in parsed())]


def test_names_shadow_nothing() -> None:
    """What is in the folder of train.py is found first when it runs as a file."""
    installed = set(importlib.metadata.packages_distributions()) | set(sys.stdlib_module_names)
    assert not {room(module) for module in parsed()} & installed


def test_every_folder_says_what_it_is_for() -> None:
    for folder in {PACKAGE, *(path.parent for path in PACKAGE.rglob("*.py"))}:
        words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert words, folder
        assert folder == PACKAGE or "May import: " in words, folder


@pytest.mark.slow
@pytest.mark.parametrize("words", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join)
def test_style_and_types(words: list[str]) -> None:
    process = subprocess.run([sys.executable, "-m", *words], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


# Public names that several modules define: an entry point, each importer's own conversion, the verbs of `finetune`, and
# three of a training's five pages.
SHARED_NAMES = {"main", "convert", "refuse", "choose", "prepare"}


def public_names(module: str) -> set[str]:
    result: set[str] = set()
    for node in parsed()[module].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            result.add(node.name)
        elif isinstance(node, ast.Assign):
            result |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            result.add(node.target.id)
    return {name for name in result if not name.startswith("_")} - SHARED_NAMES


def test_a_public_name_means_one_thing() -> None:
    owner: dict[str, str] = {}
    for module in parsed():
        if not module.startswith("cli."):
            defined_twice = {name: owner[name] for name in public_names(module) if name in owner}
            assert not defined_twice, f"{module} defines {defined_twice} once more"
            owner |= dict.fromkeys(public_names(module), module)


def test_no_conflict_is_left_in_a_file() -> None:
    process = subprocess.run(
        ["git", "grep", "-nE", "^(<{7} |>{7} |={7}$)"], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert process.stdout == ""


BY_NAME = re.compile(r"type\(\w+\)\.__(qual)?name__ *(==|!=|in\b|not in)|in type\(\w+\)\.__(qual)?name__")
# Errors of libraries that these files do not import.
ERRORS_BY_NAME = {"storage/backends.py", "library_errors.py"}


def test_no_class_is_recognised_by_its_name() -> None:
    """What a layer computes is tried on a small input, or read from its attributes."""
    found = {file for file in PACKAGE.rglob("*.py") if BY_NAME.search(file.read_text("utf-8"))}
    assert {str(file.relative_to(PACKAGE)) for file in found} == ERRORS_BY_NAME


def heirs(modules: dict[str, ast.Module]) -> list[str]:
    """Classes that inherit from another of ours; errors and recipe sections are left out."""
    bases: dict[str, list[str]] = {}
    for tree in modules.values():
        for each in ast.walk(tree):
            if isinstance(each, ast.ClassDef):
                bases.setdefault(each.name, []).extend(map(ast.unparse, each.bases))

    def ancestors(name: str) -> set[str]:
        return {name}.union(*(ancestors(base) for base in bases.get(name, ())))

    allowed = {"Exception", "ValueError", "Section"}
    return sorted(name for name, above in bases.items() if {*above} & {*bases} and not ancestors(name) & allowed)


def test_no_class_inherits_from_another_of_ours() -> None:
    assert heirs(parsed()) == []
    example = "class Rows: ...\nclass Mine(Rows): ...\nclass Wrong(ValueError): ...\nclass Worse(Wrong): ..."
    assert heirs({"tokens.mixture": ast.parse(example)}) == ["Mine"]


# Keys that no recipe writes, from before a new key needed one. A key that a recipe writes leaves this list.
UNWRITTEN = {
    "Data": "date_string",
    "DataSet": "delimiter drop encoding labels revision roles sheet weight",
    "Dpo": "label_smoothing simpo_gamma",
    "Generate": "every file",
    "Hub": "private revision",
    "Kto": "reference",
    "Lora": "alpha_pattern exclude_modules init_lora_weights loraplus_lr_ratio modules_to_save rank_pattern"
    " use_dora use_rslora",
    "ModelSection": "adapter_revision add_special_tokens add_tokens load_in_fp8 trust_remote_code",
    "Quantization": "bnb_4bit_quant_type bnb_4bit_use_double_quant",
    "Recipe": "logging_steps measure_phases save_total_limit timeout_seconds",
    "RunLimits": "stop_after storage",
    "Samples": "count",
    "Training": "adam_beta1 adam_epsilon compile deterministic early_stopping_patience metric_for_best_model"
    " non_blocking resume warmup_steps",
}


def keys_of(model: type[BaseModel]) -> set[str]:
    """Each key of a section and of the sections in it, as `Section.key`."""
    keys: set[str] = set()
    for name, info in model.model_fields.items():
        sections = sections_in(info.annotation)
        keys |= set[str]().union(*map(keys_of, sections)) if sections else {f"{model.__name__}.{name}"}
    return keys


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a key's value may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]


def written(model: BaseModel) -> set[str]:
    """The keys that a recipe's page writes, as `keys_of` names them."""
    keys: set[str] = set()
    for name in model.model_fields_set:
        value = getattr(model, name)
        inner = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, BaseModel)]
        keys |= set[str]().union(*map(written, inner)) if inner else {f"{type(model).__name__}.{name}"}
    return keys


def test_a_new_key_needs_a_recipe() -> None:
    recipes = sorted((PACKAGE.parent / "recipes").glob("*.yaml"))
    pages = [load_recipe(str(page), []).recipe for page in recipes]
    assert len(pages) > 40
    assert keys_of(Recipe) - set[str]().union(*map(written, pages)) == {
        f"{section}.{key}" for section, keys in UNWRITTEN.items() for key in keys.split()
    }
