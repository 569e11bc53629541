"""One curve: however a step's rows are split, loss and gradient norm are those of one document at a time.

Eight chats of 20 to 300 tokens are all the data, and every step learns from all eight, so only the split differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from finetune.train import main
from tests.support.models.tiny import FAMILIES, save_tiny, write_chats
from tests.support.runs.one_curve import (
    LENGTHS,
    MAX_GRAD_NORM,
    PEAK,
    SPLITS,
    STEPS,
    TOLERANCE,
    WEIGHT_DECAY,
    base_model,
    curve_of,
    documents,
    reference,
    write_curve_recipe,
)
from tests.support.runs.reference import IGNORE, Step

REPOSITORY = Path(__file__).resolve().parents[2]

# What differs from the plain recipe: eight rows, all in one forward.
RANKS: dict[str, dict[str, dict[str, Any]]] = {
    "two ranks": {"training": {"per_device_batch_size": 1}},
    "two ranks, one without a row at the end": SPLITS["packed into three rows"],
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


@pytest.fixture(scope="module")
def curves(tiny_llama: Path, chats: Path) -> dict[str, list[Step]]:
    return {method: reference(tiny_llama, chats, method) for method in PEAK}


def assert_same_curve(curve: list[Step], expected: list[Step]) -> None:
    assert len(curve) == len(expected) == STEPS
    for step, (actual, point) in enumerate(zip(curve, expected, strict=True), start=1):
        assert tuple(actual) == pytest.approx(tuple(point), rel=TOLERANCE), f"step {step}"


def test_the_curve_moves_and_is_clipped(curves: dict[str, list[Step]]) -> None:
    """Else the comparisons below would prove little."""
    for method, curve in curves.items():
        assert curve[-1].loss < 0.98 * curve[0].loss, method
        assert min(step.grad_norm for step in curve) > MAX_GRAD_NORM, method
    assert (len(SPLITS), len(RANKS), len(PEAK), len(FAMILIES)) == (11, 2, 2, 4)


@pytest.mark.sample(2, thorough=5)
@pytest.mark.parametrize("method", PEAK)
@pytest.mark.parametrize("split", SPLITS)
def test_one_process(
    split: str, method: str, curves: dict[str, list[Step]], tiny_llama: Path, chats: Path, tmp_path: Path
) -> None:
    recipe = write_curve_recipe(tmp_path, tiny_llama, chats, method, SPLITS[split])
    assert main([str(recipe)]) == 0
    assert_same_curve(curve_of(recipe), curves[method])


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tied: bool, chats: Path, tmp_path: Path) -> None:
    """Two packed rows accumulated; Mistral with a window shorter than the documents."""
    window = {"sliding_window": 64} if family == "mistral" else {}
    model = save_tiny(tmp_path / "model", family, tie_word_embeddings=tied, **window)
    split = {"data": {"packing": True, "max_length": 560}, "training": {"global_batch_size": 2}}
    recipe = write_curve_recipe(tmp_path, model, chats, "full", split)
    assert main([str(recipe)]) == 0
    assert_same_curve(curve_of(recipe), reference(model, chats, "full"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "method"), [("two ranks", "full"), ("two ranks, one without a row at the end", "lora")]
)
def test_two_ranks(
    split: str, method: str, curves: dict[str, list[Step]], tiny_llama: Path, chats: Path, tmp_path: Path
) -> None:
    recipe = write_curve_recipe(tmp_path, tiny_llama, chats, method, RANKS[split])
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", "accelerate_configs/cpu_2proc.yaml", "finetune/train.py", str(recipe)]
    command += ["accelerate_config=ddp"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    assert_same_curve(curve_of(recipe), curves[method])
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text("utf-8"))
    assert (receipt["world_size"], receipt["strategy"]) == (2, "ddp")


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", PEAK)
def test_transformers_trainer(method: str, tiny_llama: Path, chats: Path, tmp_path: Path) -> None:
    """Trainer pads, shuffles and accumulates over the same eight rows; its curve is ours."""
    recipe = write_curve_recipe(tmp_path, tiny_llama, chats, method, SPLITS["packed into one row"])
    assert main([str(recipe)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=STEPS,
        learning_rate=PEAK[method],
        lr_scheduler_type="linear",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        logging_steps=1,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=base_model(tiny_llama, method),
        args=arguments,
        train_dataset=[document._asdict() for document in documents(chats, tiny_llama)],
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORE),
    )
    trainer.train()
    logged = [Step(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]
    assert_same_curve(curve_of(recipe), logged)
