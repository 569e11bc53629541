"""Hidden states in host memory by arithmetic: bytes a token on the GPU, bytes in host memory, and the refusal."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.closed_form import states_on_host
from finetune.closed_form.estimate import estimate
from finetune.closed_form.recomputation import choose_recomputation
from finetune.closed_form.states_on_host import check_host_memory, host_state_bytes
from finetune.errors import DoesNotFit
from finetune.model.known_configs import config_if_known, full_config
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import read_strategy
from finetune.recipe.strategy_fit import unfit
from tests.support.runs.recipe_plans import plan_of
from tests.support.runs.recipe_results import recipes
from tests.support.runs.recipes import half_recipe, merged

LLAMA_8B, GIB = "meta-llama/Llama-3.1-8B", 2**30
QLORA = {"quantization": {"load_in_4bit": True}, "lora": {}}
OFFLOADS = {"training": {"activation_checkpointing": True, "activation_offloading": True}}


def recipe(tokens: int, **sections: Any) -> Recipe:
    return half_recipe(LLAMA_8B, **merged({"data": {"max_length": tokens}}, sections))


def slope(**sections: Any) -> float:
    """Bytes that one more token of a row takes at the largest peak."""
    few, many = 16_384, 32_768
    config, gpu = full_config(LLAMA_8B)[0], parse_gpus("80GB")
    less, more = (estimate(recipe(tokens, **sections), config, gpu).needed for tokens in (few, many))
    return (more - less) / (many - few)


def test_bytes_a_token_as_docs_long_rows_has_them() -> None:
    """Llama 8B by QLoRA, recomputed: hidden states, an MLP, attention, a gradient; with offloading two states."""
    hidden, inner, layers = 4096, 14_336, 32
    state = 2 * hidden
    # gate and up are saved; backward has gradients of gate, up and their product.
    mlp = 2 * 2 * inner + 3 * 2 * inner
    attention = 45_928
    resident = layers * state + mlp + attention + state
    assert (layers * state, mlp, state) == (262_144, 143_360, 8_192)
    assert resident == 459_624 == slope(**merged(QLORA, {"training": {"activation_checkpointing": True}}))
    assert resident - (layers - 2) * state == 213_864 == slope(**merged(QLORA, OFFLOADS))


@pytest.mark.parametrize(
    ("tokens", "sections", "gib", "pinned_gib"),
    [
        (32_768, {}, 8, 8),
        (40_960, {}, 10, 16),
        (32_768, {"training": {"mixed_precision": "no"}}, 16, 16),
        (32_768, {"model": {"dtype": "float32"}, "lora": {}}, 16, 16),
        (16_384, {"training": {"per_device_batch_size": 3}}, 12, 16),
    ],
)
def test_bytes_in_host_memory(tokens: int, sections: dict[str, Any], gib: int, pinned_gib: int) -> None:
    asked, config = recipe(tokens, **merged({"lora": None}, OFFLOADS, sections)), full_config(LLAMA_8B)[0]
    assert host_state_bytes(asked, config, pinned=False) == gib * GIB
    assert host_state_bytes(asked, config) == pinned_gib * GIB


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_8b_qlora_long_1x24gb"])
def test_the_trace_has_the_arithmetic(name: str) -> None:
    from finetune.recipe.loader import load_recipe

    asked = load_recipe(recipes()[name]).recipe
    config, planned = full_config(asked.model.name_or_path)[0], plan_of(recipes()[name])
    assert estimate(asked, config, planned.gpus).needed == pytest.approx(planned.needed, rel=0.01)  # type: ignore[arg-type]
    batches = 2**20  # pinned, and taken again
    assert planned.host["step"] == pytest.approx(host_state_bytes(asked, config), abs=batches * 4)


def test_too_little_host_memory_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_on_host, "available_bytes", lambda: 20 * GIB)
    asked, config = recipe(32_768, **merged(QLORA, OFFLOADS)), full_config(LLAMA_8B)[0]
    line = "training.activation_offloading: hidden states take {} GiB of pinned host memory on a machine with {}"
    assert check_host_memory(asked, config, 2, pinned=True) == [line.format("16.0", "2 ranks")]
    assert check_host_memory(asked, config, 4, pinned=True, here=False) == [line.format("32.0", "4 ranks")]
    with pytest.raises(DoesNotFit) as refusal:
        check_host_memory(asked, config, 4, pinned=True)
    remedy = "20.0 are free; set it to false, or lower data.max_length or training.per_device_batch_size"
    assert str(refusal.value) == f"{line.format('32.0', '4 ranks')}, {remedy}"
    unknown = half_recipe("/nowhere", **OFFLOADS)
    assert check_host_memory(unknown, config_if_known(unknown.model), 1, pinned=True) == []


@pytest.mark.parametrize("setting", [False, 2, "selective"])
def test_layers_that_keep_more_than_their_input_are_refused(setting: Any) -> None:
    sections = merged(OFFLOADS, {"training": {"activation_checkpointing": setting}})
    (problem,) = unfit(half_recipe(LLAMA_8B, **sections), read_strategy("single"))
    assert problem.key == "training.activation_checkpointing"
    assert problem.instead == {"training.activation_checkpointing": True}
    changed = half_recipe(LLAMA_8B, **OFFLOADS)
    assert list(unfit(changed, read_strategy("fsdp2"))) == []


def test_a_pipeline_is_refused() -> None:
    (problem,) = unfit(half_recipe(LLAMA_8B, **OFFLOADS), read_strategy("1f1b"))
    assert problem.instead == {"training.activation_offloading": False}


def test_auto_recomputes_all_layers_and_never_chooses_it() -> None:
    room = parse_gpus("141GB")
    for offloads in (False, True):
        sections = {"training": {"activation_checkpointing": "auto", "activation_offloading": offloads}}
        asked = recipe(2048, **merged({"lora": {}}, sections))
        chosen = choose_recomputation(asked, config_if_known(asked.model), room).recipe.training
        assert (chosen.activation_checkpointing, chosen.activation_offloading) == (offloads, offloads)
