"""model.add_tokens: the rows that new tokens begin with, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.errors import FinetuneError
from finetune.model.build import build_model, refuse_early
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.schema import Recipe
from finetune.tokens.encoder import Encoder
from finetune.train import main
from tests.support.models.architectures import config_of
from tests.support.models.new_tokens import IDS, KNOWN, ROOM, TEXTS, TOKENS, rows_that_begin, save_base
from tests.support.models.tiny import tiny_tokenizer, write_chats
from tests.support.runs.recipes import least_recipe, tiny_lora, write_recipe

CPU = torch.device("cpu")


def recipe_with(base: Path, tokens: dict[str, Any] = TOKENS, **sections: Any) -> Recipe:
    model = {"dtype": "float32"} | tokens
    return least_recipe(base, model=model, training={"mixed_precision": "no"}, **sections)


@pytest.mark.sample(2, thorough=6)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("room", ROOM)
def test_rows_begin_as_the_mean_of_their_pieces(tmp_path: Path, room: str, tied: bool) -> None:
    """All weights trained, and beside adapters; all other rows are the base's, bit by bit."""
    base = save_base(tmp_path, room, tie_word_embeddings=tied)
    expected, rows = rows_that_begin(base), max(ROOM[room], KNOWN + len(TEXTS))
    old = [row for row in range(ROOM[room]) if row not in IDS]
    whole: Any = build_model(recipe_with(base, lora=None), CPU)
    adapted: Any = build_model(recipe_with(base, lora={"r": 2}), CPU)
    inner = adapted.get_base_model()
    for name, end, trained in (
        ("embeddings", whole.get_input_embeddings(), inner.get_input_embeddings()),
        ("head", whole.get_output_embeddings(), inner.get_output_embeddings()),
    ):
        for weight in (end.weight.detach(), trained.original_module.weight.detach()):
            assert weight.shape == (rows, 64)
            assert torch.equal(weight[old], expected[name][old])
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)
        fresh = sorted({*IDS, *range(ROOM[room], rows)})
        own = trained.token_adapter.trainable_tokens_delta["default"].detach()
        torch.testing.assert_close(own, expected[name][fresh], rtol=1e-6, atol=1e-7)
    assert (whole.get_input_embeddings().weight is whole.get_output_embeddings().weight) is tied
    assert whole.config.vocab_size == rows
    trained = {name: p.shape[0] for name, p in adapted.named_parameters() if p.requires_grad and "lora_" not in name}
    assert list(trained.values()) == [len(fresh)] * (1 if tied else 2), trained
    assert sum(p.numel() for p in whole.parameters()) == sum(p.numel() for p in build_meta(base).parameters())


def build_meta(base: Path) -> Any:
    """As plans and the ranks without weights have it."""
    return build_model(recipe_with(base, lora=None), torch.device("meta"))


def test_a_bias_of_the_head_gets_rows_too(tmp_path: Path) -> None:
    base = save_base(tmp_path, family="phi", partial_rotary_factor=0.5)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().bias.normal_(generator=torch.Generator().manual_seed(0))
    model.save_pretrained(base)
    pieces = tiny_tokenizer().encode(TEXTS[0])
    built: Any = build_model(recipe_with(base, lora=None), CPU)
    bias = built.get_output_embeddings().bias.detach()
    torch.testing.assert_close(bias[KNOWN], model.get_output_embeddings().bias.detach()[pieces].mean())
    with pytest.raises(FinetuneError, match="has a bias, which peft leaves out beside new rows; train all weights"):
        refuse_early(recipe_with(base))


def test_the_tokenizer_has_one_token_for_each(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    recipe = recipe_with(base)
    tokenizer = load_tokenizer(recipe)
    plain = tokenizer(f"a{TEXTS[0]} {TEXTS[1]}{TEXTS[2]}b", add_special_tokens=False).input_ids
    assert [token for token in plain if token >= KNOWN] == IDS
    assert tokenizer.decode(plain, clean_up_tokenization_spaces=False) == f"a{TEXTS[0]} {TEXTS[1]}{TEXTS[2]}b"
    assert TEXTS[2] not in tokenizer.decode(plain, skip_special_tokens=True)
    assert TEXTS[0] in tokenizer.decode(plain, skip_special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(TEXTS).input_ids == [[token] for token in IDS]
    without = load_tokenizer(recipe_with(base, {}))
    assert Encoder(tokenizer, recipe.data).identity() != Encoder(without, recipe.data).identity()


@pytest.mark.parametrize(
    ("token", "name"), [("<|im_end|>", "<|im_end|>"), ("a", "a"), (" river", "Ġriver"), ("Ġriver", "Ġriver")]
)
@pytest.mark.parametrize("key", ["add_tokens", "add_special_tokens"])
def test_a_token_of_the_vocabulary_is_refused(
    tmp_path: Path, tiny_llama: Path, key: str, token: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its text as by its name in the file; before anything is written."""
    number = tiny_tokenizer().convert_tokens_to_ids(name)
    assert number is not None
    chats = write_chats(tmp_path / "chats.jsonl", [30, 40])
    content = tiny_lora(tiny_llama, chats, model={key: ["<date>", token]}, output_dir=str(tmp_path / "run"))
    assert main([str(write_recipe(tmp_path, content))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"model.{key}: {token} is token {number} of the vocabulary already; remove it"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"modules_to_save": ["lm_head"]}, "lora.modules_to_save: names lm_head, whose new rows"),
        ({"modules_to_save": ["embed_tokens"]}, "lora.modules_to_save: names embed_tokens, whose new rows"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "lora.target_modules: names embed_tokens, whose new rows"),
    ],
)
def test_what_else_trains_these_rows_is_refused(tiny_llama: Path, lora: dict[str, Any], words: str) -> None:
    with pytest.raises(FinetuneError, match=f"^{words} model.add_tokens trains; leave it|{words}") as refusal:
        refuse_early(recipe_with(tiny_llama, lora=lora))
    assert "\n" not in str(refusal.value)


def test_a_second_table_by_token_is_refused(tmp_path: Path) -> None:
    """Of Gemma 3n and 4: embeddings of each layer."""
    config = config_of("gemma4_text")
    assert config.vocab_size_per_layer_input
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(FinetuneError, match=r"has another table by token, .*per_layer, which gets no rows; remove"):
        refuse_early(recipe_with(tmp_path))


def test_a_tokenizer_must_be_there(tmp_path: Path) -> None:
    """A folder with a damaged one; one without any holds a structure, as plans write it, and its rows come last."""
    base = save_base(tmp_path)
    (base / "tokenizer.json").write_text("{")
    with pytest.raises(FinetuneError, match="tokenizer"):
        build_model(recipe_with(base), torch.device("meta"))
    for file in base.glob("tokenizer*"):
        file.unlink()
    model: Any = build_model(recipe_with(base, lora=None), torch.device("meta"))
    assert len(model.get_input_embeddings().weight) == KNOWN + len(TEXTS)
    assert AutoConfig.from_pretrained(base).vocab_size == KNOWN
