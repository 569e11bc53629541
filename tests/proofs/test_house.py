"""The house rules that a machine can hold: import order, figures of the code, names that shadow nothing."""

from __future__ import annotations

import ast
import importlib.metadata
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "finetune"
# Strictly downward: a module imports only from those before it.
ORDER = """
errors
output_stream
schedule_shapes
recipe
recipe_keys
secret_scan
yaml_text
recipe_mistakes
recipe_file
recipe_reference
strategy
durable
launcher
slurm
signals
last_words
beats
schedule
optimizer
json_array
row_reading
chat_messages
row_formats
data_sources
row_check
chat_template
answer_spans
text_tokens
conversations
packing
array_files
token_cache
seeded
document_pool
batches
attention
trial
families
loss
loss_scaling
quantized
embedded
adapter_names
model
answers
rendezvous
fsdp
pieces
tensor_checks
zero_needs
zero_pieces
zero
gpu_needs
runtime
assemble
receipt
tensor_bytes
traffic
phases
out_of_memory
foretold
metrics
checkpoint
training_state
run_folder
pulse
export
run
batch_notes
save_restore
trained_change
loop
worst_step
run_memory
tuned
base_weights
adapter_file
merge
agreement
merge_run
run_facts
held_out
lm_tasks
pages.page
pages.charts
pages.curves
pages.report
pages.pictures
pages.keep
trackers
hub_calls
hub_checkpoints
session
whole_run
base_facts
model_card
outgoing
hub_push
hub_training
train
chat
compare
compare_report
shrink
recipe_list
rehearse
load_back
rehearse_job
rehearse_run
rehearse_report
plan.gpus
plan.zero_terms
plan.timeline
plan.splice
plan.caching
plan.cuda_dispatch
plan.pretend
plan.recorder
plan.work
plan.speed
plan.dataless
plan.workspaces
plan.zero_trace
plan.reducer
plan.trace
plan.layers
plan.depth
plan.apart
plan.job
plan.report
plan.pace
plan.audit
plan.shape
plan.layer_terms
plan.rank_terms
plan.moments
plan.closed
plan.variants
plan.remedies
plan.explain
plan.pick
plan.beside
plan.verb
launch_file
pages.findings
pages.preview
pages.preview_views
private
doctor_pair
doctor_disk
doctor_token
doctor
imports.theirs
imports.templates
imports.shared
imports.trainer
imports.left_out
imports.axolotl_data
imports.axolotl
imports.llamafactory
imports.trl
imports.torchtune
imports.page
imports.convert
verbs
verbs_of_data
verbs_of_runs
cli
""".split()
LIGHT = {
    "errors",
    "output_stream",
    "schedule_shapes",
    "recipe",
    "recipe_keys",
    "yaml_text",
    "recipe_mistakes",
    "recipe_file",
    "recipe_reference",
    "strategy",
    "slurm",
    "foretold",
    "json_array",
    "row_reading",
    "chat_messages",
    "row_formats",
    "data_sources",
    "row_check",
    "chat_template",
    "answer_spans",
    "text_tokens",
    "conversations",
    "packing",
    "array_files",
    "token_cache",
    "seeded",
    "document_pool",
    "embedded",
    "secret_scan",
    "base_facts",
    "run_facts",
    "model_card",
    "outgoing",
    "hub_calls",
    "hub_push",
    "hub_training",
    "compare",
    "compare_report",
    "shrink",
    "recipe_list",
    "rehearse",
    "load_back",
    "rehearse_job",
    "rehearse_run",
    "rehearse_report",
    "plan.gpus",
    "plan.zero_terms",
    "plan.depth",
    "plan.audit",
    "plan.beside",
    "plan.shape",
    "plan.layer_terms",
    "plan.rank_terms",
    "plan.moments",
    "plan.closed",
    "plan.variants",
    "plan.remedies",
    "plan.explain",
    "plan.pick",
    "plan.verb",
    "launch_file",
    "pages.page",
    "pages.charts",
    "pages.curves",
    "pages.report",
    "pages.pictures",
    "pages.keep",
    "private",
    "doctor_pair",
    "doctor_disk",
    "doctor_token",
    "doctor",
    "imports.theirs",
    "imports.templates",
    "imports.shared",
    "imports.trainer",
    "imports.left_out",
    "imports.axolotl_data",
    "imports.axolotl",
    "imports.llamafactory",
    "imports.trl",
    "imports.torchtune",
    "imports.page",
    "imports.convert",
    "verbs",
    "verbs_of_data",
    "verbs_of_runs",
    "cli",
}  # never import torch
# Functions over 60 lines and files over 300, each with its reason.
LONG_FUNCTIONS: dict[str, str] = {}
LONG_FILES: dict[str, str] = {}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.stem != "__init__")


def dotted(path: Path) -> str:
    """A module's name below the package: plan.trace."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def below(name: str) -> str | None:
    """The module that `finetune.x.y.z` names, z being a module or a name in one; None outside of the package."""
    parts = name.split(".")[1:] if name.startswith("finetune.") else []
    return next((".".join(parts[:end]) for end in (2, 1) if ".".join(parts[:end]) in ORDER), None)


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "finetune":
                names |= {f"finetune.{alias.name}" for alias in node.names}
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_every_module_has_its_place_in_the_order() -> None:
    assert {dotted(path) for path in modules()} == set(ORDER)


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_go_downward(path: Path) -> None:
    above = ORDER[: ORDER.index(dotted(path))]
    used = {module for name in imported(path) if (module := below(name)) is not None}
    assert used <= set(above), f"{dotted(path)} imports {used - set(above)}, which come after it"


@pytest.mark.parametrize("name", sorted(LIGHT))
def test_light_modules_import_no_torch_at_the_top(name: str) -> None:
    tree = ast.parse((PACKAGE / f"{name.replace('.', '/')}.py").read_text())
    top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    top |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not {entry.split(".")[0] for entry in top} & {"torch", "transformers", "accelerate", "peft", "datasets"}


def test_names_shadow_nothing() -> None:
    installed = set(importlib.metadata.packages_distributions()) | set(sys.stdlib_module_names)
    # What lies in the folder of train.py is found first; what lies below it, by its package.
    assert not {dotted(path).split(".")[0] for path in modules()} & installed


@pytest.mark.slow
@pytest.mark.parametrize("words", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join)
def test_style_and_types(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def functions() -> list[tuple[int, str]]:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                found.append((node.end_lineno - node.lineno + 1, f"{path.stem}.{node.name}"))
    return found


def test_figures_of_the_code() -> None:
    found = functions()
    sizes = sorted(size for size, _ in found)
    assert len(sizes) > 50
    assert statistics.median(sizes) <= 12
    assert sizes[int(0.9 * (len(sizes) - 1))] <= 35
    assert not {name for size, name in found if size > 60} - set(LONG_FUNCTIONS)
    long_files = {path.name for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > 300}
    assert not long_files - set(LONG_FILES)


def test_no_conflict_is_left_in_a_file() -> None:
    found = subprocess.run(
        ["git", "grep", "-nE", "^(<{7} |>{7} |={7}$)"], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert found.stdout == ""
