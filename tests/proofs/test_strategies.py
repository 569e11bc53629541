"""Every strategy is the same training: strategy x method x split, and what each hands over."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from finetune.model.build import build_model
from finetune.recipe.loader import load_recipe
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.cells import ROOT, launch
from tests.support.runs.curve_table import (
    METHODS,
    PAGE,
    PIPELINES,
    RANKS,
    ROWS,
    SPLITS,
    TOLERANCE,
    Cell,
    page_lines,
    receipt_of,
    references,
    skip_where_missing,
    trained_cells,
    worst,
)
from tests.support.runs.exports import assert_the_last_step_exports_alike
from tests.support.runs.one_curve import LENGTHS, checkpointed, curve_of, reference, write_curve_recipe
from tests.support.runs.reference import Step

# Those of the table that a suite has time for; `python benchmarks/one_curve.py` trains all.
HERE, SPLITS_HERE = ("full", "lora", "qlora, bf16"), ("packed", "accumulated")
TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "one_curve.json"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


@pytest.fixture(scope="module")
def curves(tiny_llama: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Step]]:
    return references(tmp_path_factory.mktemp("references"), tiny_llama, chats, HERE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "splits"),
    [
        # One rank of ZeRO: tests/strategies/test_zero_one_rank.py.
        *(pytest.param(name, SPLITS_HERE, marks=() if name == "fsdp2" else pytest.mark.slow) for name in RANKS),
    ],
)
def test_one_curve(
    strategy: str,
    splits: tuple[str, ...],
    curves: dict[str, list[Step]],
    tiny_llama: Path,
    chats: Path,
    tmp_path: Path,
) -> None:
    skip_where_missing(strategy)
    cells = list(trained_cells(tmp_path, strategy, curves, tiny_llama, chats, splits))
    assert len(cells) == len(HERE) * len(splits)
    assert [cell for cell in cells if cell.reason or not cell.holds] == []
    assert_the_model_is_what_was_trained(tmp_path / "full-packed")
    assert_the_adapter_is_what_was_trained(tmp_path / "lora-packed")
    for method in HERE:
        assert_the_last_step_exports_alike(tmp_path / f"{method}-packed" / "run", tmp_path / f"{method} exported")


def test_the_table() -> None:
    """The committed one: every cell is there, trained and within its bounds, or refused with a reason."""
    cells = [Cell(**cell) for cell in json.loads(TABLE.read_text("utf-8"))["cells"]]
    assert len(cells) == (12 + 6) * 11 * 4
    expected = [(strategy, method, split) for strategy in ROWS for method in METHODS for split in SPLITS]
    assert [(cell.strategy, cell.method, cell.split) for cell in cells] == expected
    assert [cell for cell in cells if not cell.holds] == []
    assert all(cell.reason is None for cell in cells if cell.method in HERE)
    refused = {cell.method for cell in cells if cell.reason and cell.strategy in PIPELINES}
    assert refused == {"int8 lora, bf16", "full, fp16", "lora, fp16", "qlora, fp16"}
    assert PAGE.read_text("utf-8") == "\n".join(page_lines(cells, list(ROWS), list(METHODS))) + "\n"


def assert_the_model_is_what_was_trained(folder: Path) -> None:
    """Full weights that were handed over load in plain transformers and are those of the last checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "model", dtype=torch.float32)
    checkpoint = checkpointed(folder / "run")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), checkpoint[name], rtol=0, atol=0)


def assert_the_adapter_is_what_was_trained(folder: Path) -> None:
    """In plain peft it has the tensors of the last checkpoint, no others, and the logits of the trained model."""
    recipe = load_recipe(str(folder / "recipe.yaml"), ["model.attention=sdpa"]).recipe
    base = AutoModelForCausalLM.from_pretrained(recipe.model.name_or_path, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, folder / "run" / "adapter", is_trainable=True)
    checkpoint = checkpointed(folder / "run")
    actual = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert actual.keys() == checkpoint.keys()
    for name, parameter in actual.items():
        torch.testing.assert_close(parameter.detach(), checkpoint[name], rtol=0, atol=0)
    trained = build_model(recipe, torch.device("cpu"))
    missing = trained.load_state_dict(checkpoint, strict=False)
    assert missing.unexpected_keys == []
    ids = torch.arange(3, 67).reshape(2, 32)
    with torch.no_grad():
        logits = [model.eval()(input_ids=ids).logits for model in (adapted, trained)]
        with adapted.disable_adapter():
            untrained = adapted(input_ids=ids).logits
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    assert (logits[0] - untrained).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_tied_heads_and_other_families(family: str, chats: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", family, tie_word_embeddings=True)
    recipe = write_curve_recipe(tmp_path, model, chats, "full", SPLITS["accumulated"])
    assert launch([recipe], ranks=2, words=["accelerate_config=fsdp2"]) == [0]
    assert worst(curve_of(recipe), reference(model, chats, "full")) <= TOLERANCE
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    assert exported.lm_head.weight is exported.model.embed_tokens.weight


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2)])
def test_resume_on_another_number_of_ranks(
    before: int, after: int, curves: dict[str, list[Step]], tiny_llama: Path, chats: Path, tmp_path: Path
) -> None:
    recipe = write_curve_recipe(tmp_path, tiny_llama, chats, "lora", SPLITS["accumulated"], save_steps=3)
    named = {1: "single", 2: "fsdp2", 4: "fsdp2"}
    assert launch([recipe], ranks=before, words=[f"accelerate_config={named[before]}"]) == [0]
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    state = json.loads((run / "run_state.json").read_text("utf-8")) | {"state": "running"}
    (run / "run_state.json").write_text(json.dumps(state), "utf-8")
    assert launch([recipe], ranks=after, words=[f"accelerate_config={named[after]}"]) == [0]
    assert receipt_of(recipe)["world_size"] == after
    assert worst(curve_of(recipe), curves["lora"]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_missions_own_line(tiny_llama: Path, tmp_path: Path) -> None:
    """Without GPUs one line says what is missing; with a small local model and two gloo ranks it trains, sharded."""
    line = ["-m", "accelerate.commands.launch", "finetune/train.py", "recipes/llama3_fsdp.yaml"]
    refused = run(line)
    assert refused.returncode != 0
    lines = [text for text in refused.stderr.splitlines() if text.startswith("budget: ")]
    assert lines == 2 * lines[:1], "once by the trainer, and once more below the launcher's traceback"
    assert refused.stderr.strip().endswith(lines[0])
    for words in ("4 GPUs", "gated", "finetune rehearse recipes/llama3_fsdp.yaml"):
        assert words in lines[0], words
    assert run(line[2:]).returncode == 4  # accelerate launch makes 1 of it
    line[2:2] = ["--config_file", "accelerate_configs/cpu_2proc.yaml"]
    small = [f"model.name_or_path={tiny_llama}", f"output_dir={tmp_path / 'run'}", "training.max_steps=2"]
    rows = write_chats(tmp_path / "chats.jsonl", LENGTHS)
    data = [f"data.train=[{{path: json, data_files: {rows}}}]", "data.eval={fraction: 0.2}", "data.max_length=512"]
    trained = run([*line, *small, *data, "samples.count=0"])
    assert trained.returncode == 0, trained.stderr[-3000:]
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text("utf-8"))
    assert (receipt["strategy"], receipt["world_size"], receipt["sharding"]["held_share"]) == ("fsdp2", 2, 0.5)


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
