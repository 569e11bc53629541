"""Who asks the probe: training before anything is written, `check --model`, `rehearse`; `plan` is in tests/planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune import train
from finetune.cli.main import main
from finetune.errors import EnvironmentMismatch
from finetune.probe import probe as probing
from finetune.rehearse.rehearsal import rehearse
from tests.support.models.own_model import save_own_model
from tests.support.models.tiny import tiny_tokenizer, write_chats
from tests.support.runs.recipes import least_recipe, tiny_lora, write_recipe


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_own_model(tmp_path_factory.mktemp("leaking"), "previous", hidden_size=64, num_hidden_layers=3,
                            vocab_size=512)  # fmt: skip
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(leaking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    chats = write_chats(tmp_path / "chats.jsonl", [30, 40, 50])
    run = str(tmp_path / "run")
    content = tiny_lora(leaking, chats, model={"trust_remote_code": True}, lora=None, output_dir=run)
    return write_recipe(tmp_path, content)


def test_training_and_check_refuse_what_leaks(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before weights are read: there are none."""
    assert train.main([str(recipe)]) == 4
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("data.packing: true: packing differs: OwnForCausalLM")
    assert not (tmp_path / "run").exists()
    assert main(["check", str(recipe), "--model", "--json"]) == 4
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"ok": False, "exit_code": 4, "mistakes": told}


def test_check_says_what_was_found(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, tiny_lora(tiny_llama, write_chats(tmp_path / "chats.jsonl", [30])))
    assert main(["check", str(recipe), "--model"]) == 0
    right, rate, model, adapters = capsys.readouterr().out.splitlines()
    assert rate.startswith("training.learning_rate: 0.01 is far above")
    assert right == f"{recipe}: right"
    assert model.startswith("model: LlamaForCausalLM, made small: loss and gradients are the library's own")
    assert adapters.startswith("adapters on 14 layers: q_proj 2, k_proj 2, ")
    assert main(["check", str(recipe), "--model", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["probe"]
    assert found["remembered"]
    assert found["adapters"]["reached_share"] == 1.0
    assert main(["check", str(recipe), "--json"]) == 0
    assert "probe" not in json.loads(capsys.readouterr().out)


def test_a_rehearsal_of_a_refused_model_ends_at_its_first_line(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise EnvironmentMismatch("data.packing: true: packing differs; set data.packing: false")

    monkeypatch.setattr(probing, "probe", refused)
    content = tiny_lora(tiny_llama, write_chats(tmp_path / "chats.jsonl", [30]), output_dir=str(tmp_path / "run"))
    report = rehearse(write_recipe(tmp_path, content), [], log=lambda line: None)
    assert (report["ok"], report["exit_code"], len(report["steps"])) == (False, 4, 1)
    assert report["steps"][0]["seen"].endswith("; set data.packing: false")


@pytest.mark.slow
def test_new_tokens_are_probed(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows in loss and gradients, and no answer of the model without them is taken for one."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    plain, new = (least_recipe(tiny_llama, model={"add_tokens": tokens}) for tokens in ([], ["<date>", "<time>"]))
    probing.probe(plain)
    found = probing.probe(new)
    assert not found.remembered
    assert max(off for way in found.facts["found"].values() for off in (way["loss"], way["gradients"])) <= 1e-5
    assert found.facts["adapters"] == probing.probe(plain).facts["adapters"]
    assert probing.probe(least_recipe(tiny_llama, model={"add_special_tokens": ["<tool>"]})).remembered
    (tmp_path / "cache").rename(tmp_path / "forgotten")
    monkeypatch.setattr("finetune.architecture.loss._Rows.take_slope_", lambda _, slope, __: slope.new_zeros(()))
    with pytest.raises(EnvironmentMismatch, match="differs"):
        probing.probe(new)
