"""Number formats at the start: chosen once, kept by the run's folder, the same on every rank; and the first line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.errors import EnvironmentMismatch
from finetune.launch.launcher import read_launch
from finetune.measure import product_speed
from finetune.measure.product_speed import product_seconds
from finetune.recipe import mixed_precision
from finetune.recipe.loader import load_recipe
from finetune.recipe.mixed_precision import BASE_FORMAT, PRECISION
from finetune.run_folder.folder import RunIdentity, claim_run_folder, curve_identity, lock_run_folder
from finetune.training import start as formats
from finetune.training.agreement import OwnChoices, refuse_other_formats
from finetune.training.start import choose_formats, slow_formats_note
from tests.support.runs.recipes import least, write_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
AVX2, BF16 = "avx2 fma", "avx2 avx512f avx512_bf16"
CHOSEN = {AVX2: ("no", "float32"), BF16: ("bf16", "bfloat16")}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A processor with these flags, whose products take as long as they make one expect."""

    def planted(flags: str, bfloat16: float | None = None) -> None:
        monkeypatch.setattr(mixed_precision, "processor_flags", lambda: frozenset(flags.split()))
        emulated = 0.04 if "avx512_bf16" not in flags else 0.0005
        seconds = {torch.float32: 0.001, torch.bfloat16: bfloat16 or emulated, torch.float16: 0.08}
        monkeypatch.setattr(product_speed, "product_seconds", lambda asked: [seconds[dtype] for dtype in asked])

    return planted


def started(tmp_path: Path, *words: str, **sections: Any) -> tuple[tuple[str, str], Any]:
    path = write_recipe(tmp_path, least("x", **sections))
    loaded, chosen = choose_formats(load_recipe(path, [f"output_dir={tmp_path}/run", *words]), read_launch({}))
    return (loaded.recipe.training.mixed_precision, loaded.recipe.model.dtype), SimpleNamespace(
        loaded=loaded, chosen=chosen
    )


def choices_of(start: Any) -> OwnChoices:
    """As a rank tells them to the others."""
    recipe = start.loaded.recipe
    return OwnChoices(0, f"{recipe.training.mixed_precision} {recipe.model.dtype}", 0, 1)


@pytest.mark.parametrize("flags", CHOSEN)
@pytest.mark.parametrize("other", CHOSEN)
def test_a_run_keeps_its_formats_on_another_processor(flags: str, other: str, processor: Any, tmp_path: Path) -> None:
    processor(flags)
    found, start = started(tmp_path)
    assert found == CHOSEN[flags]
    assert start.chosen.facts["chosen"] == dict(zip((PRECISION, BASE_FORMAT), found, strict=True))
    identity = curve_identity(start.loaded.recipe)
    claim_run_folder(
        lock_run_folder(tmp_path / "run"), resume="auto", identity=RunIdentity(identity), command="again"
    ).release()
    processor(other)
    found, again = started(tmp_path)
    assert found == CHOSEN[flags]
    assert again.chosen.line.startswith("auto keeps training.mixed_precision: ")
    assert curve_identity(again.loaded.recipe) == identity
    found, _ = started(tmp_path, "training.resume=never")
    assert found == CHOSEN[other]
    found, _ = started(tmp_path, "training.mixed_precision=fp16", "model.dtype=auto")
    assert found == ("fp16", CHOSEN[flags][1])


def test_products_that_are_emulated_overrule_the_flags(processor: Any, tmp_path: Path) -> None:
    processor(BF16, bfloat16=0.04)
    found, start = started(tmp_path)
    assert found == ("no", "float32")
    assert "40 ms in bfloat16 and 1 ms in float32, although" in start.chosen.line


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), ("fp16", "float16")),
        ((7, 0), ("fp16", "float16")),
        ((8, 0), ("bf16", "bfloat16")),
        ((9, 0), ("bf16", "bfloat16")),
    ],
)
def test_on_a_gpu_its_capability_decides(
    capability: tuple[int, int],
    expected: tuple[str, str],
    processor: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor(AVX2)  # which decides nothing there, though the recipe's budget names no GPU
    monkeypatch.setattr(formats, "device_of", lambda launch: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert started(tmp_path)[0] == expected
    assert started(tmp_path, "lora=null")[0] == (expected[0], "bfloat16")


def test_nothing_is_timed_where_the_recipe_says_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(product_speed, "product_seconds", lambda asked: pytest.fail("timed"))
    found, start = started(tmp_path, "training.mixed_precision=no", "model.dtype=bfloat16")
    assert found == ("no", "bfloat16")
    assert (start.chosen.line, start.chosen.facts) == ("", {})


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["training.mixed_precision=bf16"], "training.mixed_precision=no model.dtype=float32"),
        (["training.mixed_precision=bf16", "lora=null"], "training.mixed_precision=no"),
        (["training.mixed_precision=fp16", "model.dtype=float16"], "training.mixed_precision=no model.dtype=float32"),
        (
            ["training.mixed_precision=bf16", "quantization={load_in_4bit: true}"],
            "training.mixed_precision=no model.dtype=float32 quantization.bnb_4bit_compute_dtype=float32",
        ),
        (["training.mixed_precision=no", "model.dtype=bfloat16"], "model.dtype=float32"),
        (["training.mixed_precision=no", "model.dtype=float32"], ""),
        ([], ""),
    ],
)
def test_a_recipe_that_computes_in_an_emulated_format_is_told_in_one_line(
    words: list[str], remedy: str, processor: Any, tmp_path: Path
) -> None:
    processor(AVX2)
    _, start = started(tmp_path, *words)
    note = slow_formats_note(start.loaded.recipe, torch.device("cpu"))
    assert bool(note) == bool(remedy)
    assert note.endswith(f"a new run is faster with {remedy}" if remedy else "")
    assert "\n" not in note
    if remedy:
        _, followed = started(tmp_path, *words, *remedy.split())
        assert slow_formats_note(followed.loaded.recipe, torch.device("cpu")) == ""
    assert slow_formats_note(start.loaded.recipe, torch.device("cuda")) == ""


def test_a_processor_with_bfloat16_arithmetic_is_told_of_fp16_alone(processor: Any, tmp_path: Path) -> None:
    processor(BF16)
    _, start = started(tmp_path, "training.mixed_precision=bf16")
    assert slow_formats_note(start.loaded.recipe, torch.device("cpu")) == ""
    _, start = started(tmp_path, "training.mixed_precision=fp16")
    assert "emulates float16" in slow_formats_note(start.loaded.recipe, torch.device("cpu"))


@pytest.mark.parametrize(("other", "fails"), [(AVX2, False), (BF16, True)])
def test_ranks_that_chose_differently_end_in_one_line(other: str, fails: bool, processor: Any, tmp_path: Path) -> None:
    processor(AVX2)
    _, here = started(tmp_path)
    processor(other)
    _, there = started(tmp_path)
    everyone = [choices_of(here), choices_of(there)]
    refuse_other_formats(everyone[:1] * 2, here.chosen)
    if not fails:
        refuse_other_formats(everyone, there.chosen)
        return
    with pytest.raises(EnvironmentMismatch) as caught:
        refuse_other_formats(everyone, there.chosen)
    assert "\n" not in str(caught.value)
    assert "no float32 on rank 0 and bf16 bfloat16 on rank 1" in str(caught.value)
    for word in ("training.mixed_precision=no", "model.dtype=float32"):
        assert word in str(caught.value)
    _, followed = started(tmp_path, "training.mixed_precision=no", "model.dtype=float32")
    assert followed.chosen.keys == ()


def test_the_remedy_for_ranks_of_a_run_that_has_begun_is_its_own_format(processor: Any, tmp_path: Path) -> None:
    """The folder is on rank 0's machine alone."""
    processor(BF16)
    _, first = started(tmp_path)
    identity = curve_identity(first.loaded.recipe)
    claim_run_folder(
        lock_run_folder(tmp_path / "run"), resume="auto", identity=RunIdentity(identity), command="again"
    ).release()
    processor(AVX2)
    _, rank_0 = started(tmp_path)
    _, rank_1 = started(tmp_path, f"output_dir={tmp_path}/not-here")
    with pytest.raises(EnvironmentMismatch) as caught:
        refuse_other_formats([choices_of(rank_0), choices_of(rank_1)], rank_0.chosen)
    remedy = ["training.mixed_precision=bf16", "model.dtype=bfloat16"]
    assert f"set {' '.join(remedy)} for all ranks" in str(caught.value)
    _, followed = started(tmp_path, *remedy)
    assert curve_identity(followed.loaded.recipe) == identity


def test_timing_products_draws_no_random_number_and_keeps_the_threads() -> None:
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    in_16_bits, in_32_bits = product_seconds([torch.bfloat16, torch.float32])
    assert 0 < in_32_bits < 1
    assert 0 < in_16_bits < 5
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


FIRST_LINE = """
import json, os, sys
from finetune.train import main

class Watched:
    def __init__(self, stream):
        self.stream, self.seen = stream, []
    def write(self, text):
        if text.strip() and not self.seen:
            heavy = ("torch", "transformers", "accelerate", "peft", "numpy", "datasets", "bitsandbytes", "psutil.never")
            self.seen = [text, [name for name in heavy if name in sys.modules]]
            os.write(1, json.dumps(self.seen).encode())
            os._exit(0)
        return len(text)
    def flush(self):
        pass
    def isatty(self):
        return False

sys.stdout = Watched(sys.stdout)
main(sys.argv[1:])
os._exit(3)
"""


def first_line(*words: str, **environment: str) -> tuple[str, list[str]] | None:
    process = subprocess.run(
        [sys.executable, "-c", FIRST_LINE, *words],
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return tuple(json.loads(process.stdout)) if process.returncode == 0 else None


@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize("recipe", ["quickstart", "smollm2_135m_full_cpu", "llama3_8b_qlora_1x16gb"])
def test_the_first_line_comes_before_torch_is_imported(recipe: str) -> None:
    found = first_line(f"recipes/{recipe}.yaml")
    assert found is not None
    text, imported = found
    assert imported == []
    assert text.startswith(load_recipe(REPOSITORY / "recipes" / f"{recipe}.yaml").recipe.model.name_or_path)
    assert f"runs/{recipe}" in text


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_alone_says_it(rank: str) -> None:
    ranks = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": rank}
    found = first_line("recipes/quickstart.yaml", **ranks)
    assert (found is not None and "importing torch" in found[0]) == (rank == "0")


def test_a_wrong_recipe_is_refused_before_any_line() -> None:
    assert first_line("recipes/quickstart.yaml", "training.seed=one") is None
