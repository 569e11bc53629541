"""The data sets that recipes name, by the real client from the loopback Hub: each recipe reads every row of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.recipe.loader import load_recipe
from tests.support.hub import running_hub
from tests.support.hub.data_sets import DATA_SETS, serve
from tests.support.hub.processes import run_python
from tests.support.runs.recipe_results import recipes

ROWS, HELD_OUT = 30, 10
# Reads every entry of every recipe as a training would; one line of JSON.
READS = """
import json, sys
from finetune.data.rows import RowReader
from finetune.data.sources import resolve
from finetune.recipe.loader import load_recipe

found = {}
for path in sys.argv[1:]:
    data = load_recipe(path).recipe.data
    for entry in data.sets:
        source = resolve(entry)
        if source.kind == "hub":
            reader = RowReader(source)
            read = list(reader.rows())
            mistakes = [row.problem for row in read if row.problem]
            first = read[0].read
            first = getattr(first, "chosen", getattr(first, "answer", first))
            roles = [turn["role"] for turn in first.messages] if hasattr(first, "messages") else ["text"]
            found.setdefault(path, []).append([entry.path, len(read), roles, mistakes])
print(json.dumps(found))
"""
CHAT = ["user", "assistant"]
ROLES = {
    "HuggingFaceTB/smoltalk": [CHAT * 2, ["system", *CHAT]],
    "HuggingFaceH4/ultrachat_200k": [CHAT * 3],
    "allenai/tulu-3-sft-mixture": [CHAT * 2],
    "open-thoughts/OpenThoughts-114k": [["system", *CHAT]],
    "HuggingFaceH4/Multilingual-Thinking": [["system", *CHAT]],
    "meta-math/MetaMathQA": [["text"]],  # by data.train.template
    "openai/gsm8k": [CHAT, ["text"]],
    "Intel/orca_dpo_pairs": [CHAT, ["system", *CHAT]],
    "roneneldan/TinyStories": [["text"]],
    "emozilla/pg19": [["text"]],
}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By recipe, for each of its entries of the Hub: name, rows, roles of the first row, mistakes."""
    with running_hub() as hub:
        for name in DATA_SETS:
            serve(hub, name, rows=ROWS, held_out=HELD_OUT)
        words = ["-c", READS, *map(str, recipes().values())]
        process = run_python(hub, words, tmp_path_factory.mktemp("home"))
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    return {Path(path).stem: entries for path, entries in found.items()}


@pytest.mark.slow
def test_each_recipe_reads_its_own(read: dict[str, list[Any]]) -> None:
    on_cpu = {name for name, path in recipes().items() if not load_recipe(path).recipe.budget.gpus}
    assert set(read) == set(recipes()) - on_cpu
    for name, entries in read.items():
        data = load_recipe(recipes()[name]).recipe.data
        assert [entry[0] for entry in entries] == [entry.path for entry in data.sets], name
        for place, (path, rows, roles, mistakes) in enumerate(entries):
            assert mistakes == [], name
            assert rows == (HELD_OUT if place else ROWS), name
            assert roles in ROLES.get(path, [CHAT]), name


@pytest.mark.slow
def test_each_data_set_is_some_recipes(read: dict[str, list[Any]]) -> None:
    assert {entry[0] for entries in read.values() for entry in entries} == set(DATA_SETS)
