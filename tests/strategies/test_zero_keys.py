"""DeepSpeed's own keys of a strategy file, in the engine: its config, its loss scale, and what a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from finetune.errors import NotFinite
from finetune.measure.phases import Phases
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import read_strategy
from finetune.strategies.accelerator import kind_of_scaling, lowest_scale
from finetune.strategies.zero import DeferredStepEngine, EngineScaler, zero_plugin
from tests.support.models.tiny import flat_batch
from tests.support.runs.one_rank import CPU, OneRank, one_rank
from tests.support.runs.recipes import least_recipe

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")


def fp16_recipe(base: Path, folder: Path, stage: int = 2, **keys: Any) -> Recipe:
    """All weights under fp16, by a strategy file with these keys."""
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage} | keys}))
    training = {"mixed_precision": "fp16", "activation_checkpointing": False}
    place = {"output_dir": str(folder / "run"), "accelerate_config": str(file)}
    return least_recipe(base, lora=None, training=training, **place)


def config_of(recipe: Recipe) -> Any:
    return zero_plugin(recipe, read_strategy(recipe.accelerate_config), world_size=2, on_cpu=False).deepspeed_config


def test_the_engines_config_has_the_files_values(tmp_path: Path) -> None:
    """And where the file names none, the kit's."""
    zero = {"reduce_bucket_size": "5e8", "overlap_comm": False, "sub_group_size": 64}
    others = {"offload_param_device": "cpu", "offload_param_pin_memory": False, "hysteresis": 3}
    config = config_of(fp16_recipe(Path("x"), tmp_path, 3, **zero, **others))
    section = config["zero_optimization"]
    assert [section[key] for key in zero] == [500_000_000, False, 64]
    assert section["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert config["fp16"]["hysteresis"] == 3
    plain = config_of(fp16_recipe(Path("x"), tmp_path, 3, offload_param_device="cpu"))
    assert plain["zero_optimization"]["overlap_comm"] is True
    assert plain["zero_optimization"]["offload_param"]["pin_memory"] is True
    assert "reduce_bucket_size" not in plain["zero_optimization"], "the model decides"
    scaling = {"loss_scale_window": 2000, "hysteresis": 1, "min_loss_scale": 1, "initial_scale_power": 16}
    assert plain["fp16"] == {"enabled": True} | scaling


def scaler_of(*, static: float = 0.0, hysteresis: int = 2, window: int = 3, least: int = 4) -> EngineScaler:
    """Ours over DeepSpeed's own."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    how = {"init_scale": 2.0**8, "scale_window": window, "min_scale": least, "delayed_shift": hysteresis}
    how |= {"consecutive_hysteresis": False}
    own = CreateLossScaler(torch.half, static, dynamic_scaling=not static, dynamic_loss_args=how)
    engine = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=own))
    return EngineScaler(DeferredStepEngine(engine))


def scales(scaler: EngineScaler, overflows: Sequence[bool]) -> list[float]:
    """The scale after each step."""
    found = []
    for overflow in overflows:
        scaler._own.update_scale(overflow)
        found.append(scaler.state_dict()["scale"])
    return found


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's scaler asks who logs."""
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)


# By hand: of two overflows the first uses up the patience; three steps without one, after the first, double the scale.
OVERFLOWS = [True, True, True, False, False, False, False, True, False]
BY_HAND = [256, 128, 64, 64, 64, 64, 128, 128, 128]


@pytest.mark.usefixtures("one_process")
def test_hysteresis_and_window_by_hand() -> None:
    assert scales(scaler_of(), OVERFLOWS) == BY_HAND
    assert scales(scaler_of(hysteresis=1), OVERFLOWS[:3]) == [128, 64, 32]
    assert scales(scaler_of(hysteresis=1), [True] * 9)[-3:] == [4, 4, 4], "min_loss_scale"


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("stop", range(1, len(OVERFLOWS)))
def test_a_resumed_scaler_goes_on_as_if_it_had_not_stopped(stop: int) -> None:
    first, second = scaler_of(), scaler_of()
    begun = scales(first, OVERFLOWS[:stop])
    second.load_state_dict(first.state_dict())
    assert begun + scales(second, OVERFLOWS[stop:]) == BY_HAND


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("stop", range(2, 9))
def test_a_resumed_scale_grows_where_the_run_would_have_grown(stop: int) -> None:
    """After each three steps without an overflow, whenever the run was resumed."""
    overflows = [False, True, *[False] * 7]
    assert scales(scaler_of(), overflows) == [256, 256, 256, 256, 256, 512, 512, 512, 1024]
    first, second = scaler_of(), scaler_of()
    begun = scales(first, overflows[:stop])
    second.load_state_dict(first.state_dict())
    assert begun + scales(second, overflows[stop:]) == scales(scaler_of(), overflows)


@pytest.mark.usefixtures("one_process")
def test_a_static_scale_stays_what_the_file_says() -> None:
    scaler = scaler_of(static=512.0)
    assert scales(scaler, [True, False, True]) == [512, 512, 512]
    scaler.load_state_dict(scaler_of().state_dict())
    assert (scaler.state_dict(), scaler.floor, scaler.static) == ({"scale": 512.0}, 512.0, True)


def test_an_older_checkpoint_has_no_hysteresis() -> None:
    scaler = scaler_of()
    scaler.load_state_dict({"scale": 32.0, "iteration": 7, "overflow": 2})
    assert scaler.state_dict() == {"scale": 32.0, "iteration": 7, "overflow": 2, "hysteresis": 2}


@pytest.mark.slow
def test_a_run_scales_as_its_strategy_file_says(tiny_llama: Path, tmp_path: Path) -> None:
    """A loss times 2**30 overflows: the first overflow is forgiven, the second halves, and below that it ends."""
    keys = {"initial_scale_power": 30, "hysteresis": 2, "min_loss_scale": 2**29}
    with one_rank(fp16_recipe(tiny_llama, tmp_path, **keys)) as rank:
        results = [rank.step([flat_batch()]) for _ in range(2)]
        assert [(result.loss_scale, result.skipped) for result in results] == [(2.0**30, True)] * 2
        with pytest.raises(NotFinite, match="even at a loss scale of"):
            rank.step([flat_batch()])
        assert (kind_of_scaling(rank.accelerator), lowest_scale(rank.accelerator)) == ("dynamic", 2.0**29)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("offload", ["cpu", "none"])
def test_a_dropped_step_leaves_no_gradient_behind(offload: str, tiny_llama: Path, tmp_path: Path) -> None:
    """The step after it has the gradient of its own batch alone."""
    recipe = fp16_recipe(tiny_llama, tmp_path, initial_scale_power=8, offload_optimizer_device=offload)
    with one_rank(recipe) as rank:
        expected = rank.step([flat_batch(seed=1)])
        assert not expected.skipped
    with one_rank(recipe) as rank:
        weight = next(rank.parts.unwrapped_model.parameters())
        spoiling = weight.register_hook(lambda gradient: gradient * torch.inf)
        assert rank.step([flat_batch(seed=0)]).skipped
        spoiling.remove()
        after = rank.step([flat_batch(seed=1)])
        assert (after.skipped, after.loss) == (False, expected.loss)
        assert after.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_static_scale_trains_and_ends_where_it_overflows(stage: int, tiny_llama: Path, tmp_path: Path) -> None:
    with one_rank(fp16_recipe(tiny_llama, tmp_path, stage, loss_scale=512)) as rank:
        losses = [rank.step([flat_batch()]) for _ in range(3)]
        assert {(result.loss_scale, result.skipped) for result in losses} == {(512.0, False)}
        assert losses[2].loss < losses[0].loss
        assert kind_of_scaling(rank.accelerator) == "static"
    too_large = fp16_recipe(tiny_llama, tmp_path, stage, loss_scale=2**30)
    with one_rank(too_large) as rank, pytest.raises(NotFinite, match="even at a loss scale of"):
        rank.step([flat_batch()])


def reductions(rank: OneRank) -> dict[str, int]:
    """Calls of backward's collectives in a step of two micro-steps, by name."""
    phases = Phases(CPU, enabled=True)
    rank.step([flat_batch()] * 2, phases=phases)
    return {name: stats.calls for name, stats in phases.take()["backward"].collectives.items()}


def fills(sizes: Sequence[int], bucket: int) -> int:
    """How often a bucket is emptied that takes gradients of these sizes in turn; one that is larger goes alone."""
    times, held = 1, 0
    for size in sizes:
        if held and held + size > bucket:
            times, held = times + 1, 0
        held += size
    return times


@pytest.mark.slow
def test_buckets_and_the_way_to_reduce_are_calls(tiny_llama: Path, tmp_path: Path) -> None:
    found = {}
    for bucket, keys in ((None, {}), (20_000, {}), (None, {"reduce_scatter": False})):
        sized = {} if bucket is None else {"reduce_bucket_size": bucket}
        recipe = fp16_recipe(tiny_llama, tmp_path, **sized, **keys)
        with one_rank(recipe) as rank:
            sizes = [parameter.numel() for parameter in rank.parts.unwrapped_model.parameters()]
            found[len(found)] = reductions(rank)
    assert found[0] == {"reduce": 2}
    assert found[1] == {"reduce": 2 * fills(sizes[::-1], 20_000)}
    assert found[2] == {"all_reduce": 2}
