"""finetune push --merged: the whole model arrives, and the card says what it is and how near to the adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.hub.around_training import push_after_training
from finetune.hub.push import Destination, chosen_destination, prepare_upload
from finetune.recipe.loader import recipe_from_resolved
from tests.support.hub import Hub
from tests.support.runs.finished import finished_run


@pytest.fixture
def hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    return hub


def test_the_merged_model_arrives_whole(
    tmp_path: Path, tiny_llama: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path, tiny_llama)
    words = ["push", str(run), "me/merged", "--merged", "--base", "acme/tiny-llama"]
    assert main(words) == 2
    assert f"is not merged yet; first: finetune merge {run}" in capsys.readouterr().err
    assert main(["merge", str(run), "--verify", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["agreement"]["candidates"]["own"]
    (run / "merged" / "modeling_own.py").write_text("answer = 42\n")  # as of a base with code of its own
    assert main([*words, "--json"]) == 0
    pushed = json.loads(capsys.readouterr().out)
    assert "--merged" in pushed["command"]
    remote = set(hub.repository("me/merged").files())
    assert remote >= {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "recipe.yaml"}
    assert hub.content("me/merged", "modeling_own.py") == b"answer = 42\n"
    assert not any(name.startswith(("adapter", "merge.json")) for name in remote)
    folder = tmp_path / "fetched"
    folder.mkdir()
    for name in remote:
        (folder / name).write_bytes(hub.content("me/merged", name))
    ids = AutoTokenizer.from_pretrained(folder)("a river carries the small boat", return_tensors="pt")
    with torch.no_grad():
        arrived, local = (
            AutoModelForCausalLM.from_pretrained(path, dtype="auto")(**ids).logits for path in (folder, run / "merged")
        )
    assert torch.equal(arrived, local)
    card = ModelCard(hub.content("me/merged", "README.md").decode())
    assert (card.data.library_name, card.data.base_model) == ("transformers", "acme/tiny-llama")
    assert card.data.to_dict()["base_model_relation"] == "finetune"
    assert "with a LoRA adapter (rank 4) merged into them" in card.text
    assert "PeftModel" not in card.text
    assert figures["top1"] == 1.0


@pytest.mark.slow
def test_the_card_states_the_agreement(tmp_path: Path, tiny_llama: Path) -> None:
    run = finished_run(tmp_path, tiny_llama)
    (run / "metrics.jsonl").write_text('{"kind": "eval", "step": 2, "loss": 4.0, "perplexity": 54.6}\n')
    assert main(["merge", str(run), "--dtype", "bfloat16", "--verify", "2"]) == 0
    figures = json.loads((run / "merged" / "merge.json").read_text())["agreement"]["candidates"]["own"]
    card = prepare_upload(run, Destination("me/merged", base="acme/tiny-llama", merged=True)).card
    assert f"the same most likely token at {figures['top1']:.2%}, mean" in card
    assert f"KL divergence {figures['kl']:.1e} nats" in card
    assert main(["merge", str(run), "--verify", "0"]) == 0
    card = prepare_upload(run, Destination("me/merged", base="acme/tiny-llama", merged=True)).card
    assert "the merged weights (float32) were not compared with it" in card
    adapter = prepare_upload(run, Destination("me/devils", base="acme/tiny-llama"))
    assert "merged" not in adapter.card
    assert {"adapter_model.safetensors"} == {file.path for file in adapter.files if file.path.endswith(".safetensors")}


def test_all_weights_have_nothing_to_merge(tmp_path: Path, tiny_llama: Path) -> None:
    run = finished_run(tmp_path, tiny_llama, lora=None)
    with pytest.raises(FinetuneError, match="push it without --merged"):
        chosen_destination(run, "me/whole", public=False, revision=None, base=None, merged=True)


def test_after_a_merged_push_the_training_still_pushes_its_adapter(tmp_path: Path, tiny_llama: Path, hub: Hub) -> None:
    run = finished_run(tmp_path, tiny_llama, hub={"repo_id": "me/both", "push": True})
    recipe = recipe_from_resolved(run / "recipe.yaml")
    record = {"state": "pushed", "repo_id": "me/both", "revision": "main", "merged": True}
    (run / "hub.json").write_text(json.dumps(record))
    push_after_training(recipe)
    assert "adapter_model.safetensors" in hub.repository("me/both").files()
    hub.log.clear()
    push_after_training(recipe)
    assert hub.calls() == []
