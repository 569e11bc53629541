"""finetune export --plain: base + B A of what is written is the trained model, without peft."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.finished_run.plain_adapter import export_plain
from finetune.hub.base_model import BaseFacts
from finetune.hub.model_card import card_text
from finetune.recipe.loader import load_recipe
from finetune.recipe.plain_lora import only_by_peft
from finetune.recipe.sections.lora import by_pattern
from finetune.run_folder.facts import read_run
from tests.support.models.multimodal import save_multimodal
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.finished import finished_run
from tests.support.runs.recipes import least_recipe, tiny_lora, write_recipe

PREFIX = "base_model.model."
NF4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
KINDS: dict[str, dict[str, Any]] = {
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora", "lora_alpha": 7},
    "rslora": {"init_lora_weights": "pissa", "use_rslora": True, "lora_alpha": 6},
    "by pattern": {
        "init_lora_weights": "olora",
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 6},
        "alpha_pattern": {"mlp.down_proj": 5, "q_proj": 2},
    },
    "rslora by pattern": {
        "init_lora_weights": "pissa",
        "use_rslora": True,
        "rank_pattern": {"^model.layers.0.self_attn.v_proj": 2},
    },
    "one in full": {"init_lora_weights": "pissa", "modules_to_save": ["norm"]},
    "embeddings too": {"init_lora_weights": "pissa", "target_modules": ["embed_tokens", "v_proj"]},
}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.eval()(input_ids=torch.arange(3, 67).reshape(2, 32), use_cache=False).logits
    return result


def added_by_hand(base: Any, folder: Path) -> Any:
    """The base with alpha / r B A added to its weights, as an engine does that knows r, alpha and their patterns."""
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    assert (config["use_rslora"], config["init_lora_weights"], config["use_dora"]) == (False, True, False)
    tensors = load_file(folder / "adapter_model.safetensors")
    weights = dict(base.named_parameters())
    with torch.no_grad():
        for key, tensor in tensors.items():
            layer, lora, part = key.removeprefix(PREFIX).partition(".lora_")
            if not lora:
                weights[layer].copy_(tensor)
            elif part in ("A.weight", "embedding_A"):
                rank = by_pattern(config["rank_pattern"], layer, config["r"])
                scale = by_pattern(config["alpha_pattern"], layer, config["lora_alpha"]) / rank
                assert tensor.shape[0] == rank
                product = tensors[key.replace(f"lora_{part}", f"lora_{part.replace('A', 'B', 1)}")] @ tensor
                weights[f"{layer}.weight"] += scale * (product.T if part == "embedding_A" else product)
    return base


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:Using Rank-Stabilized LoRA with rank_pattern")  # plain peft's, of its own way
@pytest.mark.parametrize("kind", KINDS)
def test_the_base_with_the_product_added_is_the_trained_model(kind: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    run = finished_run(tmp_path, base, lora={"r": 4, **KINDS[kind]})
    plain = AutoModelForCausalLM.from_pretrained(base)
    trained = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(run / "adapter")).eval()
    expected = logits(trained)
    facts = export_plain(run)
    assert facts["r"] == 8
    folder = run / "adapter-plain"
    merged = trained.merge_and_unload()
    by_hand = added_by_hand(AutoModelForCausalLM.from_pretrained(base), folder)
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(dict(by_hand.named_parameters())[name], weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(by_hand), expected, rtol=1e-4, atol=1e-4)
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    torch.testing.assert_close(logits(by_peft), expected, rtol=1e-4, atol=1e-4)
    with by_peft.disable_adapter():
        if kind != "one in full":
            torch.testing.assert_close(logits(by_peft), logits(plain), rtol=0, atol=0)
    assert (folder / "tokenizer.json").is_file()
    assert export_plain(run)["folder"] == str(folder), "written again over its own"


def test_the_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    """On the text part and on the whole, by both names."""
    base = save_multimodal("gemma3", tmp_path / "base")
    ranks = {"^model.layers.0.self_attn.q_proj": 2}
    run = finished_run(tmp_path, base, lora={"r": 4, "init_lora_weights": "pissa", "rank_pattern": ranks})
    export_plain(run)
    whole = [
        logits(PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), str(run / name)))
        for name in ("adapter", "adapter-plain")
    ]
    torch.testing.assert_close(whole[1], whole[0], rtol=1e-4, atol=1e-4)
    assert (whole[0] - logits(AutoModelForImageTextToText.from_pretrained(base))).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"lora": {"r": 4, "init_lora_weights": "pissa", "use_dora": True}}, "use_dora: .*; merge it: finetune merge"),
        ({"lora": {"r": 4, "init_lora_weights": "olora"}, "quantization": NF4}, "quantised, .*; merge it: finetune"),
        ({"lora": {"r": 4}}, "is not of PiSSA or OLoRA"),
        ({"lora": None}, "all weights were trained"),
    ],
    ids=["dora", "quantised", "plain already", "full"],
)
def test_what_cannot_be_plain_is_refused(sections: dict[str, Any], words: str, tmp_path: Path) -> None:
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"), **sections)
    with pytest.raises(FinetuneError, match=words) as refusal:
        export_plain(run)
    assert (refusal.value.exit_code, str(refusal.value).count("\n")) == (2, 0)
    assert not (run / "adapter-plain").exists()


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"), lora={"r": 4, "init_lora_weights": "pissa"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("")
    with pytest.raises(FinetuneError, match=r"other: is there and is not an earlier export; name another folder: --to"):
        export_plain(run, tmp_path / "other")
    assert main(["export", str(run), "--plain", "--to", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine" / "adapter_config.json").is_file()


def test_export_needs_a_step_or_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"))
    assert main(["export", str(run)]) == 2
    assert "--step N; or --plain, for a PiSSA or OLoRA adapter; or --for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lora", "verb"),
    [
        ({"init_lora_weights": "pissa"}, "finetune export RUN --plain"),
        ({"init_lora_weights": "olora", "use_dora": True}, "finetune merge RUN"),
        ({"init_lora_weights": "orthogonal"}, ""),
        ({}, ""),
    ],
)
def test_a_run_says_that_only_peft_loads_it(lora: dict[str, Any], verb: str) -> None:
    line = only_by_peft(least_recipe(lora={"r": 4, **lora}), "RUN")
    assert line.endswith(verb)
    assert bool(line) is bool(verb)


def test_the_last_lines_of_a_run_and_its_card_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what the line names works."""
    base, chats = save_tiny(tmp_path / "base"), write_chats(tmp_path / "chats.jsonl", [40] * 10)
    place = {"output_dir": str(tmp_path / "run"), "lora": {"r": 4, "init_lora_weights": "pissa"}}
    recipe = write_recipe(tmp_path, tiny_lora(base, chats, training={"max_steps": 2}, **place))
    assert main(["train", str(recipe)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "only peft loads it" in line]
    assert len(said) == 1
    words = shlex.split(said[0].partition("For vLLM and others: ")[2])
    assert words == ["finetune", "export", str(tmp_path / "run"), "--plain"]
    assert main(words[1:]) == 0
    run = read_run(tmp_path / "run", load_recipe(tmp_path / "run" / "recipe.yaml").recipe)
    card = card_text("a/b", run, BaseFacts("base", None, "main", {}))
    assert "| loaded by | peft alone: pissa took a part of the base" in card
