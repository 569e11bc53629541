"""Files that Accelerate's own writer makes: by both routes a file that means the same is taken, and any other refused
with a remedy that works.

The routes are `accelerate_config=FILE` and `accelerate launch --config_file FILE`.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config import config_args
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.config.default import write_basic_config

from finetune.cli.main import main
from finetune.errors import FinetuneError, RecipeError
from finetune.launch.launcher import Launch
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import read_strategy
from finetune.strategies import zero_requirements
from tests.support.runs.launching import ALONE, check_launch
from tests.support.runs.recipes import least, least_recipe, merged, write_recipe

# What `accelerate config` writes for each answer (accelerate/commands/config/cluster.py).
MACHINE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "mixed_precision": "no",
    "use_cpu": False,
    "debug": False,
    "num_processes": 2,
    "main_training_function": "main",
    "downcast_bf16": "no",
    "same_network": True,
    "rdzv_backend": "static",
}
TWO_MACHINES = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
FSDP2: dict[str, Any] = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_activation_checkpointing": False,
}
FSDP1: dict[str, Any] = FSDP2 | {
    "fsdp_version": 1,
    "fsdp_reshard_after_forward": "FULL_SHARD",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True,
    "fsdp_sync_module_states": True,
}
ZERO2: dict[str, Any] = {
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "gradient_accumulation_steps": 1,
    "zero3_init_flag": False,
}
ZERO1 = {"zero_stage": 1, "gradient_accumulation_steps": 1, "zero3_init_flag": False}
ZERO3 = ZERO2 | {"zero_stage": 3, "zero3_init_flag": True, "zero3_save_16bit_model": False}
DYNAMO = {
    "dynamo_backend": "INDUCTOR",
    "dynamo_mode": "default",
    "dynamo_use_fullgraph": False,
    "dynamo_use_dynamic": False,
    "dynamo_use_regional_compilation": False,
}


def fsdp(section: dict[str, Any] = FSDP2, **top: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "fsdp_config": section, **top}


def zero(section: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": section, **top}


def mesh(**sizes: int) -> dict[str, Any]:
    return {f"parallelism_config_{name}_size": size for name, size in sizes.items()}


@dataclass(frozen=True)
class Case:
    """A file, and the shipped strategy or strategies that mean the same; with a recipe that says so, if it has to."""

    file: dict[str, Any]
    same_as: str
    ranks: int = 2
    recipe: dict[str, Any] = field(default_factory=dict)
    nodes: int = 1


def bf16(**changes: Any) -> dict[str, Any]:
    return {"training": {"mixed_precision": "bf16", **changes}}


ACCEPTED = {
    "no": Case({"distributed_type": "NO", "num_processes": 1}, "single", ranks=1),
    "multi-GPU": Case({"distributed_type": "MULTI_GPU"}, "ddp"),
    "multi-GPU, bf16": Case({"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}, "ddp", recipe=bf16()),
    "two machines": Case({"distributed_type": "MULTI_GPU", **TWO_MACHINES}, "ddp", nodes=2),
    "fsdp2": Case(fsdp(), "fsdp2"),
    "fsdp2, no class": Case(
        fsdp({k: v for k, v in FSDP2.items() if k != "fsdp_transformer_layer_cls_to_wrap"}), "fsdp2"
    ),
    "fsdp2, bf16": Case(fsdp(mixed_precision="bf16"), "fsdp2", recipe=bf16()),
    "fsdp2, kept gathered": Case(fsdp(FSDP2 | {"fsdp_reshard_after_forward": False}), "fsdp2_grad_op"),
    "fsdp2, offload": Case(fsdp(FSDP2 | {"fsdp_offload_params": True}), "fsdp2_offload"),
    "fsdp2, checkpointing as the recipe": Case(
        fsdp(FSDP2 | {"fsdp_activation_checkpointing": True}),
        "fsdp2",
        recipe={"training": {"mixed_precision": "no", "activation_checkpointing": True}},
    ),
    "fsdp2, two copies": Case(
        fsdp(parallelism_config=mesh(dp_replicate=2, dp_shard=2, tp=1, cp=1), num_processes=4), "hsdp", ranks=4, nodes=2
    ),
    "fsdp2, a mesh without copies": Case(
        fsdp(parallelism_config=mesh(dp_replicate=1, dp_shard=2, tp=1, cp=1)), "fsdp2"
    ),
    "fsdp2, two machines": Case(fsdp(**TWO_MACHINES), "fsdp2", nodes=2),
    "zero1": Case(zero(ZERO1), "zero1"),
    "zero2": Case(zero(ZERO2), "zero2"),
    "zero2, clipping as the recipe": Case(zero(ZERO2 | {"gradient_clipping": 1.0}), "zero2"),
    "zero2, offload": Case(zero(ZERO2 | {"offload_optimizer_device": "cpu"}), "zero2_offload"),
    "zero3": Case(zero(ZERO3), "zero3"),
    "zero3, bf16": Case(zero(ZERO3, mixed_precision="bf16"), "zero3", recipe=bf16()),
    "zero3, offload": Case(
        zero(ZERO3 | {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}), "zero3_offload"
    ),
    "zero3, two machines": Case(
        zero(ZERO3 | {"deepspeed_multinode_launcher": "standard"}, **TWO_MACHINES), "zero3", nodes=2
    ),
    "no fp8 nor compiling": Case(
        {"distributed_type": "MULTI_GPU", "fp8_config": {}, "dynamo_config": {"dynamo_backend": "NO"}}, "ddp"
    ),
}


def follow(file: dict[str, Any], remedies: dict[str, Any]) -> None:
    """Do what the remedies say: set a key to a value, or remove it (None)."""
    for place, value in remedies.items():
        *above, key = place.split(".")
        section = file[above[0]] if above else file
        if callable(value):
            value(file)
        elif value is None:
            section.pop(key)
        else:
            section[key] = value


def plain_ranks(file: dict[str, Any]) -> None:
    follow(file, {"distributed_type": "MULTI_GPU", "fsdp_config": None})


# The file; the key of each mistake, and the value that mends it (None: remove it); the strategy
# that the file then means.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another precision": (
        {"distributed_type": "MULTI_GPU", "mixed_precision": "fp16"},
        {"mixed_precision": None},
        "ddp",
    ),
    "fp8": (
        {"distributed_type": "MULTI_GPU", "mixed_precision": "fp8", "fp8_config": {"backend": "TE", "margin": 0}},
        {"mixed_precision": None, "fp8_config": None},
        "ddp",
    ),
    "dynamo": (
        {"distributed_type": "MULTI_GPU", "dynamo_config": DYNAMO},
        {"dynamo_config.dynamo_backend": "no"},
        "ddp",
    ),
    "fsdp1": (fsdp(FSDP1), {"fsdp_config.fsdp_version": 2}, "fsdp2"),
    "fsdp1, other answers": (
        fsdp(
            FSDP1
            | {
                "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
                "fsdp_state_dict_type": "FULL_STATE_DICT",
                "fsdp_backward_prefetch": "NO_PREFETCH",
                "fsdp_forward_prefetch": True,
                "fsdp_use_orig_params": False,
                "fsdp_cpu_ram_efficient_loading": False,
                "fsdp_sync_module_states": False,
            }
        ),
        {
            "fsdp_config.fsdp_version": 2,
            "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_config.fsdp_backward_prefetch": None,
            "fsdp_config.fsdp_forward_prefetch": None,
            "fsdp_config.fsdp_use_orig_params": True,
            "fsdp_config.fsdp_cpu_ram_efficient_loading": True,
            "fsdp_config.fsdp_sync_module_states": True,
        },
        "fsdp2_grad_op",
    ),
    "fsdp1, not sharded": (
        fsdp(FSDP1 | {"fsdp_version": 2, "fsdp_reshard_after_forward": "NO_SHARD"}),
        {"fsdp_config.fsdp_reshard_after_forward": plain_ranks},
        "ddp",
    ),
    "fsdp2 by size": (
        fsdp(FSDP2 | {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 10**8}),
        {"fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_config.fsdp_min_num_params": None},
        "fsdp2",
    ),
    "fsdp2, several classes": (
        fsdp(FSDP2 | {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,LlamaMLP"}),
        {"fsdp_config.fsdp_transformer_layer_cls_to_wrap": None},
        "fsdp2",
    ),
    "tensor parallel": (
        fsdp(parallelism_config=mesh(dp_replicate=1, dp_shard=1, tp=2, cp=1)),
        {
            "parallelism_config.parallelism_config_tp_size": 1,
            "parallelism_config.parallelism_config_dp_shard_size": None,
        },
        "fsdp2",
    ),
    "zero2, other clipping": (
        zero(ZERO2 | {"gradient_clipping": 0.5}),
        {"deepspeed_config.gradient_clipping": None},
        "zero2",
    ),
    "zero2, the default clipping beside another": (
        zero(ZERO2 | {"gradient_clipping": 0}),
        {"deepspeed_config.gradient_clipping": None},
        "zero2",
    ),
    "zero2, accumulation": (
        zero(ZERO2 | {"gradient_accumulation_steps": 4}),
        {"deepspeed_config.gradient_accumulation_steps": None},
        "zero2",
    ),
    "zero3, saved by DeepSpeed": (
        zero(ZERO3 | {"zero3_save_16bit_model": True}),
        {"deepspeed_config.zero3_save_16bit_model": False},
        "zero3",
    ),
    "zero3 by pdsh": (
        zero(ZERO3 | {"deepspeed_multinode_launcher": "pdsh", "deepspeed_hostfile": "/hosts"}),
        {"deepspeed_config.deepspeed_multinode_launcher": "standard", "deepspeed_config.deepspeed_hostfile": None},
        "zero3",
    ),
    "DeepSpeed's own file": (
        zero({"deepspeed_config_file": "zero.json", "zero3_init_flag": True}),
        {"deepspeed_config.deepspeed_config_file": None, "deepspeed_config.zero_stage": 3},
        "zero3",
    ),
}


def test_how_many_files() -> None:
    assert len(ACCEPTED) + len(REFUSED) == 37


def written(file: dict[str, Any], path: Path) -> Path:
    """By the writer of `accelerate config`."""
    ClusterConfig(**copy.deepcopy(MACHINE | file)).to_yaml_file(str(path))
    return path


@pytest.fixture(autouse=True)
def no_default_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config_args, "default_config_file", str(tmp_path / "none.yaml"))


def recipe_with(strategy: str, changes: dict[str, Any]) -> Recipe:
    precision: dict[str, Any] = {"training": {"mixed_precision": "no"}}
    return least_recipe(**merged({"lora": None, "accelerate_config": strategy}, changes or precision))


def launch_of(case: Case, config: Path | None) -> Launch:
    local = case.ranks // case.nodes
    return replace(ALONE, world_size=case.ranks, local_world_size=local, on_cpu=True, config_file=config)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is built from these settings, so DeepSpeed's extension is not compiled for them: 80 s of CPU."""
    monkeypatch.setattr(zero_requirements, "compile_ahead", lambda *asked: None)


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_file_that_means_the_same_is_taken_by_both_routes(name: str, tmp_path: Path) -> None:
    case = ACCEPTED[name]
    file = written(case.file, tmp_path / "mine.yaml")
    shipped = read_strategy(case.same_as)
    ranks = (case.ranks, case.ranks // case.nodes)
    by_recipe = recipe_with(str(file), case.recipe)
    mine = check_launch(by_recipe, launch_of(case, None))
    assert mine.kind == shipped.kind
    assert mine.plugin_settings(*ranks) == shipped.plugin_settings(*ranks)
    check_launch(recipe_with(case.same_as, case.recipe), launch_of(case, file))
    check_launch(by_recipe, launch_of(case, file))
    check_launch(by_recipe, launch_of(case, shipped.path))


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_is_refused_and_its_remedies_work(name: str, tmp_path: Path) -> None:
    content, remedies, same_as = REFUSED[name]
    file = written(content, tmp_path / "mine.yaml")
    case = Case(content, same_as)
    by_file, by_launcher = (str(file), None), (same_as, file)
    for strategy, config in (by_file, by_launcher):
        route = "--config_file" if config else "accelerate_config"
        with pytest.raises(FinetuneError) as caught:
            check_launch(recipe_with(strategy, {}), launch_of(case, config))
        if isinstance(caught.value, RecipeError):
            assert len(caught.value.mistakes) == len(remedies), caught.value.mistakes
            for key in remedies:
                (line,) = (line for line in caught.value.mistakes if f": {key}: " in line)
                assert line.startswith(f"{route}: {file}:")
        else:  # another kind of strategy: the message says how to launch the recipe's own
            assert name == "fsdp1, not sharded"
            assert "set accelerate_config=" not in str(caught.value), "it would be refused"
            (other,) = re.findall(r"launch with --config_file (\S+)", str(caught.value))
            check_launch(recipe_with(strategy, {}), launch_of(case, Path(other)))
    changed = yaml.safe_load(file.read_text())
    follow(changed, remedies)
    file.write_text(yaml.safe_dump(changed))
    load_config_from_file(str(file))  # Accelerate takes it too
    for strategy, config in (by_file, by_launcher):
        check_launch(recipe_with(strategy, {}), launch_of(case, config))


@pytest.mark.parametrize("stray", [False, True])
@pytest.mark.parametrize(("mine", "recipes"), [("zero2", "zero3"), ("fsdp2, offload", "fsdp2"), ("multi-GPU", "fsdp2")])
def test_each_remedy_of_another_strategy_works(
    mine: str, recipes: str, stray: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ACCEPTED[mine]
    file = written(case.file, tmp_path / "mine.yaml")
    launch = launch_of(case, None if stray else file)
    if stray:
        monkeypatch.setattr(config_args, "default_config_file", str(file))
    with pytest.raises(FinetuneError) as caught:
        check_launch(recipe_with(recipes, {}), launch)
    (other,) = re.findall(r"--config_file (\S+?)(?:,|$)", str(caught.value))
    check_launch(recipe_with(recipes, {}), replace(launch, config_file=Path(other)))
    named = re.findall(r"set accelerate_config=(\S+)$", str(caught.value))
    assert len(named) == (not stray)
    for strategy in named:
        check_launch(recipe_with(strategy, {}), launch)
    if stray:
        assert f"move {file} away" in str(caught.value)
        file.unlink()
        check_launch(recipe_with(recipes, {}), launch)


@pytest.mark.parametrize(
    "name", ["another precision", "zero2, other clipping", "zero2, the default clipping beside another"]
)
def test_the_other_remedy_works_too(name: str, tmp_path: Path) -> None:
    """`remove the line, or set training.x=y`: the recipe may follow the file."""
    content, _, same_as = REFUSED[name]
    file = written(content, tmp_path / "mine.yaml")
    recipe = write_recipe(tmp_path, merged(least("a/b"), {"accelerate_config": str(file), "lora": None}))
    words = ["check", str(recipe), "training.mixed_precision=no"]
    assert main(words) == 2
    with pytest.raises(RecipeError) as caught:
        check_launch(recipe_with(str(file), {}), launch_of(Case(content, same_as), None))
    (setting,) = re.findall(r"or set (training\.\S+)$", str(caught.value))
    assert main([*words, setting]) == 0


@pytest.mark.parametrize("as_json", [True, False])
def test_the_default_file(as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate config default` writes JSON, into a file that may end in .yaml."""
    file = tmp_path / f"default.{'json' if as_json else 'yaml'}"
    assert write_basic_config(save_location=str(file)) == file
    assert check_launch(recipe_with(str(file), {}), ALONE).kind == "single"
    assert check_launch(recipe_with("single", {}), replace(ALONE, config_file=file)).kind == "single"
    monkeypatch.setattr(config_args, "default_config_file", str(file))
    assert check_launch(recipe_with("single", {}), ALONE).kind == "single"


def test_no_precision_leaves_it_to_the_recipe_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written({"distributed_type": "MULTI_GPU"}, tmp_path / "mine.yaml")
    recipe = write_recipe(tmp_path, merged(least("a/b"), {"accelerate_config": str(file), **bf16()}))
    assert main(["check", str(recipe)]) == 0
    assert "mixed_precision: 'no' changes nothing: training.mixed_precision is bf16" in capsys.readouterr().out
    assert main(["check", str(recipe), "training.mixed_precision=no"]) == 0
    assert "changes nothing" not in capsys.readouterr().out


SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "texts of truth": (fsdp(FSDP2 | {"fsdp_offload_params": "False", "fsdp_reshard_after_forward": "true"}), fsdp()),
    "a text of a number": (zero(ZERO2 | {"zero_stage": "2", "gradient_accumulation_steps": "1"}), zero(ZERO2)),
    "without the prefix": (fsdp({key.removeprefix("fsdp_"): value for key, value in FSDP2.items()}), fsdp()),
    "strategies of FSDP1": (fsdp(FSDP2 | {"fsdp_reshard_after_forward": "FULL_SHARD"}), fsdp()),
    "by number": (fsdp(FSDP2 | {"fsdp_reshard_after_forward": 2}), fsdp(FSDP2 | {"fsdp_reshard_after_forward": False})),
    "an older key": (fsdp(FSDP2 | {"fsdp_sharding_strategy": "FULL_SHARD"}), fsdp()),
    "null": (zero(ZERO2 | {"offload_optimizer_device": None, "zero3_init_flag": None}), zero(ZERO2)),
    "no path": (zero(ZERO2 | {"offload_param_nvme_path": "none"}), zero(ZERO2)),
    "a launcher's number": (
        {"distributed_type": "NO", "num_processes": -1},
        {"distributed_type": "NO", "num_processes": None},
    ),
    "a number in quotes": ({"distributed_type": "MULTI_GPU", "num_processes": "2"}, {"distributed_type": "MULTI_GPU"}),
    "capitals": (zero(ZERO2 | {"offload_optimizer_device": "CPU"}), zero(ZERO2 | {"offload_optimizer_device": "cpu"})),
    "a mesh of ones": (fsdp(parallelism_config=mesh(dp_replicate=1)), fsdp()),
    "no mesh": (fsdp(parallelism_config=None), fsdp()),
    "an unquoted no": ({"distributed_type": False, "mixed_precision": False}, {"distributed_type": "NO"}),
    "compiled by nothing": ({"distributed_type": "NO", "dynamo_backend": "NO"}, {"distributed_type": "NO"}),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_one_meaning(name: str, tmp_path: Path) -> None:
    one, other = (tmp_path / "one.yaml", tmp_path / "other.yaml")
    for file, content in zip((one, other), SPELLINGS[name], strict=True):
        file.write_text(yaml.safe_dump(MACHINE | content))
    first, second = read_strategy(str(one)), read_strategy(str(other))
    assert first.plugin_settings(2, 2) == second.plugin_settings(2, 2)
    assert first.num_processes == second.num_processes
    assert (first.kind, first.replicates) == (second.kind, second.replicates)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "not read": (
        {"distributed_type": "MULTI_GPU", "deepspeed_config": ZERO2},
        "no effect under distributed_type: MULTI_GPU",
    ),
    "CPU ranks": ({"distributed_type": "MULTI_CPU"}, "write distributed_type: MULTI_GPU and use_cpu: true"),
    "no number": (zero(ZERO2 | {"zero_stage": "two"}), "'two': one of 1, 2, 3 works"),
    "no truth": (fsdp(FSDP2 | {"fsdp_offload_params": "maybe"}), "'maybe': one of false, true works"),
    "a list": (fsdp(FSDP2 | {"fsdp_version": [2]}), "set fsdp_version: 2"),
    "an old key's other strategy": (
        fsdp(FSDP2 | {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}),
        "FSDP2 takes fsdp_reshard_after_forward, which is false for SHARD_GRAD_OP",
    ),
    "megatron": ({"distributed_type": "MULTI_GPU", "megatron_lm_config": {"megatron_lm_tp_degree": 2}}, "remove it"),
    "misspelt section": ({"distributed_type": "MULTI_GPU", "dynamo_conf": {}}, "did you mean dynamo_config?"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_mistakes(name: str, tmp_path: Path) -> None:
    content, words = OTHERS[name]
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(MACHINE | content))
    with pytest.raises(RecipeError, match=re.escape(words)):
        read_strategy(str(file))


def test_a_sharded_file_for_cpus_says_how_too(tmp_path: Path) -> None:
    """Only a file of plain ranks says where to run and nothing else."""
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(MACHINE | fsdp(use_cpu=True)))
    launch = partial(launch_of, Case({}, "ddp"), file)
    with pytest.raises(FinetuneError, match="the recipe asks for ddp"):
        check_launch(recipe_with("ddp", {}), launch())
    assert check_launch(recipe_with("fsdp2", {}), launch()).kind == "fsdp"


def test_a_mesh_of_another_size_than_the_launch(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    content = MACHINE | fsdp(parallelism_config=mesh(dp_shard=4))
    content.pop("num_processes")
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(FinetuneError, match=r"2 ranks in 1 copy are 2 each; launch 4"):
        check_launch(recipe_with(str(file), {}), launch_of(Case({}, "fsdp2"), None))
    assert check_launch(recipe_with(str(file), {}), launch_of(Case({}, "fsdp2", ranks=4), None)).kind == "fsdp"
