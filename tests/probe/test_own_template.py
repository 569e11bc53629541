"""Whether rows of chats find a template: of the tokenizer where it is here, else by the model's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.data.chat import Chat
from finetune.errors import DataError
from finetune.model.known_configs import HUB_NAMES
from finetune.planner.candidates import commented, for_model
from finetune.probe.own_template import has_template, is_tuned_for_chats, template_note
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.tokens.encoder import Encoder
from tests.support.models.tiny import tiny_tokenizer

KNOWN = [name for names in HUB_NAMES.values() for name in names]
# By the models' pages: bases whose tokenizer has no chat template.
WITHOUT = (
    "Llama-3.2-1B Llama-3.2-3B Llama-3.1-8B Meta-Llama-3.1-8B Llama-3.3-70B Llama-3.1-70B Llama-3.1-405B "
    "Llama-4-Scout-17B-16E gemma-3-1b-pt gemma-3-4b-pt gemma-3-12b-pt gemma-3-27b-pt gemma-4-E2B gemma-4-E4B "
    "gemma-4-26B-A4B gemma-4-31B Olmo-3-1025-7B Olmo-3-1125-32B Mistral-7B-v0.3 Ministral-3-3B-Base-2512 "
    "Ministral-3-8B-Base-2512 Ministral-3-14B-Base-2512 SmolLM2-135M SmolLM2-360M SmolLM2-1.7B"
).split()
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.thorough
def test_every_picked_recipe_for_a_known_model_can_render_its_chats() -> None:
    """A stand-in tokenizer has a template where the model's page says so: what --pick writes trains on both kinds."""
    seen = 0
    gpus = parse_gpus("1x24GB")
    assert gpus is not None
    for name in KNOWN:
        tokenizer = tiny_tokenizer()
        if name.rpartition("/")[2] in WITHOUT:
            tokenizer.chat_template = None
            seen += 1
        recipe = for_model(name).recipe
        document = Encoder(tokenizer, recipe.data).document(Chat(CHAT, None, [False, True], {}))
        assert any(label != -100 for label in document.labels), name
        assert ("chat_template:" in commented(recipe, 0, gpus)) == (recipe.data.chat_template is not None)
    assert seen >= len(WITHOUT)
    assert len(KNOWN) > 60


@pytest.mark.parametrize(
    ("name", "tuned"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", True), ("meta-llama/Llama-3.1-8B", False), ("google/gemma-3-4b-it", True),
        ("google/gemma-3-4b-pt", False), ("Qwen/Qwen3-8B", True), ("Qwen/Qwen3-8B-Base", False),
        ("Qwen/Qwen2.5-7B", False), ("openai/gpt-oss-20b", True), ("meta-llama/Llama-2-7b-chat-hf", True),
        ("mistralai/Mistral-7B-v0.3", False), ("some/habit-7b", False),
    ],
)  # fmt: skip
def test_names_of_models_for_chats(name: str, tuned: bool) -> None:
    assert has_template(name) is None  # nothing is on this machine
    assert is_tuned_for_chats(name) == tuned


ROWS = {
    "chats": json.dumps({"messages": CHAT}),
    "pairs": json.dumps({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:]}),
    "texts": json.dumps({"text": "once upon a time"}),
    "completions": json.dumps({"prompt": "1 + 1 = ", "completion": "2"}),
}


@pytest.mark.parametrize("template", [None, "settings", "file", "recipe"])
@pytest.mark.parametrize("rows", [*ROWS, "hub"])
def test_a_missing_template_is_refused_before_anything_is_paid_for(
    rows: str, template: str | None, tmp_path: Path
) -> None:
    model = tmp_path / "base"
    tokenizer = tiny_tokenizer()
    own = tokenizer.chat_template
    tokenizer.chat_template = own if template == "settings" else None
    tokenizer.save_pretrained(model)
    if template == "file":
        (model / "chat_template.jinja").write_text(own)
    (tmp_path / "rows.jsonl").write_text(f"{ROWS.get(rows, '')}\n" * 4)
    train = "{path: some/chats}" if rows == "hub" else f"{{path: json, data_files: {tmp_path}/rows.jsonl}}"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{name_or_path: {model}}}\ndata: {{train: [{train}]}}\n"
        + ("training: {objective: dpo}\n" if rows == "pairs" else "")
    )
    loaded = load_recipe(recipe, ["data.chat_template='{{ messages }}'"] if template == "recipe" else []).recipe
    if rows in ("chats", "pairs", "hub") and template is None:
        with pytest.raises(DataError, match="has no chat template"):
            template_note(loaded)
    else:
        assert template_note(loaded) == ""
    elsewhere = loaded.model_copy(update={"model": loaded.model.model_copy(update={"name_or_path": "some/base-7b"})})
    unknown = rows in ("chats", "pairs", "hub") and template != "recipe"
    assert ("is not on this machine" in template_note(elsewhere)) == unknown
