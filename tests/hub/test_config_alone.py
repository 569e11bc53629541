"""A model by its Hub name: config.json is fetched and nothing else, once, with this machine's token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import EnvironmentMismatch
from finetune.model.known_configs import full_config
from tests.support.hub import Hub
from tests.support.hub.processes import run_python
from tests.support.hub.server import TOKEN
from tests.support.hub.state import Blob
from tests.support.runs.recipes import least, write_recipe

NAME = "me/made"
CONFIG: dict[str, Any] = {
    **{"architectures": ["OlmoForCausalLM"], "model_type": "olmo2", "hidden_size": 64, "intermediate_size": 128},
    **{"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 211},
    **{"tie_word_embeddings": False, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"},
}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "generation_config.json": b"{}",
    "README.md": b"# a model\n",
}


def served(hub: Hub, *, private: bool = True, files: dict[str, bytes] = FILES) -> None:
    repository = hub.add(NAME, private=private)
    repository.commit("main", {path: Blob(content) for path, content in files.items()}, "a model", "")
    hub.log.clear()


def paths(hub: Hub) -> set[str]:
    return {request.path for request in hub.log if request.call != "harnesses"}


@pytest.fixture
def here(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """This process's client asks the loopback Hub, and keeps what it gets in a folder of its own."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return hub


def test_nothing_but_the_configuration_and_that_once(here: Hub) -> None:
    served(here)
    config, source = full_config(NAME)
    assert config == CONFIG
    assert source.endswith("/config.json")
    assert paths(here) == {f"/{NAME}/resolve/main/config.json"}
    assert all(
        request.headers["authorization"] == f"Bearer {TOKEN}" for request in here.log if "resolve" in request.path
    )
    here.log.clear()
    assert full_config(NAME)[0] == CONFIG
    assert paths(here) == set()


def test_a_shipped_name_asks_nobody(here: Hub) -> None:
    assert full_config("google/gemma-3-4b-it")[1] == "finetune/model/configs/gemma-3-4b.json"
    assert paths(here) == set()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("offline", "on this machine, and HF_HUB_OFFLINE is set; unset it; a local folder"),
        ("nobody's", "on this machine, and the Hub has no such model or does not show it to this token; correct"),
        ("revision", "on this machine, and revision v9 on the Hub has no config.json; correct model.revision"),
        ("empty", "on this machine, and revision main on the Hub has no config.json; correct model.revision"),
        ("broken", r"on this machine, and the Hub could not be reached \(HfHubHTTPError\); a local folder"),
        ("a path", "on this machine; a local folder with a config.json will do, and Hub names that are known here"),
    ],
)
def test_one_line_where_it_cannot_be_had(
    what: str, says: str, here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(here, files={} if what == "empty" else FILES)
    if what == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if what == "broken":
        here.fail("resolve", status=500, times=2)
    name = {"nobody's": "nobody/knows-it", "a path": str(tmp_path)}.get(what, NAME)
    with pytest.raises(EnvironmentMismatch, match=says) as raised:
        full_config(name, "v9" if what == "revision" else "main")
    assert "\n" not in str(raised.value)
    assert "meta-llama/Llama-3.1-8B" in str(raised.value)


@pytest.mark.thorough
@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("verb", ["plan", "pick", "check"])
def test_a_gated_repository_is_a_line(status: int, verb: str, hub: Hub, tmp_path: Path) -> None:
    """As the Hub answers for Llama: with no token 401, with one that was not granted access 403."""
    served(hub)
    hub.fail("resolve", status=status, code="GatedRepo", times=9)
    data = {"train": [{"path": "json", "data_files": "data/sample_chat.jsonl"}]}
    words = {
        "plan": ["plan", "--model", NAME, "--gpus", "1x24GB"],
        "pick": ["plan", "--pick", "--model", NAME, "--gpus", "1x24GB"],
        "check": ["check", str(write_recipe(tmp_path, least(NAME, data=data))), "--model"],
    }[verb]
    process = run_python(hub, ["-m", "finetune.cli.main", *words], tmp_path / "home", FINETUNE_CACHE=str(tmp_path))
    assert process.returncode == EnvironmentMismatch.exit_code, process.stdout + process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith("model.name_or_path: me/made: ") or ": model.name_or_path: me/made: " in line
    assert "shows it to those alone who asked for access" in line
    assert "hf auth login" in line
    assert "resolve" in hub.calls()


@pytest.mark.slow
def test_plan_and_check_fetch_nothing_else(hub: Hub, tmp_path: Path) -> None:
    served(hub)
    cli = ["-m", "finetune.cli.main"]
    words = ["plan", "--model", NAME, "--gpus", "1x24GB", "--json", "data.max_length=512"]
    more = {"FINETUNE_CACHE": str(tmp_path / "cache")}
    process = run_python(hub, [*cli, *words], tmp_path / "home", **more)
    assert process.returncode == 0, process.stderr
    planned = json.loads(process.stdout)
    assert planned["ok"]
    assert planned["probe"]["architecture"] == "Olmo2ForCausalLM"
    assert {path for path in paths(hub) if NAME in path} == {f"/{NAME}/resolve/main/config.json"}
    hub.log.clear()
    data = {"train": [{"path": "json", "data_files": "data/sample_chat.jsonl"}]}
    page = write_recipe(tmp_path, least(NAME, data=data))
    process = run_python(hub, [*cli, "check", str(page), "--model"], tmp_path / "another", **more)
    assert process.returncode == 0, process.stderr
    assert "Olmo2ForCausalLM, made small: loss and gradients are the library's own" in process.stderr + process.stdout
    assert {path for path in paths(hub) if NAME in path} == {f"/{NAME}/resolve/main/config.json"}
