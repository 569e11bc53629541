"""The model card's example: it runs as printed and answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.cli.main import main
from finetune.hub.push import Destination, prepare_upload
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.recipes import tiny_lora, write_recipe


@pytest.mark.thorough
@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("method", ["adapter", "new tokens", "all weights", "no chat template"])
def test_the_cards_code_runs_as_printed_and_answers(
    tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_tiny(tmp_path / "base")
    content = tiny_lora(base, write_chats(tmp_path / "chats.jsonl", [40] * 10), output_dir=str(tmp_path / "run"))
    content["training"] |= {"max_steps": 2}
    content["samples"] = {"prompts": ['Say "ä" twice'], "max_new_tokens": 2}
    match method:
        case "new tokens":
            content["model"] |= {"add_tokens": ["<|mine|>"]}
        case "all weights":
            content["lora"] = None
        case "no chat template":
            (base / "chat_template.jinja").unlink()
            texts = "".join(json.dumps({"text": f"a river carries the boat {n}"}) + "\n" for n in range(10))
            (tmp_path / "texts.jsonl").write_text(texts)
            content["data"]["train"] = [{"path": "json", "data_files": str(tmp_path / "texts.jsonl")}]
    assert main(["train", str(write_recipe(tmp_path, content))]) == 0
    card = prepare_upload(tmp_path / "run", Destination("me/it", base="acme/base")).card
    code = card.partition("```python\n")[2].partition("```")[0]
    product = tmp_path / "run" / ("model" if method == "all weights" else "adapter")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    capsys.readouterr()
    exec(code.replace('"me/it"', repr(str(product))).replace('"acme/base"', repr(str(base))), {})
    assert ("apply_chat_template" in code) == (method != "no chat template")
    assert 'Say \\"ä\\" twice' in code
    assert capsys.readouterr().out.strip()
