"""Code that comes with a model runs where the user's own recipe asks for it, and never because a run's folder does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.finished_run import finished_run
from finetune.hand_over.export_step import export_step
from finetune.train import main as train
from finetune.untrusted.model_code import CONSENT, refuse_other_code, refuse_unknown_code, trust_code
from tests.support.models.own_model import save_own_model, separate_modules
from tests.support.models.tiny import tiny_tokenizer, write_chats
from tests.support.runs.recipes import least, tiny_lora, write_recipe

STRANGER = "model.trust_remote_code: true would run the Python code"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose code leaves a file when it runs."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    separate_modules(monkeypatch, tmp_path / "modules")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6}
    folder = save_own_model(tmp_path / "own", vocab_size=512, **sizes)
    tiny_tokenizer().save_pretrained(folder)
    with (folder / "modeling_own.py").open("a") as file:
        file.write(f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return folder


def of_a_stranger(folder: Path, base: Path) -> Path:
    """A finished run's folder as far as its recipe says."""
    (folder / "adapter").mkdir(parents=True)
    return write_recipe(folder, least(base, model={"name_or_path": str(base), "trust_remote_code": True})).parent


def test_without_the_key_it_does_not_run(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, tiny_lora(own, write_chats(tmp_path / "chats.jsonl", [30]), lora=None))
    for verb in (["check", "--model"], ["plan", "--gpus", "cpu"]):
        assert main([*verb, str(recipe)]) in (2, 4)
        *progress, _ = capsys.readouterr().err.splitlines()
        assert all(line.startswith("tracing") for line in progress)  # on a slow machine
    assert train([str(recipe)]) in (2, 4)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("verb", ["chat", "eval", "merge", "export"])
def test_a_strangers_run_does_not_ask_for_it(
    own: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = of_a_stranger(tmp_path / "run", own)
    checkpoint = run / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    words = {"chat": ["--prompt", "a"], "export": ["--step", "1"]}.get(verb, [])
    assert main([verb, str(run), *words]) == 2
    told = capsys.readouterr().err
    if verb != "export":  # whose checkpoint is looked at first
        assert told.startswith(f"{run}/recipe.yaml: {STRANGER}")
        assert f"{CONSENT}=1" in told
    assert not (tmp_path / "ran").exists()


def test_what_was_trained_here_is_trusted_until_its_code_changes(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = of_a_stranger(tmp_path / "run", own)
    trust_code(str(own), "main")
    assert finished_run(run).recipe.model.trust_remote_code
    with (own / "modeling_own.py").open("a") as file:
        file.write("\nimport os\n")
    with pytest.raises(FinetuneError, match=STRANGER):
        finished_run(run)
    monkeypatch.setenv(CONSENT, "1")
    finished_run(run)
    assert not (tmp_path / "ran").exists()


@pytest.mark.thorough
@pytest.mark.usefixtures("forget_the_last_run")
@pytest.mark.filterwarnings("ignore")  # the model's code is not of today's transformers
def test_a_training_that_asks_for_it_is_the_users_word(own: Path, tmp_path: Path) -> None:
    """So that a run's own verbs need no further word on the machine that trained it."""
    config = AutoConfig.from_pretrained(own, trust_remote_code=True)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True).save_pretrained(own)
    chats = write_chats(tmp_path / "chats.jsonl", [30, 40, 35, 45, 50])
    changes: dict[str, Any] = {"model": {"trust_remote_code": True}, "training": {"max_steps": 1, "warmup_ratio": 0.0}}
    recipe = tiny_lora(own, chats, **changes, output_dir=str(tmp_path / "mine"))
    run = of_a_stranger(tmp_path / "run", own)
    with pytest.raises(FinetuneError, match=STRANGER):
        finished_run(run)
    assert train([str(write_recipe(tmp_path, recipe))]) == 0
    finished_run(tmp_path / "mine")
    finished_run(run)


def test_an_export_reads_the_recipe_by_the_same_rule(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = of_a_stranger(tmp_path / "run", own)
    monkeypatch.setattr("finetune.hand_over.export_step._checkpoint_at", lambda *_: None)
    with pytest.raises(FinetuneError, match=STRANGER):
        export_step(run, 1)


@pytest.mark.parametrize(
    ("consented", "asked"),
    [
        (("owner/model", "main"), ("owner/model", "v2")),
        (("owner/model", "v2"), ("owner/model", "main")),
        (("owner/model", "a" * 40), ("owner/model", "b" * 40)),
        (("owner/model", "main"), ("owner/model2", "main")),
        (("owner/model", "main"), ("other/model", "main")),
    ],
)
def test_consent_covers_one_revision_of_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, consented: tuple[str, str], asked: tuple[str, str]
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    trust_code(*consented)
    refuse_unknown_code(tmp_path, *consented)
    with pytest.raises(FinetuneError, match=STRANGER):
        refuse_unknown_code(tmp_path, *asked)


def test_code_in_a_run_that_is_not_its_bases_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user accepted the base's code. A stranger's run may bring another file of that name, or one more."""
    monkeypatch.delenv(CONSENT, raising=False)
    base, product = tmp_path / "base", tmp_path / "run" / "model"
    for folder in (base, product):
        folder.mkdir(parents=True)
        (folder / "modeling_own.py").write_text("answer = 42\n")
    refuse_other_code(product, base, "someone/own")
    refuse_other_code(product, None, "someone/own")  # the load asks for the base
    (product / "deeper").mkdir()
    for file in (product / "more.py", product / "deeper" / "modeling_own.py", product / "modeling_own.py"):
        file.write_text("answer = 43\n")
        with pytest.raises(
            FinetuneError, match=r"differs from the code that comes with someone/own, the only accepted"
        ) as refused:
            refuse_other_code(product, base, "someone/own")
        assert str(refused.value).startswith(str(file))
        monkeypatch.setenv(CONSENT, "1")
        refuse_other_code(product, base, "someone/own")
        monkeypatch.delenv(CONSENT)
        file.unlink()
