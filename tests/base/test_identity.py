"""A base by its content: equal wherever and however its files lie, different as soon as one tensor is."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetune.base.identity import (
    BASE_CONTENT,
    SAMPLE,
    at_recorded_commit,
    base_identity,
    content_of,
    is_same_base,
    recorded_base,
)
from finetune.errors import FinetuneError
from finetune.finished_run import finished_run as opened
from finetune.recipe.loader import load_recipe
from finetune.untrusted.safetensors_header import add_metadata, read_header, read_metadata
from tests.support.runs.finished import finished_run

FIRST, SECOND = "1" * 40, "2" * 40


@pytest.fixture
def base(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "base"))


def change(folder: Path, name: str, add: float = 0.01) -> None:
    file = folder / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    tensors[name] += add
    save_file(tensors, file, metadata={"format": "pt"})


def settings(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


class TestContent:
    def test_every_tensor_counts(self, base: Path, tmp_path: Path) -> None:
        names, seen = sorted(load_file(base / "model.safetensors")), {content_of(base)}
        for name in names:
            copy = shutil.copytree(base, tmp_path / name)
            change(copy, name)
            seen.add(content_of(copy))
        assert len(names) > 10
        assert len(seen) == len(names) + 1

    @pytest.mark.parametrize(
        "how",
        [
            lambda folder: settings(folder, transformers_version="4.40.0", use_cache=False, torch_dtype="float16"),
            lambda folder: (folder / "README.md").write_text("changed"),
            lambda folder: os.utime(folder / "model.safetensors", (1, 1)),
            lambda folder: (folder / "config.json").write_text(
                json.dumps(dict(reversed(json.loads((folder / "config.json").read_text()).items())), indent=7)
            ),
        ],
        ids=["writer", "card", "time", "order"],
    )
    def test_nothing_that_computes_alike_counts(self, base: Path, how: Callable[[Path], Any]) -> None:
        before = content_of(base)
        how(base)
        assert content_of(base) == before is not None

    def test_shards_of_another_size_are_one_content(self, base: Path, tmp_path: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(base)
        for size in ("300KB", "5GB"):
            model.save_pretrained(tmp_path / size, max_shard_size=size)
        assert (tmp_path / "300KB" / "model.safetensors.index.json").is_file()
        assert content_of(tmp_path / "300KB") == content_of(tmp_path / "5GB")

    def test_a_setting_of_the_forward_counts(self, base: Path) -> None:
        before = content_of(base)
        settings(base, rms_norm_eps=1e-3)
        assert content_of(base) != before

    @pytest.mark.parametrize("spoil", ["", "x" * 100, "\xff" * 9])
    def test_no_whole_model_has_none(self, base: Path, spoil: str) -> None:
        (base / "model.safetensors").write_bytes(spoil.encode("latin-1"))
        assert content_of(base) is None
        (base / "model.safetensors").unlink()
        assert content_of(base) is None

    def test_a_model_of_140_gb_takes_a_second(self, tmp_path: Path) -> None:
        """Sparse files: 30 of 4.7 GB, each with 80 tensors of 58 MB."""
        (tmp_path / "config.json").write_text("{}")
        size, weights = 58_000_000, {}
        for number in range(30):
            names = [f"layer.{number}.{tensor}" for tensor in range(80)]
            header = {
                name: {"dtype": "BF16", "shape": [size // 2], "data_offsets": [place * size, (place + 1) * size]}
                for place, name in enumerate(names)
            }
            content = json.dumps(header).encode()
            with (tmp_path / f"{number}.safetensors").open("wb") as file:
                file.write(len(content).to_bytes(8, "little") + content)
                file.truncate(8 + len(content) + 80 * size)
            weights |= dict.fromkeys(names, f"{number}.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        started, before = time.process_time(), content_of(tmp_path)
        assert time.process_time() - started < 1
        with (tmp_path / "29.safetensors").open("r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            file.seek(8 + length + 79 * size + size // 2 + SAMPLE // 4)
            file.write(b"1")
        assert content_of(tmp_path) not in (None, before)


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ({"content": "a", "commit": FIRST}, {"content": "a", "commit": SECOND}, True),
        ({"content": "a", "commit": FIRST}, {"content": "b", "commit": FIRST}, False),
        ({"content": None, "commit": FIRST}, {"content": "b", "commit": FIRST}, True),
        ({"content": None, "commit": FIRST}, {"content": "b", "commit": SECOND}, False),
        ({"content": "a", "commit": None}, {"content": None, "commit": FIRST}, None),
        (None, {"content": "a"}, None),
        ("(not set)", {"content": "a"}, None),
    ],
)
def test_which_two_are_one(before: Any, now: Any, same: bool | None) -> None:
    assert is_same_base(before, now) is same


class TestHub:
    """A repository in the Hub's cache whose branch moved."""

    @pytest.fixture
    def cache(self, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        repository = tmp_path / "cache" / "models--acme--tiny"
        for commit, moved in ((FIRST, 0.0), (SECOND, 0.5)):
            shutil.copytree(tiny_llama, repository / "snapshots" / commit)
            change(repository / "snapshots" / commit, "model.norm.weight", moved)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(SECOND)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        return repository

    def recipe(self, tmp_path: Path, tiny_llama: Path) -> Any:
        run = finished_run(tmp_path / "r", tiny_llama)
        return load_recipe(run.parent / "recipe.yaml", ["model.name_or_path=acme/tiny"]).recipe

    def test_a_run_keeps_to_its_commit(self, cache: Path, tmp_path: Path, tiny_llama: Path) -> None:
        recipe = self.recipe(tmp_path, tiny_llama)
        now = base_identity(recipe.model)
        assert (now["commit"], now["content"]) == (SECOND, content_of(cache / "snapshots" / SECOND))
        recorded = now | {"commit": FIRST, "content": content_of(cache / "snapshots" / FIRST)}
        kept = at_recorded_commit(recipe, recorded)
        assert kept.model.revision == FIRST
        assert is_same_base(recorded, base_identity(kept.model))
        assert at_recorded_commit(recipe, recorded | {"name": "acme/other"}) is recipe
        assert at_recorded_commit(recipe, None) is recipe

    def test_a_commit_that_is_not_here_is_refused_by_its_name(
        self, cache: Path, tmp_path: Path, tiny_llama: Path
    ) -> None:
        run = finished_run(tmp_path / "f", tiny_llama)
        resolved = (run / "recipe.yaml").read_text().replace(str(tiny_llama), "acme/tiny")
        (run / "recipe.yaml").write_text(resolved)
        base = {"name": "acme/tiny", "revision": "main", "commit": FIRST, "content": content_of(tiny_llama)}
        (run / "receipt.json").write_text(json.dumps({"base": base}))
        assert opened(run).recipe.model.revision == FIRST
        shutil.rmtree(cache / "snapshots" / FIRST)
        with pytest.raises(FinetuneError, match=f"hf download acme/tiny --revision {FIRST}") as caught:
            opened(run)
        assert SECOND[:12] in str(caught.value)
        assert "\n" not in str(caught.value)


class TestFinishedRun:
    """chat, eval, merge and export all open a run here."""

    def with_receipt(self, tmp_path: Path, base: Path, **sections: Any) -> Path:
        run = finished_run(tmp_path / "f", base, **sections)
        facts = {"name": str(base), "revision": "main", "commit": None, "content": content_of(base)}
        (run / "receipt.json").write_text(json.dumps({"base": facts}))
        return run

    def test_a_replaced_base_is_refused_with_both_values(self, base: Path, tmp_path: Path) -> None:
        run = self.with_receipt(tmp_path, base)
        assert opened(run).recipe.model.name_or_path == str(base)
        before = content_of(base)
        change(base, "model.layers.1.mlp.up_proj.weight")
        now = content_of(base)
        assert before is not None
        assert now is not None
        with pytest.raises(FinetuneError, match="its base is another one now") as caught:
            opened(run)
        assert before[:12] in str(caught.value)
        assert now[:12] in str(caught.value)
        (run / "receipt.json").write_text("{}")
        opened(run)  # a run of an earlier release

    def test_a_model_of_all_weights_needs_no_base(self, base: Path, tmp_path: Path) -> None:
        run = self.with_receipt(tmp_path, base, lora=None)
        change(base, "model.norm.weight")
        opened(run)

    def test_texts_in_a_header_change_no_tensor(self, base: Path, tmp_path: Path) -> None:
        run = finished_run(tmp_path / "f", base)
        file = run / "adapter" / "adapter_model.safetensors"
        content = content_of(base)
        assert recorded_base(run) is None
        before = load_file(file)
        add_metadata(file, {BASE_CONTENT: str(content)})
        once = file.read_bytes()
        add_metadata(file, {BASE_CONTENT: str(content)})
        assert file.read_bytes() == once
        assert read_metadata(file) == {"format": "pt", BASE_CONTENT: content}
        read_header(file)
        after = load_file(file)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
