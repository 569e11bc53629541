"""The rows of a comparison: the product of what varies, or a file's; mistakes found before the first job."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.preflight.compare_rows import ComparedRow, check_compared, rows_of_options, split_values
from finetune.preflight.comparison import job_command, plan_comparison
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import tiny, write_recipe


@pytest.fixture
def recipe(tiny_llama: Path, tmp_path: Path) -> Path:
    """Two rows a step, full fine-tuning in float32."""
    chats = write_chats(tmp_path / "chats.jsonl", [20, 30])
    training = {"global_batch_size": 2, "per_device_batch_size": 1, "learning_rate": 1e-3}
    return write_recipe(tmp_path, tiny(tiny_llama, chats, lora=None, training=training, output_dir=f"{tmp_path}/run"))


def checked(recipe: Path, *vary: str, strategies: str | None = None, steps: int = 2) -> list[ComparedRow]:
    return check_compared(recipe, [], rows_of_options(vary, strategies), steps)


def refused(recipe: Path, *vary: str, strategies: str | None = None) -> list[str]:
    with pytest.raises(FinetuneError) as caught:
        checked(recipe, *vary, strategies=strategies)
    return str(caught.value).splitlines()


def test_what_varies_twice_is_the_product(recipe: Path) -> None:
    rows = checked(recipe, "strategy=ddp,fsdp2", "training.mixed_precision=no,bf16")
    names = ["ddp mixed_precision=no", "ddp mixed_precision=bf16", "fsdp2 mixed_precision=no"]
    assert [row.name for row in rows] == [*names, "fsdp2 mixed_precision=bf16"]
    assert [(row.strategy, row.recipe.training.mixed_precision) for row in rows] == [
        ("ddp", "no"), ("ddp", "bf16"), ("fsdp2", "no"), ("fsdp2", "bf16"),
    ]  # fmt: skip
    assert rows[1].folder == "ddp_mixed_precision-bf16"
    curves = [row.curve for row in rows]
    assert curves[0] == curves[2] != curves[1] == curves[3], "precision decides the curve, the strategy does not"


def test_strategies_are_one_more_list(recipe: Path) -> None:
    by_option = checked(recipe, "training.per_device_batch_size=1,2", strategies="ddp, single,ddp")
    by_key = checked(recipe, "accelerate_config=ddp,single", "training.per_device_batch_size=1,2")
    assert [row.name for row in by_option] == [row.name for row in by_key]
    assert len(by_option) == 4
    alone = checked(recipe, "training.seed=1,2")
    assert [(row.name, row.strategy) for row in alone] == [("seed=1", "single"), ("seed=2", "single")]
    assert len({row.curve for row in by_option}) == 1
    assert len({row.curve for row in alone}) == 2


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a,b", ["a", "b"]),
        ("{r: 8, lora_alpha: 16},null", ["{r: 8, lora_alpha: 16}", "null"]),
        ("[a, b],[c]", ["[a, b]", "[c]"]),
        ("\"x, y\",'z'", ['"x, y"', "'z'"]),
        (" a , ,b", ["a", "", "b"]),
    ],
)
def test_commas_within_brackets_and_quotes_part_nothing(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_sections_and_lists_vary_too(recipe: Path) -> None:
    rows = checked(recipe, "lora={r: 4, target_modules: [q_proj, v_proj]},null", "data.train.0.weight=1.0,2.0")
    assert [row.recipe.lora is None for row in rows] == [False, False, True, True]
    assert [row.recipe.data.train[0].weight for row in rows] == [1.0, 2.0, 1.0, 2.0]
    assert len({row.folder for row in rows}) == 4


def test_a_long_value_is_shortened_in_names_alone(recipe: Path) -> None:
    rows = checked(recipe, "lora={r: 4, target_modules: [q_proj, k_proj, v_proj, o_proj]},{r: 4, use_dora: true}")
    assert len(rows[0].name) < 50
    assert rows[0].recipe.lora is not None
    assert rows[0].recipe.lora.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_keys_that_end_alike_are_named_whole(recipe: Path) -> None:
    rows = checked(recipe, "training.seed=1", "data.train.0.name=a", "data.train.0.split=train")
    assert rows[0].name == "seed=1 name=a split=train"
    rows = checked(recipe, "model.revision=main", "data.train.0.revision=main")
    assert rows[0].name == "model.revision=main data.train.0.revision=main"


def test_each_mistake_is_one_line_before_anything_runs(recipe: Path) -> None:
    line = "--vary: training.mixed_precison: is unknown; did you mean training.mixed_precision?"
    assert refused(recipe, "training.mixed_precison=no,bf16", "strategy=ddp,zero1") == [line]
    (line,) = refused(recipe, "training.mixed_precision=fp17,no", strategies="ddp,fsdp2")
    assert line == "--vary: training.mixed_precision: is fp17; did you mean fp16? choose one of auto, bf16, fp16, no"
    (line,) = refused(recipe, strategies="ddp,nonsense")
    assert line.startswith(
        "--strategies: accelerate_config: is nonsense; choose one of 1f1b, 1f1b_ddp2, cpu_2proc, ddp,"
    )
    (line,) = refused(recipe, "training.pure_bf16=true")
    assert line == "--vary: training.pure_bf16: pure_bf16 needs mixed_precision: bf16; set mixed_precision: bf16, or " \
        "pure_bf16: false"  # fmt: skip
    two = refused(recipe, "training.seed=x", "training.learning_rate=0")
    assert {line.split(": ")[1] for line in two} == {"training.seed", "training.learning_rate"}


def test_a_mistake_at_a_line_of_the_recipe_says_with_which_settings(recipe: Path) -> None:
    content = json.loads(recipe.read_text("utf-8"))
    (line,) = refused(recipe, "quantization={load_in_4bit: true}")
    assert line.startswith("--vary: quantization: quantised weights cannot be trained; ")
    changed = content | {"quantization": {"load_in_4bit": True}, "lora": {"r": 4}}
    write_recipe(recipe.parent, changed)
    (line,) = refused(recipe, "lora=null,{r: 4}")
    assert line.startswith(f"--vary: {recipe}:1:")
    assert line.endswith("(with lora=null)")


@pytest.mark.parametrize(
    ("vary", "strategies", "words"),
    [
        (["output_dir=a,b"], None, "output_dir: is the same in every row of a comparison; name the folder by -o"),
        (["training.max_steps=1,2"], None, "name the steps by --steps"),
        (["seed"], None, "seed: is not key=A,B"),
        (["=1"], None, "is not key=A,B"),
        (["training.seed= , "], None, "training.seed: has no value"),
        ([], " , ", "--strategies"),
        (["training.seed=1", "training.seed=2"], None, "varied twice"),
        (["strategy=ddp"], "zero1", "varied twice"),
    ],
)
def test_an_option_that_means_nothing(vary: list[str], strategies: str | None, words: str) -> None:
    with pytest.raises(FinetuneError) as caught:
        rows_of_options(vary, strategies)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "training.max_steps=5",
            "training.max_steps: is the same in every row of a comparison; name the steps by --steps",
        ),
        ("training={max_steps: 5}", "training.max_steps: is the same in every row"),
        ("save_steps=7", "save_steps: is the same in every row of a comparison; leave it out"),
        ("training.resume=never", "training.resume: is the same in every row"),
    ],
)
def test_an_override_that_a_comparison_would_not_obey_is_refused(override: str, words: str, recipe: Path) -> None:
    with pytest.raises(FinetuneError, match=f"^command line: {re.escape(words)}"):
        check_compared(recipe, [override], rows_of_options([], "ddp"), 2)


def test_overrides_that_a_comparison_obeys_are_taken(recipe: Path, tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path}/other", "training.learning_rate=1e-4"]
    planned = plan_comparison(recipe, words, rows_of_options([], "ddp"), steps=2, processes=None, folder=None)
    assert planned.folder == tmp_path / "other_compare"
    assert planned.rows[0].recipe.training.learning_rate == 1e-4


def test_two_strategies_of_one_file_name_have_a_folder_each(recipe: Path, tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        paths.append(tmp_path / name / "mine.yaml")
        paths[-1].parent.mkdir()
        paths[-1].write_text("distributed_type: MULTI_GPU\n", "utf-8")
    rows = checked(recipe, strategies=",".join(map(str, paths)))
    assert [row.folder for row in rows] == ["mine", "mine-2"]


def test_a_job_is_launched_with_its_row_s_settings(recipe: Path, tmp_path: Path) -> None:
    asked = rows_of_options(["strategy=ddp,single", "training.warmup_steps=1,50"], None)
    planned = plan_comparison(recipe, ["training.seed=7"], asked, steps=4, processes=None, folder=tmp_path / "c")
    assert planned.varied == ("accelerate_config", "training.warmup_steps")
    for row, words in zip(planned.rows, [job_command(planned, row) for row in planned.rows], strict=True):
        assert "training.seed=7" in words
        assert f"accelerate_config={row.strategy}" in words
        assert f"output_dir={tmp_path}/c/jobs/{row.folder}" in words
        last = [word for word in words if word.startswith("training.warmup_steps=")][-1]
        assert last == f"training.warmup_steps={min(4, int(row.name.rpartition('=')[2]))}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vary", "training.sead=1"], "--vary: training.sead: is unknown; did you mean training.seed?"),
        (["--rows", "r.yaml"], "--rows: files of rows are gone; write --vary KEY=A,B"),
        (["--lecture", "memory"], "--lecture: the lectures moved; in a checkout, run `python -m lectures memory`"),
    ],
)
def test_the_command_refuses_before_a_job(
    words: list[str], message: str, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a job was started"))
    assert main(["compare", str(recipe), *words]) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.slow
def test_a_product_and_a_row_that_is_refused_where_it_runs(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "compared"
    vary = ["--vary", "strategy=ddp,hsdp", "--vary", "training.mixed_precision=no,bf16"]
    assert main(["compare", str(recipe), *vary, "--steps", "2", "-o", str(folder)]) == 0
    written: dict[str, Any] = json.loads((folder / "compare.json").read_text("utf-8"))
    assert written["varied"] == ["accelerate_config", "training.mixed_precision"]
    assert [row["ok"] for row in written["rows"]] == [True, True, False, False]
    assert [row["mixed_precision"] for row in written["rows"]] == ["no", "bf16", "no", "bf16"]
    assert written["rows"][1]["settings"] == {"accelerate_config": "ddp", "training.mixed_precision": "bf16"}
    assert [group["rows"] for group in written["losses"]["groups"]] == [
        ["ddp mixed_precision=no"], ["ddp mixed_precision=bf16"],
    ]  # fmt: skip
    text = " ".join(capfd.readouterr().out.split())
    assert "hsdp mixed_precision=no: did not run: " in text
    assert "Final training loss, the lowest first" in text
