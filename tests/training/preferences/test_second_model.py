"""A reference that is a model of its own: refused by `check` and before training if it cannot be compared with."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.files import read_sealed
from finetune.recipe.loader import load_recipe
from finetune.tokens.second_model import refuse_other_tokens
from finetune.train import main as train
from finetune.training import reference
from tests.support.models.tiny import tiny_model
from tests.support.runs.preferences import preference_recipe, tokenizer_of_both, write_base
from tests.support.stand_ins.planted import plant_in_own


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def copy_of(base: Path, folder: Path, change: Callable[[dict[str, Any]], None] = lambda tokenizer: None) -> Path:
    """The base with another tokenizer.json."""
    shutil.copytree(base, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    change(tokenizer)
    file.write_text(json.dumps(tokenizer), "utf-8")
    return folder


def words_turned_round(tokenizer: dict[str, Any]) -> None:
    """As many tokens in another order; the control tokens stay."""
    vocabulary, control = tokenizer["model"]["vocab"], {token["content"] for token in tokenizer["added_tokens"]}
    names = sorted((name for name in vocabulary if name not in control), key=vocabulary.get)
    vocabulary |= dict(zip(names, reversed([vocabulary[name] for name in names]), strict=True))


def two_words_swapped(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return " ".join((output.err + output.out).split())


@pytest.mark.parametrize("change", [words_turned_round, two_words_swapped])
def test_other_tokens_are_refused_by_check_and_training(
    change: Callable[[dict[str, Any]], None], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy_of(base, tmp_path / "other", change)
    recipe = str(preference_recipe(tmp_path / "run", base, "dpo", {"dpo": {"reference": str(other)}}))
    verbs = [["check", recipe, "--data"], ["check", recipe, "--model"]]
    for verb in verbs if change is words_turned_round else verbs[:1]:
        assert main(verb) == 2
        assert f"dpo.reference: {other} has another tokenizer: token " in refusal(capsys)
    assert train([recipe]) == 2
    assert f"dpo.reference: {other} has another tokenizer: token " in refusal(capsys)
    assert not (tmp_path / "run" / "run").exists()


def test_a_token_that_was_added_counts_where_the_data_use_it(base: Path, tmp_path: Path) -> None:
    """A newer base may have named one of its spare tokens."""

    def renamed(tokenizer: dict[str, Any]) -> None:
        control = tokenizer["added_tokens"][-1]
        tokenizer["model"]["vocab"]["<|other|>"] = tokenizer["model"]["vocab"].pop(control["content"])
        control["content"] = "<|other|>"

    other = copy_of(base, tmp_path / "other", renamed)
    recipe = load_recipe(
        preference_recipe(tmp_path / "run", base, "kto", {"kto": {"reference": str(other)}}), []
    ).recipe
    own = AutoTokenizer.from_pretrained(base)
    number = AutoTokenizer.from_pretrained(other).convert_tokens_to_ids("<|other|>")
    assert list(refuse_other_tokens(recipe, own, [np.asarray([number + 1, number - 1])])) == []
    with pytest.raises(FinetuneError, match=rf"^kto\.reference: .*: token {number} is "):
        list(refuse_other_tokens(recipe, own, [np.asarray([3, number, 3])]))


def test_without_a_tokenizer_there_is_a_note(base: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(base / name, bare)
    recipe = load_recipe(preference_recipe(tmp_path / "run", base, "dpo", {"dpo": {"reference": str(bare)}}), []).recipe
    (note,) = refuse_other_tokens(recipe, AutoTokenizer.from_pretrained(base), [])
    assert note.startswith(f"dpo.reference: {bare} has no tokenizer to compare")


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["adapter_config.json"], "is an adapter, and a reference is a whole model; set model.adapter: PLACE and"),
        (["adapter/adapter_config.json"], "a whole model; set model.adapter: PLACE/adapter and reference: start"),
        (["model/config.json"], "is a run's folder; name PLACE/model"),
        (["readme.txt"], "PLACE has no config.json; name a model's folder"),
        ([], "PLACE: no such folder"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_folder_that_is_no_model_has_its_remedy(
    kind: str, files: list[str], said: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    write_files(place, *files)
    recipe = preference_recipe(tmp_path / "run", base, kind, {kind: {"reference": str(place)}})
    assert main(["check", str(recipe)]) == 2
    told = refusal(capsys)
    assert f"{kind}.reference: " in told
    assert said.replace("PLACE", str(place)) in told


def test_an_unknown_name_is_the_references(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(preference_recipe(tmp_path / "run", base, "dpo"))
    assert main(["check", recipe, "--data", "dpo.reference=no/such"]) == 0
    assert "dpo.reference: no/such is not on this machine; training compares" in refusal(capsys)
    assert train([recipe, "dpo.reference=no/such"]) in (2, 4)
    told = refusal(capsys)
    assert "dpo.reference: " in told
    assert "model.name_or_path" not in told


def test_embeddings_that_lack_a_token_are_the_references(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.models.tiny import tiny_model

    few = copy_of(base, tmp_path / "few")
    model = tiny_model()
    model.resize_token_embeddings(8)
    model.save_pretrained(few)
    assert train([str(preference_recipe(tmp_path / "run", base, "dpo", {"dpo": {"reference": str(few)}}))]) == 2
    assert "dpo.reference: the tokenizer makes token" in refusal(capsys)


@pytest.mark.thorough
def test_its_fast_modules_are_compared_too(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A norm that is planted wrong is left to transformers, and the reference is right."""
    other = tmp_path / "other"
    tiny_model(seed=3).save_pretrained(other)
    tokenizer_of_both().save_pretrained(other)
    changes = {"training": {"max_steps": 1}, "dpo": {"reference": str(other)}}
    genuine, found = reference.assemble, list[np.ndarray]()

    def planted(*arguments: Any, **options: Any) -> Any:
        plant_in_own("norms", "output", monkeypatch)
        return genuine(*arguments, **options)

    for name, assemble in (("right", genuine), ("wrong", planted)):
        monkeypatch.setattr(reference, "assemble", assemble)
        monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / name / "cache"))
        capsys.readouterr()
        assert train([str(preference_recipe(tmp_path / name, base, "dpo", changes))]) == 0
        content = read_sealed(tmp_path / name / "run" / "reference.json")
        assert content is not None
        found.append(np.frombuffer(base64.b64decode(content["answers"]), "<f4"))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    line = "guard: transformers computes all norms from here on"
    assert capsys.readouterr().out.count(line) == 2, "the reference's, and the run's own"
