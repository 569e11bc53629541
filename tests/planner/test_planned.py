"""Plan on tensors without data equals tracked on real ones, to the byte."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from finetune.closed_form.constants import COMPONENTS
from finetune.planner.trace.fake_model import host_pages, no_data
from finetune.planner.trace.trace import trace
from finetune.recipe.strategy import read_strategy
from tests.support.memory.planned import FAMILIES, Case, cases, differences, models, planned, tracked, tracked_on_ranks

ALL = cases()
RANKS = cases(("full", "lora"))
EIGHT_BITS = [
    Case("full", precision, 1, packed=True, tied=False, micro_steps=1, optim="adamw_8bit")
    for precision in ("bf16", "pure_bf16")
]
SAMPLE = [
    Case("full", "bf16", 0, packed=True, tied=False, micro_steps=2),
    Case("lora", "bf16", 2, packed=False, tied=True, micro_steps=1),
    Case("int8", "bf16", 0, packed=True, tied=False, micro_steps=1),
    EIGHT_BITS[0],
    Case("patterns", "bf16", 0, packed=True, tied=False, micro_steps=1),
    Case("parameters", "bf16", 1, packed=True, tied=False, micro_steps=2),
    Case("experts", "bf16", 1, packed=True, tied=False, micro_steps=1),
    Case("packed experts", "bf16", 1, packed=True, tied=False, micro_steps=2),
    *(Case(family, "bf16", 1, packed=True, tied=False, micro_steps=1) for family in FAMILIES),
    *(
        Case(method, "bf16", "selective", packed=True, tied=False, micro_steps=2)
        for method in ("full", "lora", "qlora", "experts", "packed experts")
    ),
]
TILED = [
    Case(method, "bf16", every, packed=True, tied=tied, micro_steps=2, tile=tile)
    for method, every, tied, tile in (("qlora", 1, False, 8), ("lora", 2, True, 16), ("full", 1, False, 10))
]


# Long rows, so that what waits in host memory is most of all there is.
OFFLOADED = [
    Case("qlora", "bf16", 1, packed=True, tied=False, micro_steps=2, offloads=True),
    Case("lora", "pure_bf16", 1, packed=True, tied=True, micro_steps=1, offloads=True),
    Case("full", "bf16", 1, packed=True, tied=False, micro_steps=2, offloads=True),
    Case("qlora", "bf16", 1, packed=True, tied=False, micro_steps=2, offloads=True, tile=8),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models(tmp_path_factory.mktemp("planned"))


@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_sample_is_planned_to_the_byte(case: Case, folder: Path) -> None:
    assert list(differences(planned(case, folder), tracked(case, folder))) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", OFFLOADED, ids=str)
def test_offloaded_hidden_states_are_planned_to_the_byte(case: Case, folder: Path) -> None:
    found = tracked(case, folder)
    assert list(differences(planned(case, folder), found)) == []
    resident = tracked(dataclasses.replace(case, offloads=False), folder)
    assert found["forward"] != resident["forward"]


@pytest.mark.parametrize("case", TILED, ids=str)
def test_tiles_are_planned_to_the_byte(case: Case, folder: Path) -> None:
    found = planned(case, folder)
    assert list(differences(found, tracked(case, folder))) == []
    assert found["backward"] != planned(replace(case, tile=None), folder)["backward"]


@pytest.mark.slow
def test_every_configuration_is_planned_to_the_byte(folder: Path) -> None:
    assert len(ALL) == 108
    wrong = {str(case): list(differences(planned(case, folder), tracked(case, folder))) for case in ALL}
    assert {case: found for case, found in wrong.items() if found} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "node", "some"),
    [
        ("fsdp2", 2, 2, [*RANKS[::3], *EIGHT_BITS, *TILED[1:]]),
        ("fsdp2_grad_op", 2, 2, RANKS[1::7]),
        ("fsdp2_offload", 2, 2, [*RANKS[2::7], *EIGHT_BITS[:1]]),
        ("hsdp", 4, 2, [*RANKS[3::13], *EIGHT_BITS[:1]]),
    ],
)
def test_gloo_ranks_are_planned_to_the_byte(
    strategy: str, ranks: int, node: int, some: list[Case], folder: Path
) -> None:
    for axis in ("packed", "tied", "micro_steps", "method", "precision", "checkpointing"):
        assert len({getattr(case, axis) for case in some}) == len({getattr(case, axis) for case in RANKS}), axis
    real = tracked_on_ranks(some, folder, strategy, ranks, node)
    # When they save, ranks tell each other in pickled bytes what they wrote.
    found = {
        str(case): list(differences(planned(case, folder, strategy, ranks, node), there, ("load", "save")))
        for case, there in zip(some, real, strict=True)
    }
    assert {case: wrong for case, wrong in found.items() if wrong} == {}


@pytest.mark.thorough
def test_composition_adds_up_and_the_peak_has_a_place(folder: Path) -> None:
    case = Case("full", "bf16", 1, packed=True, tied=False, micro_steps=2)
    done = trace(case.recipe(folder), read_strategy("single"), case.batches())
    phases = done.timeline.phases("cpu")
    assert list(phases) == ["load", "forward", "backward", "step", "save"]
    for phase in phases.values():
        assert sum(phase.peak.parts.values()) == phase.peak.nbytes
        assert set(phase.peak.parts) <= set(COMPONENTS)
    # 0.14M float32 weights: gradients as large, Adam's moments twice, and 4 bytes of a count a tensor.
    step = phases["step"].peak.parts
    weights = sum(tensor.numel() * 4 for tensor in _weights(case, folder))
    assert step["gradients"] == weights
    assert step["optimizer state"] == 2 * weights + 4 * len(list(_weights(case, folder)))
    assert phases["forward"].peak.module == "lm_head"
    assert phases["backward"].peak.module == ""  # at its beginning, where the head's gradient is cast to float32
    assert phases["forward"].peak.parts["logits and loss"] > 39 * 512 * 4  # of the longest batch, before they are freed
    assert phases["forward"].peak.parts["cast weights"] > 0


def test_pages_are_host_memory() -> None:
    """Names of bitsandbytes that are not documented: get_paged would call CUDA."""
    from bitsandbytes import functional, optim

    with host_pages():
        weight = torch.nn.Parameter(torch.zeros(1000, 128, device="meta"))
        state = optim.PagedAdamW32bit([weight]).get_state_buffer(weight)
        assert (state.device.type, state.is_paged, state.shape) == ("cpu", True, weight.shape)
    assert functional.get_paged.__module__ == functional.__name__


def test_a_copied_module_has_the_same_mode() -> None:
    """torch copies the mode with the tensor, and the copies free the same weak references: the process dies later."""
    with no_data(1.0, masks=True) as mode:
        layer = torch.nn.Linear(3, 3)
        copied = copy.deepcopy(layer)
        total = layer.weight + copied.weight
    assert copied.weight is not layer.weight
    assert all(getattr(tensor, "fake_mode", None) is mode for tensor in (copied.weight, copied.bias, total))


def _weights(case: Case, folder: Path) -> list[torch.Tensor]:
    from finetune.model.build import build_model

    return list(build_model(case.recipe(folder), torch.device("meta")).parameters())
