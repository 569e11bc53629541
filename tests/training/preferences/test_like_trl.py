"""Losses, gradient norms, weights and metrics of six steps against TRL's own trainers, on the same rows in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.tokens.batches import rows_of_step
from finetune.train import main as train
from tests.support.models.tiny import tiny_model
from tests.support.runs.preferences import (
    ROWS_A_STEP,
    STEPS,
    lines_of,
    preference_recipe,
    preference_rows,
    tokenizer_of_both,
    write_base,
)

RATE = 1e-3
# Ours: TRL's.
METRICS = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "reward_accuracy": "rewards/accuracies",
    "logps_chosen": "logps/chosen",
    "logps_rejected": "logps/rejected",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def ours(
    folder: Path, base: Path, kind: str, settings: dict[str, Any], adapter: Path | None, *, quantized: bool = False
) -> list[dict[str, Any]]:
    """The metrics of our run on the rows; writes the final weights into `folder`/run."""
    changes: dict[str, Any] = {kind: settings}
    if quantized:
        changes["quantization"] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
    if adapter is not None:
        changes |= {
            "model": {"adapter": str(adapter)},
            "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        }
    assert train([str(preference_recipe(folder, base, kind, changes))]) == 0
    return lines_of(folder / "run")


def in_our_order(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as our run takes them."""
    taken = {"rows": len(made), "global_batch_size": ROWS_A_STEP, "seed": 42, "total_rows": len(made)}
    return [made[index] for step in range(STEPS) for index in rows_of_step(step, **taken)]


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter whose B is not zero: the start is neither the base nor the base with a fresh adapter."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(tiny_model(), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05)
    adapted.save_pretrained(folder)
    return folder


def starting_model(base: Path, adapter: Path | None, *, quantized: bool = False) -> Any:
    """The base, in 4 bits if asked, with the start adapter if there is one."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    bits = None
    if quantized:
        bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=bits)
    return PeftModel.from_pretrained(model, adapter, is_trainable=True) if adapter else model


def theirs(
    folder: Path, base: Path, kind: str, settings: dict[str, Any], adapter: Path | None, *, quantized: bool = False
) -> tuple[list[dict[str, float]], Any]:
    """TRL's losses, gradient norms and metrics of each step, as it computes them, and the model that it trained."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM

    made = in_our_order(preference_rows(kind))
    if kind == "kto":  # TRL gives each prompt the answer before it, ours the one after it
        made = [row for step in range(STEPS) for row in made[step * ROWS_A_STEP :][:ROWS_A_STEP][::-1]]
    common: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": ROWS_A_STEP,
        "num_train_epochs": 1,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "logging_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "max_length": 128,
        "max_grad_norm": 1.0,
        "activation_checkpointing": False,
        "disable_dropout": True,
        "disable_tqdm": True,
        **settings,
    }
    model = starting_model(base, adapter, quantized=quantized)
    reference = None if adapter else AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    data = Dataset.from_list(made)
    tokenizer = tokenizer_of_both()
    steps: list[dict[str, float]] = []

    def seen(trainer: type) -> Any:
        """A trainer that takes the rows in order and keeps unrounded figures."""

        class Seen(trainer):  # type: ignore[misc]
            def _get_train_sampler(self, *_: Any) -> Any:
                return SequentialSampler(self.train_dataset)

            def training_step(self, *arguments: Any, **named: Any) -> Any:
                loss = super().training_step(*arguments, **named)
                metrics = getattr(self, "_metrics", None) or self._stored_metrics
                steps.append(
                    {"loss": float(loss)} | {key: values[-1] for key, values in metrics["train"].items() if values}
                )
                return loss

            def log(self, logs: dict[str, float], *rest: Any) -> None:
                if "grad_norm" in logs:
                    steps[-1]["grad_norm"] = float(logs["grad_norm"])
                super().log(logs, *rest)

        return Seen

    if kind == "kto":
        from trl import KTOConfig, KTOTrainer

        arguments: Any = KTOConfig(**common)
        trainer = seen(KTOTrainer)(model, reference, args=arguments, train_dataset=data, processing_class=tokenizer)
    elif common.get("loss_type") == "simpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        arguments = CPOConfig(**common, cpo_alpha=0.0)
        trainer = seen(CPOTrainer)(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    else:
        from trl import DPOConfig, DPOTrainer

        arguments = DPOConfig(**common)
        trainer = seen(DPOTrainer)(model, reference, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return steps, trainer.model


SIMPO = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0}
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.7}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # ours, then TRL's
    "sigmoid": ("dpo", {"beta": 0.2}, {"beta": 0.2}),
    "robust": (
        "dpo",
        {"loss_type": "robust", "label_smoothing": 0.1},
        {"loss_type": ["robust"], "label_smoothing": 0.1},
    ),
    "ipo": ("dpo", {"loss_type": "ipo"}, {"loss_type": ["ipo"]}),
    "apo_zero": ("dpo", {"loss_type": "apo_zero"}, {"loss_type": ["apo_zero"]}),
    "simpo": ("dpo", SIMPO, SIMPO),
    "sft": ("dpo", {"sft_weight": 0.5}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "kto": ("kto", WEIGHTS, WEIGHTS),
}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("case", CASES)
def test_six_steps(case: str, lora: bool, base: Path, adapter: Path, tmp_path: Path) -> None:
    kind, settings, of_trl = CASES[case]
    start = adapter if lora else None
    lines = ours(tmp_path, base, kind, settings, start)
    steps, model = theirs(tmp_path, base, kind, of_trl, start)
    assert len(lines) == len(steps) == STEPS
    for line, step in zip(lines, steps, strict=True):
        assert line["loss"] == pytest.approx(step["loss"], rel=1e-5, abs=1e-6)
        assert line["grad_norm"] == pytest.approx(step["grad_norm"], rel=2e-5)
        if case == "simpo":  # TRL's are by the token there
            line |= {f"logps_{side}": line[f"logp_{side}_by_token"] for side in ("chosen", "rejected")}
        compared = [(own, name) for own, name in METRICS.items() if name in step and own in line]
        assert len(compared) > 3
        for own, name in compared:
            assert line[own] == pytest.approx(step[name], rel=1e-5, abs=1e-5), (own, line["step"])
    file = next((tmp_path / "run").glob("*/*model.safetensors"))
    trained = {name.replace(".default", ""): value for name, value in model.state_dict().items()}
    for name, weight in load_file(file).items():
        # AdamW divides by the gradient's own size, so a gradient near 0 moves a weight by a share of the rate.
        torch.testing.assert_close(weight, trained[name], rtol=1e-4, atol=0.02 * RATE)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sigmoid", "kto"])
def test_over_four_bits(case: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    """A 4-bit base under adapters. TRL casts these to bfloat16, ours stay in float32: eight bits agree."""
    kind, settings, of_trl = CASES[case]
    lines = ours(tmp_path, base, kind, settings, adapter, quantized=True)
    steps, _ = theirs(tmp_path, base, kind, of_trl, adapter, quantized=True)
    for line, step in zip(lines, steps, strict=True):
        assert line["loss"] == pytest.approx(step["loss"], rel=4e-3)
        assert line["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-2)
        assert line["logps_chosen"] == pytest.approx(step["logps/chosen"], rel=1e-3)
