"""A driver that refuses expandable segments: one line with the setting that it takes, wherever it shows first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finetune import train
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.library_errors import library_errors
from tests.support.runs.recipes import least, write_recipe

SAID = [
    RuntimeError("CUDA driver error: operation not supported"),
    RuntimeError("CUDA driver error: unknown error"),
    RuntimeError("CUDA driver error: device not ready"),
    torch.AcceleratorError("CUDA error: operation not supported\nCUDA kernel errors might be asynchronously reported"),
]
OTHERS = [
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("gloo: operation not supported"),
    ValueError("CUDA driver error: operation not supported"),
]
REMEDY = "`export PYTORCH_ALLOC_CONF=expandable_segments:False`"


@pytest.fixture(autouse=True)
def expandable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@pytest.mark.parametrize("error", SAID)
def test_where_weights_are_loaded_and_anywhere_else(error: RuntimeError) -> None:
    def line(error: Exception) -> FinetuneError:
        return FinetuneError(f"model.name_or_path: {error}")

    for around in (library_errors(line), library_errors()):
        with pytest.raises(EnvironmentMismatch) as caught, around:
            raise error
        assert REMEDY in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", OTHERS)
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, library_errors():
        raise error
    assert caught.value is error


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_nobody_is_told_what_is_set_already(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv(name, "expandable_segments:False")
    with pytest.raises(RuntimeError, match="operation not supported"), library_errors():
        raise SAID[0]


def test_a_training_ends_in_that_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> int:
        raise SAID[0]

    monkeypatch.setattr(train, "announce", refuse)
    recipe = write_recipe(tmp_path, least("me/it"))
    assert train.main([str(recipe)]) == EnvironmentMismatch.exit_code
    said = capsys.readouterr().err
    assert REMEDY in said
    assert said.count("\n") == 1
