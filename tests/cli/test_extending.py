"""docs/extending.md: each diff fits the code, and a copy of the package with it computes what the page promises."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.recipes import tiny_lora, write_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")


def diffs() -> dict[str, str]:
    """Heading -> the diff below it."""
    sections = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return {heading: body.split("```diff\n")[1].split("```")[0] for heading, body in sections}


def apply_diff(diff: str, root: Path) -> int:
    """Change the files below `root`. Every hunk must fit one place. Returns the number of added lines."""
    added = 0
    for name, body in re.findall(r"^\+\+\+ (\S+)\n(.*?)(?=^--- |\Z)", diff, re.MULTILINE | re.DOTALL):
        path, text = root / name, ""
        if path.exists():
            text = path.read_text("utf-8")
        for hunk in body.split("@@\n"):
            lines = hunk.splitlines()
            before = "".join(f"{line[1:]}\n" for line in lines if line[:1] in ("-", " "))
            after = "".join(f"{line[1:]}\n" for line in lines if line[:1] in ("+", " "))
            added += sum(line.startswith("+") for line in lines)
            if text:
                assert text.count(before) == 1, f"{name}: {before}"
            text = text.replace(before, after) if before else after
        path.write_text(text, "utf-8")
    return added


@pytest.fixture
def package(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with a copy of the package and one section's diff applied."""
    root = tmp_path / "checkout"
    for folder in ("finetune", "accelerate_configs"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    apply_diff(diffs()[request.param], root)
    return root


def run(package: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(package), "FINETUNE_CACHE": str(package / "cache")}
    process = subprocess.run(
        [sys.executable, *words], cwd=package, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_the_table_counts_the_lines_of_each_diff(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "finetune", tmp_path / "finetune", ignore=shutil.ignore_patterns("__pycache__"))
    counted = [apply_diff(diff, tmp_path) for diff in diffs().values()]  # the four fit one package together
    stated = re.findall(r"^\| \[.+?\| *(\d+) \| `(\S+)` \|$", PAGE, re.MULTILINE)
    assert [int(lines) for lines, _ in stated] == counted
    assert len(counted) == 4
    assert all((ROOT / test).is_file() for _, test in stated)


SMOOTHED = """
import torch
from torch.nn import functional as F
import finetune
from finetune.architecture.loss import SMOOTHING, summed_cross_entropy
assert finetune.__file__.startswith({root!r}), finetune.__file__
torch.manual_seed(0)
hidden, head = (torch.randn(shape, requires_grad=True) for shape in ((70, 16), (257, 16)))
targets = torch.randint(257, (70,))
targets[::3] = -100
summed_cross_entropy(hidden, head, targets).backward()
ours = hidden.grad, head.grad
hidden.grad = head.grad = None
expected = F.cross_entropy(hidden @ head.T, targets, reduction="sum", label_smoothing=SMOOTHING)
expected.backward()
assert torch.allclose(summed_cross_entropy(hidden, head, targets), expected, rtol=1e-6)
for mine, theirs in zip(ours, (hidden.grad, head.grad)):
    assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)
plain = F.cross_entropy(hidden @ head.T, targets, reduction="sum")
assert abs(plain - expected) > 1
"""


@pytest.mark.thorough
@pytest.mark.parametrize("package", ["Change the loss"], indirect=True)
def test_the_changed_loss_is_torchs_own_label_smoothing(package: Path) -> None:
    run(package, "-c", SMOOTHED.format(root=str(package)))


MEANS_OF_ROWS = """
import json, sys
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from finetune.recipe.loader import load_recipe
from finetune.model.new_tokens import load_tokenizer
from finetune.tokens.dataset import prepare
recipe = load_recipe({recipe!r}).recipe
rows = prepare(recipe, load_tokenizer(recipe)).train
model = AutoModelForCausalLM.from_pretrained(recipe.model.name_or_path, dtype=torch.float32)
means = []
for number in range(len(rows)):
    for ids, labels in rows.documents(number):
        logits = model(torch.as_tensor(ids)[None]).logits[0, :-1]
        means.append(F.cross_entropy(logits, torch.as_tensor(labels)[1:], ignore_index=-100).item())
print(json.dumps([sum(means) / len(means), means]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("package", ["Add an objective"], indirect=True)
def test_the_new_objective_trains_on_the_mean_of_each_rows_mean(package: Path, tmp_path: Path) -> None:
    base, chats = save_tiny(tmp_path / "base"), write_chats(tmp_path / "chats.jsonl", [24, 90, 30, 60, 80])
    settings = tiny_lora(
        base,
        chats,
        training={
            "objective": "equal_rows",
            "max_steps": 2,
            "global_batch_size": 2,  # packed rows: all four documents
            "per_device_batch_size": 2,
            "mixed_precision": "no",
        },
    )
    recipe = write_recipe(tmp_path, settings)
    run(package, "-m", "finetune.train", str(recipe), f"output_dir={tmp_path / 'run'}")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["kind"] == "train")
    expected, means = json.loads(run(package, "-c", MEANS_OF_ROWS.format(recipe=str(recipe))))
    assert len(means) == 4
    assert first["loss"] == pytest.approx(expected, rel=1e-5)


SCORES = """
from finetune.recipe.metric_names import read_metric
from finetune.scoring.metrics import Metric, Scored, scores_of
items = [Scored("Paris", "rows.jsonl:1")] * 3
assert scores_of(Metric.of(read_metric("begins")), ["Paris, in France", " Paris", "It is Paris"], items) == [1, 1, 0]
"""


@pytest.mark.parametrize("package", ["Add a metric"], indirect=True)
def test_the_new_metric_scores_answers(package: Path) -> None:
    run(package, "-c", SCORES)


@pytest.mark.parametrize("package", ["Add a data format"], indirect=True)
def test_the_new_format_is_found_and_its_mistakes_have_a_place(package: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"data": ["Hi", "Hello.", "And now?", "Now we learn."]}\n{"data": ["Hi", 3]}\n', "utf-8")
    program = (
        "import sys\n"
        "from finetune.data.chat import read_row\n"
        "from finetune.data.layout import RowLayout\n"
        "from finetune.recipe.layouts import layouts_with\n"
        "assert layouts_with(['data']) == ['turns']\n"
        "from finetune.cli.main import main\n"
        "sys.exit(0 if main(['check', '--data', sys.argv[1]]) == 2 else 1)\n"
    )
    base = save_tiny(tmp_path / "base")
    recipe = write_recipe(tmp_path, tiny_lora(base, rows))
    environment = os.environ | {"PYTHONPATH": str(package), "FINETUNE_CACHE": str(package / "cache")}
    words = [sys.executable, "-c", program, str(recipe)]
    process = subprocess.run(words, cwd=package, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"{rows}:2: data[1].content must be text" in process.stdout + process.stderr
    turns = [["Hi", f"Hello {number}.", "And now?", "Now we learn."] for number in range(4)]
    rows.write_text("".join(json.dumps({"data": texts}) + "\n" for texts in turns), "utf-8")
    facts = json.loads(run(package, "-m", "finetune.cli.main", "check", "--data", "--json", str(recipe)))
    assert facts["ok"]
