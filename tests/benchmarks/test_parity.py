"""The parity page is what its records say, and they say what the page claims."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import parity, parity_page
from benchmarks.parity_page import CAUSES, PAGE, SAME, page
from tests.support.runs.recipe_results import RESULTS

RESULT: dict[str, Any] = json.loads((RESULTS / "parity.json").read_text("utf-8"))
# A tool that is not the same as it comes, and the training in which the cause is switched off.
SWITCHED_OFF = [
    ("trl", "trl: line break not learned"),
    ("llamafactory", "llamafactory: line break not learned"),
    ("trl_dpo", "trl_dpo: line break not learned"),
    ("trainer: mean per micro-batch", "trainer"),
    ("axolotl: end of turn not learned", "axolotl: end put back"),
    ("trainer: every token, pad is the end", "trainer: every token, pad of its own"),
    ("trl: text with BOS", "trl: text, and the added end not learned"),
    ("llamafactory: packed", "llamafactory: neat packing"),
]


def test_the_page_is_what_the_records_say() -> None:
    assert PAGE.read_text("utf-8") == "\n".join(page(RESULT)) + "\n"


@pytest.mark.parametrize(("on", "off"), SWITCHED_OFF)
def test_a_cause_switched_off_leaves_the_same_steps(on: str, off: str) -> None:
    apart, same = (RESULT["one"][name]["difference"] for name in (on, off))
    assert max(same["loss"], same["norm"]) <= SAME
    assert max(apart["loss"], apart["norm"]) > 10 * SAME


def test_every_training_on_the_page_is_recorded() -> None:
    shown = {name for _, records in CAUSES.values() for name in records} | set(parity_page.AS_THEY_COME)
    assert shown <= RESULT["one"].keys()
    assert len(RESULT["one"]["ours"]["steps"]) == 20
    same = ("trainer", "axolotl", "ours: eight rows packed", "axolotl: packed", "trl: packed")
    worst = [max(RESULT["one"][name]["difference"][key] for key in ("loss", "norm")) for name in same]
    assert max(worst) <= SAME


def test_a_difference_is_the_worst_step_and_the_way_of_the_adapter(tmp_path: Path) -> None:
    places = {name: parity.place_of(tmp_path, name) / "adapter" for name in ("mine", "its")} | {
        "start": tmp_path / "adapter"
    }
    for name, values in {"start": [0.0, 0.0], "mine": [3.0, 4.0], "its": [3.0, 4.5]}.items():
        places[name].mkdir(parents=True)
        save_file({"lora_A": torch.tensor(values)}, places[name] / "adapter_model.safetensors")
    steps = [{"loss": 2.0, "grad_norm": 1.0}, {"loss": 1.0, "grad_norm": 4.0}]
    other = [{"loss": 2.2, "grad_norm": 1.0}, {"loss": 1.0, "grad_norm": 3.0}]
    found = parity.difference(tmp_path, "its", "mine", {"mine": {"steps": steps}, "its": {"steps": other}})
    assert found == pytest.approx({"loss": 0.1, "norm": 0.25, "adapter": 0.1})
    short = parity.difference(tmp_path, "its", "mine", {"mine": {"steps": steps}, "its": {"steps": other[:1]}})
    assert short is not None
    assert short["loss"] == math.inf
