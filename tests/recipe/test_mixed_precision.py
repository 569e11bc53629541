"""`auto` of number formats: by planted processor flags and timed products, in every way that a recipe is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.planner import command
from finetune.recipe import mixed_precision
from finetune.recipe.loader import load_recipe
from finetune.recipe.mixed_precision import (
    BASE_FORMAT,
    PRECISION,
    FastestFormat,
    fastest_by_flags,
    fastest_by_products,
    in_float32,
    processor_flags,
)
from finetune.recipe.resolved import resolved_yaml
from finetune.recipe.schema import Recipe
from finetune.rehearse.changes import formats_of_gpus, overrides
from tests.support.runs.recipes import least, write_recipe

PLAIN = "fpu sse2 ssse3 fma sse4_2 avx f16c"
PROCESSORS = {  # flags -> what is fastest
    f"{PLAIN} avx2": "no",
    f"{PLAIN} avx2 avx512f avx512bw avx512vl": "no",
    f"{PLAIN} avx2 avx512f avx512_bf16": "bf16",
    f"{PLAIN} avx2 avx512f avx512_bf16 amx_tile amx_bf16": "bf16",
    f"{PLAIN} avx2 amx_bf16": "bf16",
    PLAIN: "no",
    "fp asimd evtstrm aes crc32": "no",
    "fp asimd sve bf16 i8mm": "bf16",
    "": "no",
}


def cpuinfo(folder: Path, flags: str, name: str = "flags") -> str:
    path = folder / "cpuinfo"
    path.write_text(
        f"processor\t: 0\nmodel name\t: bf16 avx512_bf16\n{name}\t\t: {flags}\nbugs\t: amx_bf16\n\n", "utf-8"
    )
    return str(path)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Any:
    def planted(flags: str) -> None:
        monkeypatch.setattr(mixed_precision, "processor_flags", lambda: frozenset(flags.split()))

    return planted


@pytest.mark.parametrize("flags", PROCESSORS)
@pytest.mark.parametrize("name", ["flags", "Features"])
def test_the_flags_of_a_processor(flags: str, name: str, tmp_path: Path) -> None:
    found = processor_flags(cpuinfo(tmp_path, flags, name))
    assert found == frozenset(flags.split())
    assert fastest_by_flags(found).precision == PROCESSORS[flags]


def test_a_system_that_names_no_flags_computes_in_float32(tmp_path: Path) -> None:
    assert processor_flags(str(tmp_path / "none")) == frozenset()
    assert fastest_by_flags(()).precision == "no"


@pytest.mark.parametrize("flags", PROCESSORS)
@pytest.mark.parametrize("written", [{}, {"training": {"mixed_precision": "auto"}, "model": {"dtype": "auto"}}])
def test_a_recipe_for_a_cpu_follows_its_flags(flags: str, written: dict[str, Any], plant: Any, tmp_path: Path) -> None:
    plant(flags)
    path = write_recipe(tmp_path, least("x", **written))
    loaded = load_recipe(path)
    fastest = PROCESSORS[flags]
    found = loaded.recipe.training.mixed_precision, loaded.recipe.model.dtype
    assert found == (fastest, "bfloat16" if fastest == "bf16" else "float32")
    assert loaded.auto_formats == (PRECISION, BASE_FORMAT)
    assert Recipe.model_validate(least("x", **written)).training.mixed_precision == fastest
    again = load_recipe(path, ["budget.gpus=1"])
    assert (again.recipe.training.mixed_precision, again.recipe.model.dtype) == ("bf16", "bfloat16")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"training": {"mixed_precision": "bf16"}}, ("bf16", "bfloat16")),
        ({"training": {"mixed_precision": "no"}}, ("no", "float32")),
        ({"training": {"mixed_precision": "fp16"}}, ("fp16", "bfloat16")),
        ({"model": {"dtype": "bfloat16"}}, ("no", "bfloat16")),
        ({"lora": None}, ("no", "bfloat16")),  # the format of the export, which no processor decides
        ({"lora": None, "training": {"pure_bf16": True}}, ("bf16", "bfloat16")),
        ({"quantization": {"load_in_4bit": True}}, ("bf16", "bfloat16")),
        ({"quantization": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}}, ("no", "float32")),
        ({"quantization": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"}}, ("fp16", "float16")),
        ({"quantization": {"load_in_8bit": True}}, ("bf16", "bfloat16")),
        ({"quantization": {"load_in_4bit": True}, "training": {"mixed_precision": "no"}}, ("no", "bfloat16")),
    ],
)
def test_what_is_written_stays_and_the_rest_follows(
    written: dict[str, Any], expected: tuple[str, str], plant: Any, tmp_path: Path
) -> None:
    plant(f"{PLAIN} avx2")
    loaded = load_recipe(write_recipe(tmp_path, least("x", **written)))
    assert (loaded.recipe.training.mixed_precision, loaded.recipe.model.dtype) == expected
    settled, chosen = loaded.formats_for(FastestFormat("no", "of this test"))
    assert settled.recipe == loaded.recipe, "what the flags chose is what the same device chooses"
    assert set(chosen.values) == set(loaded.auto_formats)


def test_a_gpu_without_bfloat16_gets_fp16_throughout(tmp_path: Path) -> None:
    settled, _ = load_recipe(write_recipe(tmp_path, least("x"))).formats_for(FastestFormat("fp16", "of this test"))
    assert (settled.recipe.training.mixed_precision, settled.recipe.model.dtype) == ("fp16", "float16")


@pytest.mark.parametrize(
    ("by_flags", "bfloat16", "float32", "expected"),
    [
        ("bf16", 0.5, 1.1, "bf16"),
        ("bf16", 40.0, 1.1, "no"),  # the flag is there, and a library or a guest is held to AVX2
        ("bf16", 2.1, 1.1, "bf16"),  # noise
        ("no", 0.4, 1.1, "bf16"),  # arithmetic that the flags do not name
        ("no", 0.9, 1.1, "no"),
        ("no", 40.0, 1.1, "no"),
    ],
)
def test_timed_products_overrule_flags_only_far_apart(
    by_flags: str, bfloat16: float, float32: float, expected: str
) -> None:
    found = fastest_by_products(FastestFormat(by_flags, "the flags say so"), bfloat16, float32)
    assert found.precision == expected
    assert ("although the flags say so" in found.why) == (expected != by_flags)


@pytest.mark.parametrize("flags", [f"{PLAIN} avx2", f"{PLAIN} avx512f avx512_bf16"])
def test_the_folders_recipe_keeps_what_was_chosen_on_any_processor(flags: str, plant: Any, tmp_path: Path) -> None:
    plant(flags)
    loaded = load_recipe(write_recipe(tmp_path, least("x")))
    text = resolved_yaml(loaded)
    assert text.count("# default: auto") == 2
    plant(f"{PLAIN} avx2" if "bf16" in flags else "avx512_bf16")
    (tmp_path / "resolved.yaml").write_text(text, "utf-8")
    again = load_recipe(tmp_path / "resolved.yaml")
    assert again.auto_formats == ()
    assert again.recipe == loaded.recipe


def test_what_is_wrong_beside_auto_is_told_as_ever(tmp_path: Path) -> None:
    for wrong in (
        {"training": None},
        {"training": {"mixed_precision": 16}},
        {"model": {"dtype": ["auto"]}},
        {"budget": None},
        {"budget": {"gpus": "two"}},
        {"quantization": 4},
    ):
        path = write_recipe(tmp_path, {**least("x"), **wrong} if "model" not in wrong else least("x", **wrong))
        with pytest.raises(Exception, match=next(iter(wrong))) as caught:
            load_recipe(path)
        assert type(caught.value).__name__ == "RecipeError"


@pytest.mark.parametrize(
    "written",
    [
        {},
        {"quantization": {"load_in_4bit": True}},
        {"lora": None},
        {"lora": None, "training": {"pure_bf16": True}},
        {"training": {"mixed_precision": "fp16"}, "model": {"dtype": "float16"}},
    ],
)
def test_the_remedy_for_a_slow_format_computes_in_float32(written: dict[str, Any], plant: Any, tmp_path: Path) -> None:
    plant("avx512_bf16")
    path = write_recipe(tmp_path, least("x", **written))
    remedy = in_float32(load_recipe(path).recipe)
    assert remedy
    again = load_recipe(path, remedy).recipe
    assert in_float32(again) == ()


@pytest.mark.parametrize("flags", [f"{PLAIN} avx2", f"{PLAIN} avx512f avx512_bf16"])
@pytest.mark.parametrize(
    ("words", "says"), [([], True), (["budget.gpus=1"], False), (["training.mixed_precision=no"], False)]
)
def test_check_says_what_auto_is_here(
    flags: str, words: list[str], says: bool, plant: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(flags)
    path = write_recipe(tmp_path, least("x", data={"train": [{"path": "json", "data_files": "rows.jsonl"}]}))
    assert main(["check", str(path), *words]) == 0
    out = capsys.readouterr().out
    chosen = f"auto chose training.mixed_precision: {PROCESSORS.get(flags, 'bf16')}, "
    assert (chosen in out) == says, out
    assert main(["check", str(path), *words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert ("formats" in facts) == (says or words == ["training.mixed_precision=no"])


@pytest.mark.parametrize(
    ("gpus", "asked", "expected"),
    [
        ("cpu", [], "no"),
        ("1x24GB", [], "bf16"),
        (None, ["budget={gpus: 2, gpu_memory_gb: 24}"], "bf16"),
        ("cpu", ["budget={gpus: 2, gpu_memory_gb: 24}"], "no"),
        ("1x24GB", ["training.mixed_precision=no"], "no"),
    ],
)
def test_a_plan_is_of_the_format_of_its_devices(
    gpus: str | None, asked: list[str], expected: str, plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(f"{PLAIN} avx2")
    planned: list[Recipe] = []

    def plan(recipe: Recipe, *_: Any) -> tuple[dict[str, Any], str]:
        planned.append(recipe)
        return {"ok": True}, "planned"

    monkeypatch.setattr(command, "_largest", plan)
    path = write_recipe(tmp_path, least("x"))
    result, text = command.plan_in_words(
        [str(path), *asked], command.PlanOptions(gpus, largest="max_length"), None, print
    )
    assert planned[0].training.mixed_precision == expected
    is_auto = not any("mixed_precision" in word for word in asked)
    assert (f"auto chose training.mixed_precision: {expected}" in text) == is_auto
    if is_auto:
        assert result["formats"]["chosen"][PRECISION] == expected


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_rehearsal_computes_as_the_recipes_gpus_do(gpus: int, plant: Any, tmp_path: Path) -> None:
    plant(f"{PLAIN} avx2")
    path = write_recipe(tmp_path, least("x", budget={"gpus": gpus, "gpu_memory_gb": 24}))
    changes = formats_of_gpus(load_recipe(path))
    rehearsed = load_recipe(path, ["budget.gpus=0", *overrides(changes)]).recipe
    assert rehearsed.training.mixed_precision == ("bf16" if gpus else "no")
    assert [change.note.partition(", which")[0] for change in changes] == (
        ["training.mixed_precision: bf16, model.dtype: bfloat16"] if gpus else []
    )
    assert formats_of_gpus(load_recipe(path, ["training.mixed_precision=bf16", "model.dtype=bfloat16"])) == []
