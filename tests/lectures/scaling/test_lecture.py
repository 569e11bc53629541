"""The lecture `scaling`: sizes, verdicts, traffic and time against arithmetic of their own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.measure.collectives import CollectiveStats
from finetune.planner.trace.step_work import StepWork
from lectures.scaling.plans import (
    GPU_COUNTS,
    PUBLISHED,
    PUBLISHED_LOSS,
    SWEPT_STRATEGIES,
    bytes_a_parameter,
    decoder_config_of,
    parameters_of,
    with_copies,
)
from tests.support.lectures import held

A100_BYTES = 0.99 * 81_920 * 2**20  # of nvidia-smi's total; the driver keeps the rest
BETWEEN, PEAK = 50e9, 312e12  # bytes/s of a GPU to other machines; FLOP/s in 16 bits


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_decoder_of_the_published_size(size: str) -> None:
    published = PUBLISHED[size]
    config = decoder_config_of(*published)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert sum(each.numel() for each in model.parameters()) == parameters_of(config)
    assert parameters_of(config) == pytest.approx(published[0], rel=2e-3)


def cells() -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    facts = held("scaling").facts
    assert facts["gpu_bytes"] == pytest.approx(A100_BYTES, rel=1e-6)
    assert list(facts["cells"]) == [f"{size} {strategy}" for size in PUBLISHED for strategy in SWEPT_STRATEGIES]
    return facts["cells"], facts["parameters"]


@pytest.mark.slow
def test_ddp_ends_between_two_and_eleven_billion() -> None:
    """As published. Weights, gradients and moments in float32 are 16 bytes a parameter, on each GPU or shared."""
    found, counts = cells()
    assert found["2.28B ddp"]["traced"]["fits"]
    assert not found["11.3B ddp"]["traced"]["fits"]
    assert found["11.3B fsdp2"]["traced"]["fits"]
    for size, count in counts.items():
        ddp, fsdp = (found[f"{size} {strategy}"] for strategy in ("ddp", "fsdp2"))
        assert ddp["traced"]["states_bytes"] == pytest.approx(16 * count, rel=0.01)
        assert fsdp["traced"]["states_bytes"] == pytest.approx(16 * count / 8, rel=0.05)
        assert (16 * count > A100_BYTES) == (not ddp["traced"]["fits"])
        assert len(set(ddp["needed_bytes"].values())) == 1, "more GPUs do not help"
        shares = {int(ranks): nbytes - 16 * count / int(ranks) for ranks, nbytes in fsdp["needed_bytes"].items()}
        assert all(rest > 0 for rest in shares.values())
        assert fsdp["needed_bytes"]["512"] < fsdp["needed_bytes"]["8"]
        for each in (ddp, fsdp):
            # FSDP2 is 1.5 and 1.6 % below the trace at 2.28B and 11.3B, the others equal it.
            assert each["traced"]["needed_bytes"] == pytest.approx(each["needed_bytes"]["8"], rel=0.017)


@pytest.mark.slow
def test_what_a_step_sends() -> None:
    """DDP 2 P; FSDP2 two gatherings in 16 bits and a reduction in float32, also 2 P; HSDP 2/8 P between machines."""
    found, counts = cells()
    for size, count in counts.items():
        sent = {
            strategy: sum(found[f"{size} {strategy}"]["sent"].values()) / (4 * count) for strategy in SWEPT_STRATEGIES
        }
        assert sent["ddp"] == pytest.approx(2, rel=0.01)
        assert sent["fsdp2"] == pytest.approx(2, rel=0.03)
        assert sent["hsdp"] - sent["fsdp2"] == pytest.approx(2 / 8, rel=0.03)


@pytest.mark.slow
def test_the_loss_on_the_way_to_512() -> None:
    """On one machine a step takes as long as its products; between machines as long as its bytes on one GPU's link,
    which is longer, or by all links as long as its products again. What was published lies between the two."""
    found, counts = cells()
    for name, cell in found.items():
        speeds = {int(ranks): speed for ranks, speed in cell["teraflops"].items()}
        assert all(0 < speed <= PEAK / 1e12 for speed in speeds.values()), name
        assert cell["loss"]["one_link"] == pytest.approx(1 - speeds[max(speeds)] / speeds[min(speeds)])
        assert cell["flops"] == pytest.approx(8 * counts[name.split()[0]] * 8 * 512, rel=0.1), "4 passes of 2 N a token"
    for size in PUBLISHED:
        cell = found[f"{size} fsdp2"]
        products, wire = cell["flops"] / PEAK, sum(cell["sent"].values()) * 511 / 512 / BETWEEN
        seconds = {ranks: cell["flops"] / (1e12 * cell["teraflops"][ranks]) for ranks in ("8", "512")}
        assert seconds["8"] == pytest.approx(products, rel=0.05)
        assert seconds["512"] == pytest.approx(wire, rel=0.05)
    losses = found["11.3B fsdp2"]["loss"]
    assert losses["all_links"] < PUBLISHED_LOSS / 100 < losses["one_link"]
    assert losses["all_links"] == pytest.approx(0, abs=0.05)
    assert found["11.3B hsdp"]["loss"]["one_link"] == pytest.approx(0, abs=0.01)


@pytest.mark.slow
def test_the_published_points_are_beside_the_plan() -> None:
    found, _ = cells()
    text = held("scaling").text
    fsdp, ddp = (found[f"11.3B {strategy}"] for strategy in ("fsdp2", "ddp"))
    published = r"11\.3B loses 7 % of TFLOP/s from 8 to 512 GPUs +FSDP2 loses ([\d.]+) % from 8 to 512 GPUs"
    line = re.search(published, text)
    assert line is not None
    assert float(line[1]) == pytest.approx(100 * fsdp["loss"]["one_link"], abs=0.051)
    gib = ddp["traced"]["needed_bytes"] / 2**30
    assert f"11.3B does not fit: {gib:.1f} of 79.2 GiB, traced" in text
    assert re.search(r"DDP runs 2\.28B and is out of memory at 11\.3B +2\.28B fits: ", text)
    assert max(map(len, text.splitlines())) <= 120


def test_hsdp_reduces_between_machines_what_a_rank_keeps() -> None:
    backward = {"all_gather": CollectiveStats(3, 100), "reduce_scatter": CollectiveStats(4, 800)}
    work = with_copies(StepWork({}, {"forward": {}, "backward": backward}))
    assert work.collectives["backward"]["all_reduce"] == CollectiveStats(4, 100)
    assert work.collectives["backward"]["reduce_scatter"] == CollectiveStats(4, 800)
    assert "all_reduce" not in backward


def test_the_published_points() -> None:
    """Zhao et al., PyTorch FSDP, 2023, as the notes have them."""
    assert {name: size for name, (size, *_) in PUBLISHED.items()} == {"611M": 611e6, "2.28B": 2.28e9, "11.3B": 11.3e9}
    assert (min(GPU_COUNTS), max(GPU_COUNTS), PUBLISHED_LOSS) == (8, 512, 7)


def test_zeros_own_figures() -> None:
    """Rajbhandari et al., ZeRO, figure 1: 7.5 billion parameters on 64 GPUs take 120, 31.4, 16.6 and 1.9 GB of each."""
    found = [7.5 * bytes_a_parameter(2, 2, 12, stage, 64) for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)
    assert [bytes_a_parameter(4, 4, 8, stage, 1) for stage in range(4)] == [16] * 4
