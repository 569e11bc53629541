"""The lecture `scaling`: sizes, verdicts and traffic against arithmetic of their own."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.lectures.scaling.plans import PUBLISHED, bytes_a_parameter, decoder_config_of, parameters_of
from tests.support.lectures import held


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_decoder_of_the_published_size(size: str) -> None:
    published = PUBLISHED[size]
    config = decoder_config_of(*published)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert sum(each.numel() for each in model.parameters()) == parameters_of(config)
    assert parameters_of(config) == pytest.approx(published[0], rel=2e-3)


@pytest.mark.slow
def test_ddp_ends_between_two_and_eleven_billion() -> None:
    facts = held("scaling").facts
    cells, gpu = facts["cells"], facts["gpu_bytes"]
    assert len(cells) == 7
    assert cells["2.28B ddp"]["traced_fits"]
    assert not cells["11.3B ddp"]["traced_fits"]
    for size, count in facts["parameters"].items():
        # Weights, gradients and moments in float32, and a 16-bit copy: 18 bytes a parameter, on each GPU or shared.
        ddp, fsdp = cells[f"{size} ddp"], cells[f"{size} fsdp2"]
        assert ddp["traced_bytes"] > 16 * count
        assert fsdp["traced_bytes"] > 16 * count / 8
        assert all(need > 16 * count / int(ranks) for ranks, need in fsdp["needed_bytes"].items())
        assert fsdp["needed_bytes"]["512"] < fsdp["needed_bytes"]["8"]
        assert fsdp["traced_fits"]
        assert (16 * count > gpu) == (not ddp["traced_fits"])
        for cell in (ddp, fsdp, cells["11.3B hsdp"]):
            speeds = list(cell["teraflops"].values())
            assert all(0 < speed <= 312 for speed in speeds)
            assert speeds[-1] <= speeds[0]


def test_zeros_own_figures() -> None:
    """Rajbhandari et al., ZeRO, figure 1: 7.5 billion parameters on 64 GPUs take 120, 31.4, 16.6 and 1.9 GB of each."""
    found = [7.5 * bytes_a_parameter(2, 2, 12, stage, 64) for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)
    assert [bytes_a_parameter(4, 4, 8, stage, 1) for stage in range(4)] == [16] * 4


@pytest.mark.slow
def test_shards_of_states() -> None:
    facts = held("scaling").facts
    count, states = facts["parameters"]["611M"], facts["states_bytes"]
    assert states["ddp"] / count == pytest.approx(16, rel=0.01)
    assert states["fsdp2"] / count == pytest.approx(16 / 8, rel=0.05)
