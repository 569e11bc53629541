"""What a person reads: YAML's traps explained, excerpts that point, origins, and nothing that makes it fall over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.cli.main import main
from finetune.errors import Mistake, RecipeError
from finetune.recipe.loader import MAX_MISTAKES, load_recipe
from finetune.recipe.mistakes import WANTED
from finetune.recipe.resolved import resolved_yaml
from finetune.recipe.schema import Recipe
from finetune.recipe.yaml_text import Place, excerpt, number_trap, parse, plain_scalar

ROOT = Path(__file__).resolve().parents[2]
SMALL = "model: {name_or_path: x}\ndata:\n  train:\n    - {path: json, data_files: a.jsonl}\n"


def errors(folder: Path, text: str, *overrides: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value).replace(f"{path}:", "")


def mistakes(folder: Path, text: str) -> tuple[Mistake, ...]:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    return caught.value.found


@pytest.mark.parametrize(
    ("written", "remedy"),
    [
        ("010", "write 10"),
        ("1,000", "write 1000"),
        ("10%", "write 0.1"),
        ("8k", "write 8000"),
        ("1e-4", "remove the quotes"),
        ("3", "remove the quotes"),
        ("a lot", None),
        ("2e-4x", None),
        ("", None),
    ],
)
def test_numbers_that_people_write_are_answered_with_ours(written: str, remedy: str | None) -> None:
    answer = number_trap(written)
    assert (remedy in answer) if remedy and answer else answer is remedy


@pytest.mark.parametrize(
    ("section", "code", "key", "write"),
    [
        ("training: {seed: '3'}", "int_type", "training.seed", []),
        ("training: {max_steps: 1e2}", "int_type", "training.max_steps", ["100"]),
        ("training: {mixed_precision: off}", "literal_error", "training.mixed_precision", ["no"]),
        ("training: {mixed_precision: false}", "literal_error", "training.mixed_precision", ["no"]),
        ("training: {resume: true}", "literal_error", "training.resume", ["auto"]),
        ("training: {optim: adamw_bnb_8bit}", "literal_error", "training.optim", ["adamw_8bit"]),
        ("training: {non_blocking: on}", "bool_type", "training.non_blocking", ["true"]),
        ("training: {pure_bf16: 'False'}", "bool_type", "training.pure_bf16", ["false"]),
        ("training: {pure_bf16: tRUE}", "bool_type", "training.pure_bf16", ["true"]),
        ("training: {compile: on}", "either", "training.compile", ["true"]),
        ("model: {name_or_path: x, revision: 1.0}", "string_type", "model.revision", ['"1.0"']),
        ("eval_steps: 10 %", "either", "eval_steps", []),
        ("lora: true", "model_type", "lora", ["{}"]),
        ("lora: false", "model_type", "lora", ["null"]),
        ("lora: {init_lora_weights: gausian}", "either", "lora.init_lora_weights", ["gaussian"]),
        ("lora: {r: 0}", "greater_than_equal", "lora.r", []),
        ("lora: {target_modules: all_linear}", "cross_check", "lora.target_modules", []),
        ("accelerate_config: fsdp", "literal_error", "accelerate_config", ["fsdp2"]),
        ("lora_rank: 8", "foreign", "lora_rank", ["lora.r"]),
        ("gradient_checkpointing: 3", "foreign", "gradient_checkpointing", ["training.activation_checkpointing"]),
        ("gradient_accumulation_steps: 4", "foreign", "gradient_accumulation_steps", []),
        ("fraction: 0.1", "misplaced", "fraction", ["data.eval.fraction"]),
        ("training: {sed: 1}", "unknown", "training.sed", ["training.seed"]),
        ("training: {lr_scheduler_type: warmup_stable_decay}", "cross_check", "training.lr_scheduler_type", []),
        ("training:\n\tseed: 1", "yaml", "", []),
        ("samples: {prompts: [a, b}", "yaml", "", []),
        ("training: {seed: !env SEED}", "yaml", "training.seed", []),
    ],
)
def test_one_mistake_is_one(tmp_path: Path, section: str, code: str, key: str, write: list[str]) -> None:
    page = SMALL if not section.startswith("model:") else SMALL.replace("model: {name_or_path: x}\n", "")
    (found,) = mistakes(tmp_path, page + section + "\n")
    assert (found.code, found.key, [*found.write]) == (code, key, write), found


@pytest.mark.parametrize(
    ("section", "place", "text"),
    [
        ("training: {seed: '3'}", "5:18", "training.seed: is 3; it must be a whole number; remove the quotes"),
        ("training:\n\tseed: 1", "6:1", "a tab cannot indent in YAML; use spaces"),
        ("samples: {prompts: [a, b}", "5:20", "this bracket is not closed"),
        ("training:\n  seed: 1\n    max_steps: 2", "7:5", "the indentation does not fit the lines above"),
        ("output_dir: 'a\nsamples: {}", "5:13", "a quote opened here is never closed"),
    ],
)
def test_a_mistake_is_shown_at_its_place(tmp_path: Path, section: str, place: str, text: str) -> None:
    assert errors(tmp_path, SMALL + section + "\n").startswith(f"{place}: {text}")


def test_a_missing_key_that_is_misspelt_is_reported_once(tmp_path: Path) -> None:
    (unknown,) = mistakes(tmp_path, SMALL.replace("name_or_path", "name_or_pth"))
    assert (unknown.code, unknown.write) == ("unknown", ("model.name_or_path",))
    (missing,) = mistakes(tmp_path, SMALL.replace("path: json, ", ""))
    assert (missing.code, missing.key) == ("missing", "data.train.0.path")


def test_a_section_given_on_the_command_line_is_not_the_origin_of_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(SMALL + "lora: {lora_alpha: 64}\n")
    origins = load_recipe(path, ["lora={r: 8}", "lora.use_dora=true"]).origins
    assert [origins[f"lora.{key}"] for key in ("r", "use_dora", "lora_alpha")] == ["command line"] * 2 + ["default"]


def test_overrides_that_are_none(tmp_path: Path) -> None:
    text = errors(tmp_path, SMALL, "seed", "=3", "a..b=1", "training.seed=[", "data.train.7.path=x", "model.revision=1")
    assert [line.split(": ")[1] for line in text.splitlines()] == [
        "seed", "=3", "a..b=1", "training.seed", "data.train.7.path", "model.revision",
    ]  # fmt: skip
    assert "'model.revision=\"...\"'" in text, "a shell takes one pair of quotes away"


def test_the_part_of_a_long_line_around_the_place_is_shown() -> None:
    line, caret = excerpt("a" * 300 + "!" + "b" * 300, Place(1, 301))
    assert line[caret.index("^")] == "!"
    assert len(line) < 120
    line, caret = excerpt("日本: !", Place(1, 5))
    assert caret.index("^") == line.index("!") + 2, "wide letters take two columns"
    assert next(excerpt("\x1b[31mred", Place(1, 1))) == "    \N{REPLACEMENT CHARACTER}[31mred"
    assert not list(excerpt("a", Place(9, 1)))


def test_no_more_mistakes_than_a_person_reads(tmp_path: Path) -> None:
    lines = errors(tmp_path, SMALL + "".join(f"key_{n}: 1\n" for n in range(500))).splitlines()
    assert sum(not line.startswith("    ") for line in lines) == MAX_MISTAKES + 1
    assert lines[-1].endswith("and 450 more mistakes")


LAUGHS = "x0: &x0 [a]\n" + "".join(f"x{n}: &x{n} [{','.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 9))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 100_000, "nested deeper"),
        ("a: &a [x]\nb: [*a, *a]\n", None),
        pytest.param("a: [" + "1," * 50_000 + "]", "more than 20,000 values", marks=pytest.mark.thorough),
        (LAUGHS, "unfold into"),
        ("a: &a [*a]", "unfold into"),
        ("a: 1\n---\nb: 1", "second document"),
        ("a: " + "9" * 10_000, None),
    ],
    ids=["deep", "small-alias", "long", "laughs", "itself", "two", "digits"],
)
def test_limits(text: str, expected: str | None) -> None:
    problems = [flaw.problem for flaw in parse(text).flaws]
    assert problems == [] if expected is None else any(expected in problem for problem in problems)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "pipe")


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t\x85"), min_size=1))
def test_every_text_is_written_so_that_it_is_read_again(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "small.yaml").write_text(SMALL)
    loaded = load_recipe(folder / "small.yaml", [f"samples={json.dumps({'prompts': [text]})}"])
    assert loaded.recipe.samples.prompts == [text]
    (folder / "again.yaml").write_text(resolved_yaml(loaded), encoding="utf-8", newline="")
    assert load_recipe(folder / "again.yaml").recipe == loaded.recipe


@pytest.mark.parametrize("text", ["1e5", "010", "no", "null", "~", "1:30", "2024-07-26", "-", "a: b", "# a", "", " a "])
def test_texts_that_look_like_other_values_stay_texts(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(SMALL)
    loaded = load_recipe(tmp_path / "a.yaml", [f"data.date_string={json.dumps(text)}"])
    (tmp_path / "b.yaml").write_text(resolved_yaml(loaded))
    assert load_recipe(tmp_path / "b.yaml").recipe.data.date_string == text


def _keys(schema: Any) -> set[str]:
    result = set(schema.get("properties", {}))
    for inner in schema.get("$defs", {}).values():
        result |= set(inner.get("properties", {}))
    return result


KEYS = [*sorted(_keys(Recipe.model_json_schema())), "EvalFraction", "list[DataSet]", "bool", "lora_r", "<<", ""]
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(KEYS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=15,
)
PATHS = st.lists(st.sampled_from([*KEYS, "0", "1", "99999", "²", "-1"]), min_size=1, max_size=4).map(".".join)
OVERRIDES = st.lists(st.text(max_size=12) | st.builds("{}={}".format, PATHS, st.text(max_size=8)), max_size=3)
SHAPED = st.builds(
    lambda model, data, rest: yaml.safe_dump({**rest, "model": model, "data": data}),
    ANY,
    st.fixed_dictionaries({"train": st.lists(ANY, max_size=2), "eval": ANY}) | ANY,
    st.dictionaries(st.sampled_from(sorted(Recipe.model_fields)), ANY, max_size=4),
).map(str.encode)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(content=SHAPED | st.binary(max_size=60), overrides=OVERRIDES)
def test_nothing_makes_it_fall_over(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, overrides: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "anything.yaml"
    path.write_bytes(content)
    try:
        load_recipe(path, overrides)
    except RecipeError as error:
        heads = [line for line in str(error).splitlines() if not line.startswith("    ")]
        assert all(line.startswith((str(path), "command line: ")) for line in heads), heads
        for words in ("Input should", "list[", "constrained", "EvalFraction", "another kind of value", "Traceback"):
            assert not [line for line in heads if words in line and words not in f"{content!r} {overrides}"], heads


@pytest.mark.parametrize("text", ["1e-4", "2e5", ".5", "-1", "1_000", "0", "-0", "+3", "1."])
def test_a_number_is_what_json_or_python_reads(text: str) -> None:
    assert plain_scalar(text) == float(text.replace("_", ""))


def test_every_kind_of_pydantic_has_our_words() -> None:
    """The kinds that our field types can raise; a new field type needs words of ours."""
    kinds = {"int_type", "float_type", "bool_type", "string_type", "list_type", "dict_type", "model_type"}
    assert kinds <= set(WANTED)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "finetune.cli.main", "check", *arguments],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **variables}, check=False,
    )  # fmt: skip


@pytest.mark.thorough
def test_the_real_program(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(SMALL + "training: {sed: 1}\nmicro_batch_size: 2\n")
    process = run(str(bad))
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.splitlines()[-1] == "2 mistakes"
    assert "Traceback" not in process.stderr
    process = run("recipes/llama3_fsdp.yaml", "samples.prompts=[日本]", "--resolved", PYTHONIOENCODING="latin-1")
    assert process.returncode == 0, process.stderr
    assert "\\u65e5" in process.stdout
    assert run().returncode == run("--wrong").returncode == 2
    assert sorted(tmp_path.iterdir()) == [bad], "check leaves nothing behind"


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune.cli.main.load_recipe", interrupt)
    assert main(["check", "recipes/llama3_fsdp.yaml"]) == 130
