"""A token in a recipe is never echoed: not in messages, quoted lines, syntax errors, the resolved recipe, or JSON."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from finetune.cli.main import main
from finetune.redaction import HIDDEN, cover_secrets

# Made up, and joined from parts so that no scanner of repositories takes them for real.
LETTERS = "AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"
TOKENS = {
    "hub": "hf_" + LETTERS[:34],
    "openai": "sk-" + LETTERS,
    "github": "ghp_" + LETTERS,
    "github fine-grained": "github_pat_" + LETTERS + LETTERS,
    "aws": "AKIA" + "QWERTYUIOPASDFGH",
    "slack": "xoxb-" + LETTERS[:20],
    "google": "AIza" + LETTERS[:35],
    "address": "https://someone:" + "pass-word-of-mine" + "@example.com/rows.jsonl",
    "this machine's": "a long secret of this machine without any prefix",
}
RIGHT = "model: {name_or_path: x}\ndata: {train: [{path: json, data_files: rows.jsonl}]}\n"
# Where a secret may be written, and what is wrong there; SECRET is replaced by it.
PLACES = {
    "unknown key": "hub_token: SECRET\n",
    "unknown key in a section": "hub:\n  token: SECRET\n",
    "the key itself": '"SECRET": 1\n',
    "wrong kind": "training: {learning_rate: SECRET}\n",
    "wrong choice": "training: {optim: SECRET}\n",
    "near a choice": "training: {optim: adamw SECRET}\n",
    "no such strategy": "accelerate_config: SECRET\n",
    "a list": "training:\n  max_steps: [SECRET]\n",
    "a long line": f"training: {{note: {'x' * 200}, token: SECRET, optim: adam}}\n",
    "behind the mistake": "training: {optim: wrong} # SECRET\n",
    "unknown tag": "training: !SECRET {}\n",
    "unknown alias": "hub_token: *SECRET\n",
    "a quote left open": 'hub_token: "SECRET\n',
    "a second value": "hub_token: SECRET: more\n",
    "a bracket left open": "hub_token: [SECRET\n",
    "a tab": "hub:\n\ttoken: SECRET\n",
    "a bad escape": 'hub_token: "SECRET\\q"\n',
    "twice": "hub_token: SECRET\nhub_token: SECRET\n",
}


def shown(*words: str, code: int = 2) -> str:
    """All that `finetune check` says, on both streams, where it ends with this code."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        ended = main(["check", *words])
    assert ended == code, output.getvalue()
    return output.getvalue()


def assert_hidden(secret: str, text: str) -> None:
    """Neither whole nor in a part that is worth anything."""
    secret = secret.partition("://")[2].partition("@")[0] or secret
    leaked = [secret[start : start + 10] for start in range(len(secret) - 9) if secret[start : start + 10] in text]
    assert not leaked, f"{leaked[0]} is shown:\n{text}"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MY_API_KEY", TOKENS["this machine's"])
    return tmp_path / "recipe.yaml"


@pytest.mark.sample(3, thorough=6)
@pytest.mark.parametrize("place", PLACES)
def test_no_secret_is_shown(place: str, recipe: Path) -> None:
    for secret in TOKENS.values():
        recipe.write_text(RIGHT + PLACES[place].replace("SECRET", secret), "utf-8")
        text = shown(str(recipe))
        assert f"{recipe}:" in text
        assert_hidden(secret, text)
        answer = shown(str(recipe), "--json")
        assert json.loads(answer)["mistakes"]
        assert_hidden(secret, answer)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "override",
    ["hub_token=SECRET", "training.optim=SECRET", "SECRET", "training.seed=[SECRET", "SECRET=1", "a.SECRET=1"],
)
def test_nor_one_of_the_command_line(override: str, recipe: Path) -> None:
    recipe.write_text(RIGHT, "utf-8")
    for secret in TOKENS.values():
        assert_hidden(secret, shown(str(recipe), override.replace("SECRET", secret)))


@pytest.mark.parametrize("words", [["--resolved"], ["--resolved", "--json"]], ids=" ".join)
def test_nor_one_of_a_recipe_that_is_right(words: list[str], recipe: Path) -> None:
    for secret in TOKENS.values():
        recipe.write_text(RIGHT.replace("rows.jsonl", f'"{secret}"') + f'output_dir: "runs/{secret}"\n', "utf-8")
        text = shown(str(recipe), *words, code=0)
        assert text.count(HIDDEN) >= 2
        assert_hidden(secret, text)


@pytest.mark.parametrize("value", ["plain-password-1", '"with a space in it"', "'single quotes'", "short123"])
def test_what_stands_beside_a_tokens_key_is_hidden_whatever_it_looks_like(value: str, recipe: Path) -> None:
    for key in ("hub_token", "wandb_api_key", "password", "AWS_SECRET", "api-key"):
        recipe.write_text(f"{RIGHT}{key}: {value}  # mine\n", "utf-8")
        text = shown(str(recipe))
        assert_hidden(value, text)
        assert value.strip("\"'") not in text
        assert "# mine" in text
        assert f"{key}: " in text


def test_other_values_are_quoted_as_ever(recipe: Path) -> None:
    recipe.write_text(RIGHT + "samples: {max_new_tokens: sixtyfour-of-them}\npad_token: <|finetune_pad|>\n", "utf-8")
    text = shown(str(recipe))
    assert "max_new_tokens: sixtyfour-of-them" in text
    assert "pad_token: <|finetune_pad|>" in text
    assert HIDDEN not in text


def test_the_caret_stays_under_its_place(recipe: Path) -> None:
    secret = TOKENS["hub"]
    recipe.write_text(f"{RIGHT}hub: {{token: {secret}, pushed: true}}\n", "utf-8")
    mistake = next(each for each in shown(str(recipe)).split("recipe.yaml:") if "pushed: is" in each)
    line, caret = mistake.split("\n")[1:3]
    assert line[caret.index("^") :].startswith("pushed: true")


def test_a_private_key_is_covered_to_its_end() -> None:
    key = "-----BEGIN RSA " + f"PRIVATE KEY-----\n  {LETTERS}\n  {LETTERS}\n  -----END RSA " + "PRIVATE KEY-----"
    text = f"a: |\n  {key}\nb: 1\n"
    covered = cover_secrets(text, ())
    assert LETTERS[:10] not in covered
    assert [len(line) for line in covered.split("\n")] == [len(line) for line in text.split("\n")]
    assert covered.endswith("\nb: 1\n")


def test_the_run_folders_recipe_keeps_its_values(recipe: Path) -> None:
    """What is looked at is hidden; what a run is made from is not."""
    from finetune.recipe.loader import load_recipe
    from finetune.recipe.resolved import resolved_yaml

    recipe.write_text(RIGHT.replace("rows.jsonl", TOKENS["address"]), "utf-8")
    assert TOKENS["address"] in resolved_yaml(load_recipe(recipe))


@pytest.mark.thorough
def test_check_needs_no_torch_for_it(recipe: Path) -> None:
    recipe.write_text(RIGHT + PLACES["unknown key"].replace("SECRET", TOKENS["hub"]), "utf-8")
    program = "import sys\nfrom finetune.cli.main import app\ntry: app()\nfinally: print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", program, "check", str(recipe)], capture_output=True, text=True)
    assert process.stdout.splitlines()[-1] == "False", process.stderr
    assert HIDDEN in process.stderr
