"""Every file of recipes/ is one page, passes `finetune check`, and is what an editor holds to be valid."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from finetune.cli.main import main
from finetune.cli.recipe_list import method_of
from finetune.closed_form.recomputation import choose_recomputation
from finetune.data.rows import check_rows
from finetune.model.known_configs import config_if_known
from finetune.recipe.gpus import gpus_of
from finetune.recipe.loader import load_recipe
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Budget, Data, Recipe
from finetune.recipe.sections.preferences import Dpo
from finetune.recipe.strategy import read_strategy
from finetune.recipe.strategy_fit import pages_problem, unfit
from tests.support.memory.memory_arithmetic import GB, disk_bytes, host_bytes, host_bytes_at_save
from tests.support.models.model_shapes import shape_of
from tests.support.runs.recipe_plans import NAME, with_plan
from tests.support.runs.recipe_results import known

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SCHEMA = ROOT / "finetune" / "recipe.schema.json"
COUNT = 61
SCHEME = re.compile(
    r"(?P<family>llama3|qwen3(?:\.5)?|mistral|smollm[23]|gemma3|phi4|gpt_oss)(?:_(?P<size>[\d.]+[bm])(?:_(?P<active>a\d+b))?)?"
    r"_(?P<method>full|lora|qlora|int8)"
    r"(?:_(?P<task>apo|chat|classes|code|dpo|gsm8k|korean|kto|long|math|reasoning|sql|text|tools|tulu))?(?:_(?P<strategy>1f1b|[a-z]+\d?(?:_[a-z]+)*?))?"
    r"_(?:(?:(?P<nodes>\d)x)?(?P<gpus>\d)x(?P<gb>\d+)gb|cpu)"
)
# Named after what they show: method and strategy.
PLAIN = {
    "quickstart": ("lora", "single"),
    "smollm2_hub": ("lora", "single"),
    "llama3_ddp": ("lora", "ddp"),
    "llama3_8b_lora_2x24gb": ("lora", "ddp"),
    "llama3_8b_qlora_2x24gb": ("qlora", "ddp"),
    "llama3_fsdp": ("lora", "fsdp2"),
    "llama3_zero2": ("full", "zero2"),
    "llama3_zero3": ("full", "zero3"),
    "llama3_zero3_offload": ("full", "zero3_offload"),
    "llama3_zero3_nvme": ("full", "zero3_nvme"),
    "llama3_qlora": ("qlora", "single"),
    "llama3_full": ("full", "fsdp2"),
}
# GPUs, GB of one, nodes: the budgets that there is a recipe for.
BUDGETS = {(0, 0, 1), (1, 8, 1), (1, 16, 1), (1, 24, 1), (1, 32, 1), (1, 48, 1), (1, 80, 1), (1, 141, 1)}
BUDGETS |= {(2, 12, 1), (2, 24, 1), (4, 24, 1), (2, 80, 1), (8, 80, 1), (2, 24, 2), (8, 80, 2)}
LLAMAS = {
    "Llama-3.2-1B",
    "Llama-3.2-3B",
    "Llama-3.2-1B-Instruct",
    "Llama-3.2-3B-Instruct",
    "Llama-3.1-8B-Instruct",
    "Llama-3.3-70B-Instruct",
}
FAMILIES = {"llama3", "qwen3", "qwen3.5", "mistral", "smollm2", "smollm3", "gemma3", "phi4", "gpt", "quickstart"}
NO_SIZE = ("microsoft/phi-4",)  # in the model's name
PUBLISHED = {"llama3_3b_lora_gsm8k_1x24gb", "llama3_1b_lora_tulu_1x24gb"}  # whose batch is that of a published result
SPARE = 0.1  # of a GPU's memory, for fragmentation and what the plan leaves out
LEAST = 0.4  # of a GPU's memory: a budget that is emptier is that of another recipe


def test_every_recipe_is_seen() -> None:
    assert len(RECIPES) == COUNT
    assert len(list((ROOT / "recipes").iterdir())) == COUNT, "something in recipes/ is not a .yaml file"
    assert {file.stem for file in RECIPES} >= set(PLAIN)


def test_every_budget_and_model_has_a_recipe() -> None:
    budgets = [recipe_of(file).budget for file in RECIPES]
    assert {(budget.gpus, budget.gpu_memory_gb, budget.nodes) for budget in budgets} >= BUDGETS
    llamas = [recipe_of(file) for file in RECIPES if file.stem.startswith("llama3")]
    assert {recipe.model.name_or_path.rpartition("/")[2] for recipe in llamas} == LLAMAS
    assert {file.stem.split("_")[0] for file in RECIPES} == FAMILIES


def test_every_kind_has_a_recipe() -> None:
    """Of strategy, optimizer, quantised base, precision and checkpointing."""
    recipes = [recipe_of(file) for file in RECIPES]
    configs = {file.stem for file in (ROOT / "accelerate_configs").glob("*.yaml")}
    without = {"cpu_2proc", "zero1"}  # ranks on a CPU; ZeRO-2 with more memory and the same traffic
    without |= {"gpipe", "naive"}  # 1F1B with more memory, and what it is compared with
    without |= {"interleaved_1f1b", "gpipe_ddp2", "1f1b_ddp2"}  # for more GPUs than a recipe here has
    assert {recipe.accelerate_config for recipe in recipes} == configs - without
    paged = {"adamw_8bit"}  # the recipes with 8-bit moments have them in pages
    assert {recipe.training.optim for recipe in recipes} == set(OPTIMIZERS) - paged
    assert {method_of(recipe) for recipe in recipes} == {"full", "lora", "qlora", "int8"}
    assert {recipe.training.mixed_precision for recipe in recipes if recipe.budget.gpus} == {"bf16", "fp16"}
    assert {recipe.training.pure_bf16 for recipe in recipes} == {False, True}
    assert {recipe.training.activation_checkpointing for recipe in recipes} == {False, True, "auto"}
    assert any(
        choose_recomputation(each, config_if_known(each.model), gpus_of(each.budget)).facts.get("runs") == 2
        for each in recipes
    )
    quantised = {recipe.quantization.bnb_4bit_quant_storage for recipe in recipes if recipe.quantization}
    assert quantised == {"uint8", "bfloat16"}
    preferences = [recipe.preferences for recipe in recipes if recipe.preferences is not None]
    assert {section.loss_type for section in preferences if isinstance(section, Dpo)} == {"sigmoid", "apo_zero"}
    assert {recipe.training.objective for recipe in recipes} == {"supervised", "dpo", "kto"}


def test_the_arithmetic_knows_the_models() -> None:
    """Published numbers of weights, and peft's count of rank-16 adapters on all linear layers of the 8B model."""
    shapes = {name: shape_of(load_recipe(ROOT / "recipes" / f"{name}.yaml").recipe) for name in ONE_OF_EACH}
    assert {name: shape.total for name, shape in shapes.items()} == ONE_OF_EACH
    assert shapes["llama3_8b_lora_1x24gb"].adapters(16) == 41_943_040


ONE_OF_EACH = {
    "llama3_1b_lora_1x8gb": 1_235_814_400,
    "llama3_3b_lora_1x16gb": 3_212_749_824,
    "llama3_8b_lora_1x24gb": 8_030_261_248,
    "llama3_70b_qlora_1x80gb": 70_553_706_496,
    "mistral_7b_lora_1x24gb": 7_248_023_552,
    "smollm2_135m_full_cpu": 134_515_008,
    "smollm2_1.7b_lora_1x8gb": 1_711_376_384,
    "phi4_qlora_math_1x24gb": 14_659_507_200,
}
# Of text parts, with the norms, biases and convolutions that the arithmetic leaves out.
NEARLY = {
    "gemma3_12b_qlora_1x24gb": 11_765_788_416,
    "gpt_oss_20b_lora_reasoning_1x80gb": 20_914_757_184,
    "qwen3_30b_a3b_lora_code_1x80gb": 30_532_122_624,
    "qwen3.5_4b_lora_reasoning_1x24gb": 4_205_751_296,
}


def test_the_arithmetic_nearly_knows_the_others() -> None:
    shapes = {name: shape_of(load_recipe(ROOT / "recipes" / f"{name}.yaml").recipe) for name in NEARLY}
    assert {name: shape.total for name, shape in shapes.items()} == pytest.approx(NEARLY, rel=1e-3)
    assert all(shape.total < NEARLY[name] for name, shape in shapes.items())


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
class TestRecipe:
    def test_is_one_page_with_a_header(self, file: Path) -> None:
        lines = file.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 40
        assert max(map(len, lines)) <= 120
        assert lines[0] == "# yaml-language-server: $schema=../finetune/recipe.schema.json"
        assert lines[1].startswith("# ")
        assert len(lines[1]) <= 98, "a purpose fits into the table of finetune list"

    def test_is_what_its_name_says(self, file: Path) -> None:
        recipe = recipe_of(file)
        if file.stem in PLAIN:
            assert (method_of(recipe), recipe.accelerate_config) == PLAIN[file.stem]
            return
        named = SCHEME.fullmatch(file.stem)
        assert named is not None, "family_size_method[_strategy]_NxGBgb"
        model = recipe.model.name_or_path.removeprefix("package:llm-").rpartition("/")[2].lower()
        model = {"smollm2": "smollm2-135m"}.get(model, model)
        assert model.replace("-", "").startswith(named["family"].replace("_", ""))
        assert (named["size"] or "phi") in model.split("-")
        assert (named["size"] is None) == (recipe.model.name_or_path in NO_SIZE)
        assert re.findall(r"(?<=-)a\d+b", model) == [part for part in [named["active"]] if part]
        assert named["method"] == method_of(recipe)
        assert (named["strategy"] or "single") == recipe.accelerate_config
        budget = Budget(
            gpus=int(named["gpus"] or 0), gpu_memory_gb=float(named["gb"] or 0), nodes=int(named["nodes"] or 1)
        )
        assert recipe.budget == budget

    def test_launches_by_the_line_in_its_header(self, file: Path) -> None:
        budget, words = recipe_of(file).budget, launch_line(file)
        assert words[:2] == ["accelerate", "launch"]
        arguments = launch_command_parser().parse_args(words[2:])
        assert arguments.training_script == "finetune/train.py"
        assert arguments.training_script_args == [f"recipes/{file.name}"]
        ranks = max(1, budget.gpus * budget.nodes)
        assert arguments.num_processes in ([ranks] if budget.gpus else [1, None])
        assert arguments.multi_gpu == (ranks > 1)
        assert (arguments.num_machines or 1) == budget.nodes
        assert (arguments.main_process_ip is not None) == (budget.nodes > 1)

    def test_is_a_combination_that_this_code_carries(self, file: Path) -> None:
        recipe = recipe_of(file)
        strategy = read_strategy(recipe.accelerate_config)
        assert list(unfit(recipe, strategy)) == []
        assert recipe.budget.gpus or pages_problem(recipe) == ""
        if (recipe.budget.gpus, recipe.budget.gpu_memory_gb) == (1, 16):  # a T4: no bfloat16, no flash attention
            assert recipe.training.mixed_precision == "fp16"
            assert (recipe.model.dtype, recipe.model.attention) == ("float16", "sdpa")

    def test_states_its_plan_and_fits(self, file: Path) -> None:
        """Else: python benchmarks/plan_recipes.py --table"""
        if file.stem == "quickstart":
            return  # measured: see its header
        recipe, header, row = recipe_of(file), header_of(file), known(NAME)[file.stem]
        text = file.read_text("utf-8")
        assert with_plan(text, row) == text
        assert f"{row['needed_bytes'] / GB:.1f} GB planned" in header
        if recipe.budget.gpus:
            assert f" planned of {recipe.budget.gpu_memory_gb:g} (" in header
            assert LEAST <= row["needed_bytes"] / (GB * recipe.budget.gpu_memory_gb) <= 1 - SPARE
        for what, size in {"Host": host_bytes(recipe), "disk": disk_bytes(recipe)}.items():
            assert not size or f"{what}: about {size / GB:.0f} GB" in header
        if host_bytes_at_save(recipe) > host_bytes(recipe):
            assert f", {host_bytes_at_save(recipe) / GB:.0f} while a checkpoint is written" in header

    def test_a_step_is_of_about_32_thousand_tokens(self, file: Path) -> None:
        """More only where one micro-batch on every GPU is more: else some thousand rows are a handful of steps."""
        if file.stem in PUBLISHED:
            return
        recipe = recipe_of(file)
        training, ranks = recipe.training, max(1, recipe.budget.gpus * recipe.budget.nodes)
        if training.objective != "supervised":  # published runs take 16 to 128 pairs, whatever their length
            assert training.global_batch_size in (16, 32)
            return
        at_once = ranks * training.per_device_batch_size
        assert training.global_batch_size * recipe.data.max_length <= 32_768 or training.global_batch_size == at_once
        if recipe.budget.gpus:
            assert training.global_batch_size * recipe.data.max_length >= 30_000

    def test_passes_check(
        self, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(ROOT)  # data_files are relative to the working folder
        if adapter := recipe_of(file).model.adapter:
            monkeypatch.chdir(tmp_path)
            assert main(["check", str(file)]) == 2
            assert f"train recipes/{Path(adapter).parent.name}.yaml first" in " ".join(capsys.readouterr().err.split())
            write_adapter_of(ROOT / "recipes" / f"{Path(adapter).parent.name}.yaml", tmp_path / adapter)
        assert main(["check", str(file)]) == 0
        assert capsys.readouterr().err == ""

    @pytest.mark.sample(3, thorough=12)
    def test_is_valid_by_the_schema(self, file: Path) -> None:
        schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
        written = yaml.safe_load(file.read_text(encoding="utf-8"))
        _numbers_that_yaml_takes_for_text(written)
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.Draft202012Validator(schema).validate(written)

    def test_budget_strategy_and_sample_fit_together(self, file: Path) -> None:
        recipe: Recipe = recipe_of(file)
        strategy = read_strategy(recipe.accelerate_config)
        alone = recipe.budget.gpus * recipe.budget.nodes <= 1
        assert (strategy.kind == "single") == (alone and not strategy.offloaded)
        ranks = max(1, recipe.budget.gpus * recipe.budget.nodes)
        chosen = choose_recomputation(recipe, config_if_known(recipe.model), gpus_of(recipe.budget)).recipe
        assert recipe.training.global_batch_size % (ranks * chosen.training.rows_at_once) == 0
        assert not recipe.budget.gpus or not any(entry.data_files for entry in recipe.data.sets), "rows of the Hub"
        for entry in recipe.data.train:
            files = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files or []
            assert all((ROOT / name).is_file() for name in files)


@cache
def recipe_of(file: Path) -> Recipe:
    return load_recipe(file).recipe


def write_adapter_of(file: Path, folder: Path) -> None:
    """The configuration that a recipe's run exports with its adapter, and no weights."""
    recipe = recipe_of(file)
    assert recipe.lora is not None
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": recipe.lora.r, "lora_alpha": recipe.lora.lora_alpha}
    (folder / "adapter_config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "adapter_model.safetensors").touch()


def header_of(file: Path) -> str:
    """The comments above the recipe as one text."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    return " ".join(line.lstrip("# ") for line in lines)


def launch_line(file: Path) -> list[str]:
    """The words of the header's command, on the first node."""
    lines = file.read_text(encoding="utf-8").splitlines()
    first = next(index for index, line in enumerate(lines) if "accelerate launch" in line)
    command = lines[first][lines[first].index("accelerate launch") :]
    while command.endswith("\\"):
        first += 1
        command = command[:-1] + lines[first].lstrip("#")
    return shlex.split(command.replace("--machine_rank R", "--machine_rank 0"))


def _numbers_that_yaml_takes_for_text(written: dict[str, object]) -> None:
    """PyYAML reads `2e-4` as text; editors, by YAML 1.2, and our loader read a number."""
    training = written.get("training", {})
    assert isinstance(training, dict)
    for key, value in training.items():
        if isinstance(value, str) and value[:1].isdigit():
            training[key] = float(value)


def test_the_schema_refuses_what_we_refuse() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    good = {"model": {"name_or_path": "x"}, "data": {"train": [{"path": "json"}]}}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(good)
    bad = [
        {**good, "learning_rte": 1},
        {**good, "training": {"learning_rate": "high"}},
        {**good, "training": {"global_batch_size": 0}},
        {"model": {"name_or_path": "x"}},
        {"model": {"name_or_path": "x"}, "data": {"train": []}},
    ]
    assert [validator.is_valid(case) for case in bad] == [False] * 5


def test_the_sample_chat_is_right_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sample = {"path": "json", "data_files": "data/sample_chat.jsonl"}
    counts = check_rows(Data.model_validate({"train": [sample]}))
    assert counts == {"data/sample_chat.jsonl": 42}
