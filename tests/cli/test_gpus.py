"""One grammar for GPUs: each form means the same in every verb that takes `--gpus`, and so does each refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune import planner
from finetune.cli.main import main
from finetune.errors import DoesNotFit
from finetune.planner import command
from finetune.recipe.gpus import FORMS, MODELS, Gpus
from finetune.recipe.schema import Recipe

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[2]
RECIPES = [str(ROOT / "recipes" / f"{name}.yaml") for name in ("llama3_fsdp", "llama3_full")]
MODEL = "meta-llama/Llama-3.2-1B"
H100 = int(81_559 * 2**20 * 0.99)  # nvidia-smi's total without the driver's share
# What is typed -> nodes, GPUs of each, GB as the maker states it, bytes for a program; no GPUs: a CPU.
FORMS_OF = {
    "2x24GB": (1, 2, 24, 24_000_000_000),
    "2 x 24 gb": (1, 2, 24, 24_000_000_000),
    "1X23.5GB": (1, 1, 23.5, 23_500_000_000),
    "24GB": (1, 1, 24, 24_000_000_000),
    "2x8x80GB": (2, 8, 80, 80_000_000_000),
    "4xL4": (1, 4, 24, int(23_034 * 2**20 * 0.99)),
    "a100-40gb": (1, 1, 40, int(40_960 * 2**20 * 0.99)),
    "H100": (1, 1, 80, H100),
    "H100:8": (1, 8, 80, H100),
    "8xH100": (1, 8, 80, H100),
    "2x8xH100": (2, 8, 80, H100),
    "8xB200": (1, 8, 180, int(183_359 * 2**20 * 0.99)),
    "rtx 5090": (1, 1, 32, int(32_607 * 2**20 * 0.99)),
    "2 x RTX PRO 6000": (1, 2, 96, int(97_887 * 2**20 * 0.99)),
    "cpu": (1, 0, 0, 0),
    "CPU": (1, 0, 0, 0),
}
REFUSED = {
    "24": "a number alone may be GPUs or GB",
    "4": "a number alone may be GPUs or GB",
    "4x24": "a number alone may be GPUs or GB",
    "2x8x80": "a number alone may be GPUs or GB",
    "": "does not name GPUs",
    "a lot": "not a GPU known here",
    "B9000": "not a GPU known here",
    "4xB9000": "not a GPU known here",
    "24TB": "does not name GPUs",
    "2y24GB": "does not name GPUs",
    "x24GB": "not a GPU known here",
    "2x": "does not name GPUs",
    "2xH100:8": "does not name GPUs",
    "-1x24GB": "does not name GPUs",
    "1e3x8GB": "does not name GPUs",
    "2x2x2x24GB": "does not name GPUs",
    "\N{ARABIC-INDIC DIGIT TWO}x24GB": "does not name GPUs",
    "2xcpu": "not a GPU known here",
    "0x24GB": "each number must be above 0",
    "2x0GB": "each number must be above 0",
    "0x8xH100": "each number must be above 0",
    "H100:0": "each number must be above 0",
}


def output(words: list[str], capsys: Capture) -> dict[str, Any]:
    """The verb's JSON."""
    main([*words, "--json"])
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A configuration to be imported."""
    file = tmp_path / "theirs.yaml"
    values = {"model_name_or_path": MODEL, "dataset_name": "trl-lib/Capybara"}
    file.write_text(yaml.safe_dump(values))
    return str(file)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Gpus | None]:
    """The GPUs that the planner is asked about; it says of each recipe that it does not fit."""
    calls: list[Gpus | None] = []

    def plan(recipe: Recipe, gpus: Gpus | None, *, must_fit: bool = False) -> None:
        calls.append(gpus)
        raise DoesNotFit("too large", 10**15)

    monkeypatch.setattr(planner, "plan", plan)
    monkeypatch.setattr(command, "unsupported", lambda *_: "traced")
    return calls


@pytest.mark.sample(1, thorough=4)
@pytest.mark.parametrize("text", FORMS_OF)
def test_list(text: str, capsys: Capture) -> None:
    nodes, count, gb, _ = FORMS_OF[text]
    budgets = {each["name"]: each["budget"] for each in output(["list"], capsys)["recipes"]}
    room = {"gpus": count, "gpu_memory_gb": gb, "nodes": nodes}
    fitting = {
        name for name, budget in budgets.items() if not budget["gpus"] or all(budget[key] <= room[key] for key in room)
    }
    assert {each["name"] for each in output(["list", "--gpus", text], capsys)["recipes"]} == fitting
    assert 0 < len(fitting) < len(budgets) or text == "2x8xH100"


@pytest.mark.parametrize("text", FORMS_OF)
def test_plan(text: str, planned: list[Gpus | None], capsys: Capture) -> None:
    nodes, count, _, memory = FORMS_OF[text]
    output(["plan", *RECIPES, "--gpus", text], capsys)
    assert [gpus and (gpus.nodes, gpus.count, gpus.memory) for gpus in planned] == [
        (nodes, count, memory) if count else None
    ] * len(RECIPES)


@pytest.mark.parametrize("text", FORMS_OF)
def test_plan_pick(text: str, planned: list[Gpus | None], capsys: Capture) -> None:
    nodes, count, _, memory = FORMS_OF[text]
    result = output(["plan", "--pick", "--model", MODEL, "--gpus", text], capsys)
    if not count:
        assert result["mistakes"] == ["--pick: finds recipes for GPUs, not for a CPU; add --gpus 2x24GB"]
        return
    assert {(gpus.nodes, gpus.count, gpus.memory) for gpus in planned if gpus} == {(nodes, count, memory)}


@pytest.mark.parametrize("text", FORMS_OF)
def test_import(text: str, config: str, capsys: Capture) -> None:
    nodes, count, gb, _ = FORMS_OF[text]
    carried = output(["import", config, "--gpus", text], capsys)["carried"]
    budget = {"gpus": count} | ({"gpu_memory_gb": gb} if gb else {}) | ({"nodes": nodes} if nodes > 1 else {})
    assert carried["budget"] == {"value": budget, "from": f"--gpus {text}"}
    rows = carried["training.per_device_batch_size"]["value"] * max(1, nodes * count)
    assert carried["training.global_batch_size"]["value"] == rows
    assert carried["accelerate_config"]["value"] == ("ddp" if nodes * count > 1 else "single")


def test_import_is_for_one_gpu_where_none_is_named(config: str, capsys: Capture) -> None:
    carried = output(["import", config], capsys)["carried"]
    assert carried["budget"] == {"value": {"gpus": 1}, "from": "one GPU"}


def test_each_gpu_with_a_name_has_a_speed() -> None:
    assert planner.CHIPS.keys() == MODELS.keys()


VERBS: dict[str, Callable[[str], list[str]]] = {
    "list": lambda config: ["list"],
    "plan": lambda config: ["plan", RECIPES[0]],
    "plan of several": lambda config: ["plan", *RECIPES],
    "plan --max": lambda config: ["plan", RECIPES[0], "--max", "max_length"],
    "plan --pick": lambda config: ["plan", "--pick", "--model", MODEL],
    "import": lambda config: ["import", config],
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_is_refused_in_one_line_by_every_verb(text: str, config: str, capsys: Capture) -> None:
    lines = set()
    for words in VERBS.values():
        assert main([*words(config), "--gpus", text]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        lines.add(output.err)
    (line,) = lines
    assert line.startswith("--gpus: ")
    assert line.endswith(f"{FORMS}\n")
    assert REFUSED[text] in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "nodes"), [(["--gpus", "2x8xH100"], 2), (["--gpus", "2x8xH100", "--nodes", "2"], 2),
                         (["--gpus", "8xH100", "--nodes", "4"], 4), (["--gpus", "H100:8"], 1)],
)  # fmt: skip
def test_nodes_in_the_text_or_beside_it(
    words: list[str], nodes: int, planned: list[Gpus | None], capsys: Capture
) -> None:
    output(["plan", *RECIPES, *words], capsys)
    assert planned == [Gpus(8, H100, "H100", nodes)] * 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--gpus", "2x8xH100", "--nodes", "4"], "--nodes: 4: --gpus 2x8xH100 says 2 nodes; leave --nodes out"),
        (["--gpus", "cpu", "--nodes", "2"], "--nodes: 2: --gpus cpu is one machine without GPUs; leave --nodes out"),
        (["--nodes", "2"], "--nodes: 2: needs --gpus; name one node's GPUs, for example --gpus 8xH100"),
    ],
)
def test_nodes_that_contradict(words: list[str], line: str, capsys: Capture) -> None:
    assert main(["plan", RECIPES[0], *words]) == 2
    assert capsys.readouterr().err == f"{line}\n"
