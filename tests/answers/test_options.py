"""Given answers by their probability: equal to plain transformers', one option at a time; figures by own arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.answers import options as module
from finetune.answers.options import probability_figures
from finetune.cli.main import main
from finetune.train import main as train
from tests.support.models.tiny import save_tiny
from tests.support.runs.recipes import merged, tiny_lora, write_recipe

OPTIONS = ["bridge", "green hills", "sea"]
LLAMA3 = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + "
    "'<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
WITH_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'Answer: ' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer: ' }}{% endif %}"
)
TEMPLATES = {"chatml": None, "two line breaks": LLAMA3, "plain words": WITH_SYSTEM}
IN_BATCHES = {"training": {"per_device_batch_size": 2}, "data": {"packing": False}, "model": {"attention": "sdpa"}}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "padded": IN_BATCHES,
    "qlora": {"quantization": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}},
    "full": {"lora": None},
}
CELLS = [("chatml", "lora"), ("two line breaks", "lora"), ("plain words", "lora")]
CELLS += [("chatml", method) for method in METHODS if method != "lora"]


def questions(count: int) -> list[tuple[str, str]]:
    return [(f"question {number} " + "please " * (number % 5), OPTIONS[number % 3]) for number in range(count)]


def trained(folder: Path, template: str, method: str, options: Sequence[str] = ()) -> Path:
    base = save_tiny(folder / "base")
    chats = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for asked, answer in questions(24)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), "utf-8")
    changes: dict[str, Any] = {"output_dir": str(folder / "run"), "training": {"max_steps": 6, "learning_rate": 0.02}}
    changes |= {"data": {"eval": {"fraction": 0.5}}, "eval": {"options": list(options)}}
    if TEMPLATES[template]:
        (folder / "own.jinja").write_text(TEMPLATES[template], "utf-8")
        changes["data"]["chat_template"] = str(folder / "own.jinja")
    recipe = merged(tiny_lora(base, folder / "rows.jsonl"), changes, METHODS[method])
    assert train([str(write_recipe(folder, recipe))]) == 0
    return folder / "run"


def plain_probabilities(model: Any, tokenizer: Any, asked: str) -> tuple[list[float], float]:
    """Each option alone, without the kit; and the mass of all of them."""
    sums = []
    for option in OPTIONS:
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": option}]
        prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(turns, tokenize=False)
        whole = whole[: whole.rindex("<|im_end|>") + len("<|im_end|>")]
        start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        ids += tokenizer(whole[len(prompt) :], add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        by_token = torch.log_softmax(logits, -1)[range(start - 1, len(ids) - 1), ids[start:]]
        sums.append(float(by_token.sum()))
    weights = [math.exp(each - max(sums)) for each in sums]
    return [weight / sum(weights) for weight in weights], sum(map(math.exp, sums))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("template", "method"), CELLS)
def test_probabilities_are_plain_transformers(
    template: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, template, method)
    seen: dict[str, np.ndarray] = {}
    right: list[int] = []
    compare = module.OptionScores.compare

    def keep(self: module.OptionScores, base: np.ndarray, tuned: np.ndarray) -> Any:
        seen.update(base=module.probabilities(base), tuned=module.probabilities(tuned))
        right.extend(self.right)
        return compare(self, base, tuned)

    monkeypatch.setattr(module.OptionScores, "compare", keep)
    capsys.readouterr()
    assert main(["eval", str(run), "--json", "--max-new-tokens", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["options"]["options"] == OPTIONS
    assert result["options"]["rows"] == 12
    places = [json.loads(line)["place"] for line in (run / "eval_answers.jsonl").read_text("utf-8").splitlines()]
    numbers = [int(place.rpartition(":")[2]) - 1 for place in places]
    assert right == [OPTIONS.index(questions(24)[number][1]) for number in numbers]

    tokenizer = AutoTokenizer.from_pretrained(run / ("model" if method == "full" else "adapter"))
    quantised: dict[str, Any] = {}
    if method == "qlora":
        from transformers import BitsAndBytesConfig

        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        quantised = {"quantization_config": settings}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32, **quantised).eval()
    if quantised:  # bitsandbytes' own product rounds on some processors; the values of its weights do not
        base = base.dequantize()
    models = {"base": base}
    by_hand = {"base": [plain_probabilities(base, tokenizer, questions(24)[number][0]) for number in numbers]}
    if method == "full":
        models["tuned"] = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32).eval()
    else:
        models["tuned"] = PeftModel.from_pretrained(base, run / "adapter").eval()
    by_hand["tuned"] = [plain_probabilities(models["tuned"], tokenizer, questions(24)[number][0]) for number in numbers]
    for name in ("base", "tuned"):
        assert np.abs(seen[name] - np.asarray([shares for shares, _ in by_hand[name]])).max() < 1e-5, name
        mass = sum(mass for _, mass in by_hand[name]) / len(numbers)
        assert result["options"][name]["mass"] == pytest.approx(mass, rel=1e-4)
    assert np.abs(seen["tuned"] - seen["base"]).max() > 0.05, "else it would prove little"


def test_options_that_a_template_makes_equal_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path, "two line breaks", "lora", options=[*OPTIONS, "sea "])
    capsys.readouterr()
    assert main(["eval", str(run), "--max-new-tokens", "2"]) == 0
    output, line = (
        capsys.readouterr().out,
        "given answers: not scored by probability; 'sea' and 'sea ' are the same tokens",
    )
    assert line in output
    assert "Brier" not in output
    recorded = json.loads((run / "eval.json").read_text("utf-8"))
    assert recorded["not_scored"] == [line]
    assert "options" not in recorded
    assert main(["eval", str(run), "--fail-under", "options=0.5"]) == 2
    printed = capsys.readouterr()
    assert line in printed.out, "also where the command ends because of it"
    assert "--fail-under options: is not measured here" in printed.err


def test_brier_and_calibration_by_hand() -> None:
    shares = np.asarray([[0.8, 0.2], [0.3, 0.7], [0.55, 0.45], [0.52, 0.48]])
    right = np.asarray([0, 0, 0, 1])
    found = probability_figures(shares, right)
    # (0.2^2 + 0.2^2), (0.7^2 + 0.7^2), (0.45^2 + 0.45^2), (0.52^2 + 0.52^2)
    assert found["brier"]["mean"] == pytest.approx((0.08 + 0.98 + 0.405 + 0.5408) / 4)
    assert [(each["low"], each["rows"], each["right"]["mean"]) for each in found["curve"]] == [
        (0.5, 2, 0.5),
        (0.7, 1, 0.0),
        (0.8, 1, 1.0),
    ]
    # two rows around 0.535, half right; one at 0.7, wrong; one at 0.8, right
    assert found["calibration_error"] == pytest.approx((2 * abs(0.535 - 0.5) + 0.7 + 0.2) / 4)
    sure = probability_figures(np.asarray([[1.0, 0.0]] * 20), np.zeros(20, int))
    assert sure["brier"]["mean"] == 0
    assert sure["brier"]["high"] > 0, "twenty rows prove no certainty"
    assert (sure["calibration_error"], [each["low"] for each in sure["curve"]]) == (0, [0.9])
