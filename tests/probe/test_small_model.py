"""Small models: every kind of layer twice, windows below the documents' lengths, and nothing of the real size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finetune.probe.compare import DOCUMENT_LENGTHS
from finetune.probe.small_model import (
    LARGEST_SMALL,
    SMALL_VOCABULARY,
    CannotShrink,
    Factors,
    chosen_layers,
    decoder_layers,
    draw_weights,
    factors,
    first_layers,
    kinds_of,
    small_models,
    with_layers_alone,
    with_small_sizes,
)


def whole(name: str, **settings: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**settings))
    return model


def shrunk(name: str, folder: Path, **settings: Any) -> dict[str, Any]:
    small = next(small_models(whole(name, **settings), folder))
    assert small.parameters <= LARGEST_SMALL
    return {"layers": small.layers, "kinds": small.kinds, **AutoConfig.from_pretrained(folder).to_dict()}


def test_widths_counted_by_heads_stay_their_product(tmp_path: Path) -> None:
    settings = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    small = shrunk("llama", tmp_path / "small", vocab_size=128256, num_hidden_layers=5, **settings)
    assert small["hidden_size"] == small["num_attention_heads"] * small["head_dim"] == 64
    assert small["num_attention_heads"] == 4 * small["num_key_value_heads"] == 8  # as many to a group
    assert (small["layers"], small["kinds"], small["vocab_size"]) == (2, 1, SMALL_VOCABULARY)
    assert small["rope_parameters"] == CONFIG_MAPPING["llama"](**settings).rope_parameters


@pytest.mark.parametrize(
    ("name", "layers", "window"),
    [("gemma3_text", ["sliding_attention", "sliding_attention", "full_attention", "full_attention"], 6),
     ("mistral", None, 6)],
)  # fmt: skip
def test_every_kind_of_layer_stays_twice(name: str, layers: list[str] | None, window: int, tmp_path: Path) -> None:
    settings = {"layer_types": ["sliding_attention"] * 5 + ["full_attention"] * 2} if layers else {}
    small = shrunk(name, tmp_path / "small", num_hidden_layers=7, **settings)
    assert small["sliding_window"] == window < max(DOCUMENT_LENGTHS)
    assert small.get("layer_types") == layers
    assert small["layers"] == len(layers or [1, 1])


def test_a_pattern_that_is_no_list_keeps_its_first_layers(tmp_path: Path) -> None:
    """Jamba's layers follow from periods, so only the first layers of the model are those of the small one."""
    small = shrunk("jamba", tmp_path / "small", num_hidden_layers=16, attn_layer_period=4, attn_layer_offset=2,
                   hidden_size=256, intermediate_size=512, num_experts=4, mamba_dt_rank=16)  # fmt: skip
    assert small["layers"] == small["num_hidden_layers"] == 7  # attention is the third and the seventh
    assert small["kinds"] >= 2


def test_weights_make_biases_norms_and_sinks_matter_and_are_drawn_alike(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING["gpt_oss"](hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                                  num_key_value_heads=2, head_dim=8, num_local_experts=2, vocab_size=32)
    )  # fmt: skip
    before = torch.random.get_rng_state()
    draw_weights(model)
    assert torch.equal(before, torch.random.get_rng_state())
    flat = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    assert len(flat) > 10
    assert all(float(parameter.detach().std()) > 0.0 for parameter in flat)
    assert all(torch.equal(parameter, parameter.bfloat16().float()) for parameter in flat)
    again = [parameter.clone() for parameter in model.parameters()]
    for parameter in flat:  # a value is drawn onto what training starts from
        parameter.data = parameter.data * 0 + 1
    draw_weights(model)
    matrices = [(one, other) for one, other in zip(again, model.parameters(), strict=True) if one.ndim > 1]
    assert all(torch.equal(one, other) for one, other in matrices)


@pytest.mark.thorough
def test_decays_that_stay_as_they_begin_are_the_same_in_every_process(tmp_path: Path) -> None:
    """A_log and its like begin at random numbers, to which `draw_weights` adds its own."""
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        folder = next(small_models(whole("qwen3_next"), tmp_path / str(seed))).folder
        assert torch.equal(torch.random.get_rng_state(), before)
        drawn.append(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])


def test_numbers_are_chosen_by_name_else_by_size() -> None:
    known = {"hidden_size": 1024, "n_head": 16, "n_inner": 4096, "made_up": 300, "attention_dropout": 0.1}
    small = with_small_sizes(known, next(factors(known)))
    assert small == {"hidden_size": 16, "n_head": 2, "n_inner": 64, "made_up": 300, "attention_dropout": 0.0}
    own = {"dim": 1024, "nheads": 16, "hidden": 2816, "vocabulary": 50_000, "max_seq": 4096, "eos_token_id": 49_999}
    small = with_small_sizes(own, next(factors(own)))
    expected = {"dim": 16, "nheads": 16, "hidden": 44, "vocabulary": SMALL_VOCABULARY, "max_seq": 4096}
    assert small == expected | {"eos_token_id": SMALL_VOCABULARY - 1}
    narrow = {"hidden_size": 64, "intermediate_size": 128, "sliding_window": None}
    assert [with_small_sizes(narrow, by) for by in factors(narrow)] == [narrow]


def test_layers_are_chosen_by_kind() -> None:
    kinds = [0, 0, 0, 1, 0, 0, 0, 1, 2]
    assert chosen_layers(kinds) == [0, 1, 3, 7, 8]
    assert first_layers(kinds) == list(range(9))
    config = {"num_hidden_layers": 9, "layer_types": list("aaabaaabc"), "mlp_only_layers": [1, 8], "every": 4}
    small = {"num_hidden_layers": 5, "layer_types": list("aabbc"), "mlp_only_layers": [1, 4], "every": 4}
    assert with_layers_alone(config, 9, chosen_layers(kinds)) == small


def test_a_layers_place_is_not_its_kind() -> None:
    assert kinds_of(decoder_layers(whole("llama", num_hidden_layers=3, hidden_size=64), 3)) == [0, 0, 0]
    window = whole("qwen2", num_hidden_layers=4, hidden_size=64, use_sliding_window=True, max_window_layers=2)
    assert kinds_of(decoder_layers(window, 4)) == [0, 0, 1, 1]


def test_a_model_that_cannot_be_made_small_has_a_reason(tmp_path: Path) -> None:
    model = whole("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    model.config.num_attention_heads = 7  # no width goes into it
    with pytest.raises(CannotShrink, match=r"^it cannot be made small \(.*\)$"):
        list(small_models(model, tmp_path / "small"))


def test_sections_of_rotary_positions_still_share_out_a_heads_pairs() -> None:
    """Those of Qwen 2.5 VL, a head of 128: of one 8 wide there are 4 pairs."""
    small = with_small_sizes({"rope_parameters": {"mrope_section": [16, 24, 24]}}, Factors(heads=2, head_width=16))
    assert small["rope_parameters"]["mrope_section"] == [1, 2, 1]
