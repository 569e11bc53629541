"""What a step computes: against torch's own counter, and by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.architecture.recomputation import checkpoint_layers
from finetune.measure.collectives import CollectiveStats
from finetune.measure.phases import Phases
from finetune.planner import roofline
from finetune.planner.plan_recipe import Layout
from finetune.planner.roofline import Chip, scaled_step_times, step_time
from finetune.planner.trace.flops import COPY, ON_HOST, Operation, count_operations, crossing_bytes, operation_place
from finetune.planner.trace.step_work import StepWork, per_step, work_at_depth
from tests.support.stand_ins import addmm_stand_in

assert addmm_stand_in
CPU = torch.device("cpu")


def model(layers: int = 3, *, recompute: bool = False, frozen: bool = False) -> nn.Module:
    config = AutoConfig.for_model(
        "llama", vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager", pad_token_id=0,
    )  # fmt: skip
    made: Any = AutoModelForCausalLM.from_config(config)
    if recompute:
        checkpoint_layers(made, 1)
    for parameter in made.parameters():
        parameter.requires_grad_(not frozen)
    if frozen:
        made.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    made.train()
    return made  # type: ignore[no-any-return]


def counted(made: nn.Module) -> tuple[StepWork, int]:
    phases = Phases(CPU, enabled=False)
    with count_operations(phases) as counts, FlopCounterMode(display=False) as torchs:
        with phases("forward"):
            loss = made(input_ids=torch.arange(14).view(2, 7), use_cache=False).logits.sum()
        with phases("backward"):
            loss.backward()
    return per_step(counts, {}, steps=1, micro_steps=1), torchs.get_total_flops()


@pytest.mark.parametrize("how", [{}, {"recompute": True}, {"frozen": True}], ids=str)
def test_arithmetic_is_what_torch_counts(how: dict[str, Any]) -> None:
    work, torchs = counted(model(**how))
    assert work.flops("forward") + work.flops("backward") == torchs > 0


def test_a_product_that_is_added_to_wider_numbers() -> None:
    """As the head's gradient on a GPU: torch's own counter has no count of it."""
    left, right, total = torch.zeros(7, 5).bfloat16(), torch.zeros(5, 3).bfloat16(), torch.zeros(7, 3)
    phases = Phases(CPU, enabled=False)
    with count_operations(phases) as counts, phases("forward"):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        total.addmm_(left.float(), right.float())
    products = [operation for operation in counts if operation.kind == "product"]
    assert [operation.flops for operation in products] == [2 * 7 * 5 * 3] * 2
    assert [operation.itemsize for operation in products] == [2, 4]
    assert [operation.nbytes for operation in products] == [2 * 4 * 21 + 2 * (35 + 15), 2 * 4 * 21 + 4 * (35 + 15)]


@pytest.mark.thorough
def test_what_is_frozen_costs_less_and_what_is_recomputed_more() -> None:
    plain, frozen, again = (counted(model(**how))[0] for how in ({}, {"frozen": True}, {"recompute": True}))
    assert {work.flops("forward") for work in (plain, frozen, again)} == {plain.flops("forward")}
    assert frozen.flops("backward") < 0.6 * plain.flops("backward")
    assert again.flops("backward") > 1.3 * plain.flops("backward")


@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_quantised_weights_are_products(bits: int) -> None:
    import bitsandbytes  # noqa: F401  # registers its operations

    tokens, inputs, outputs = 6, 128, 96
    ops: Any = torch.ops.bitsandbytes

    def run() -> None:
        with torch.device("meta"):
            hidden = torch.empty(tokens, inputs, dtype=torch.bfloat16)
            if bits == 4:
                packed = torch.empty(inputs * outputs // 2, 1, dtype=torch.uint8)
                ops.gemm_4bit(hidden, packed, (outputs, inputs), torch.empty(inputs * outputs // 64), 64, "nf4")
            else:
                weight = torch.empty(outputs, inputs, dtype=torch.int8)
                ops.int8_scaled_mm(hidden.to(torch.int8), weight, torch.empty(tokens), torch.empty(outputs))

    products = [op for op in operations(run).elements() if op.kind == "product"]
    assert [op.flops for op in products] == [2 * tokens * inputs * outputs]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("dot", [(5,), (5,)]),
        ("vdot", [(5,), (5,)]),
        ("mv", [(3, 5), (5,)]),
        ("addmv", [(3,), (3, 5), (5,)]),
        ("mm", [(3, 5), (5, 7)]),
        ("addmm", [(7,), (3, 5), (5, 7)]),
        ("bmm", [(2, 3, 5), (2, 5, 7)]),
        ("baddbmm", [(2, 3, 7), (2, 3, 5), (2, 5, 7)]),
        ("addbmm", [(3, 7), (2, 3, 5), (2, 5, 7)]),
        ("addmm_", [(3, 7), (3, 5), (5, 7)]),
        ("addbmm_", [(3, 7), (2, 3, 5), (2, 5, 7)]),
        ("_int_mm", [(32, 16), (16, 8)]),
    ],
)
def test_every_product_of_matrices_and_vectors_is_counted(name: str, shapes: list[tuple[int, ...]]) -> None:
    dtype = torch.int8 if name == "_int_mm" else torch.float32
    operands = [torch.ones(shape, dtype=dtype) for shape in shapes]
    (product,) = operations(lambda: getattr(torch.Tensor if name.endswith("_") else torch, name)(*operands))
    left, right = operands[-2:]  # the numbers of the left operand, each times a row of the right one
    assert product.kind == "product"
    assert product.flops == 2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)


def test_depth_is_a_line() -> None:
    by_layers = {layers: counted(model(layers))[0] for layers in (2, 3, 6)}
    grown = work_at_depth({2: by_layers[2], 3: by_layers[3]}, 6)
    for phase in ("forward", "backward"):
        assert grown.flops(phase) == pytest.approx(by_layers[6].flops(phase))
        assert bytes_of(grown, phase) == pytest.approx(bytes_of(by_layers[6], phase))


def bytes_of(work: StepWork, phase: str) -> float:
    return sum(times * op.nbytes for op, times in work.operations.items() if op.phase == phase)


def operations(run: Any) -> Counter[Operation]:
    phases = Phases(CPU, enabled=False)
    with count_operations(phases) as counts, phases("forward"):
        run()
    return counts


def nbytes(run: Any) -> int:
    return sum(op.nbytes * times for op, times in operations(run).items())


def test_bytes_are_read_and_written() -> None:
    a, b = torch.ones(10), torch.ones(10)
    assert nbytes(lambda: a + b) == 3 * 40
    assert nbytes(lambda: a.add_(b)) == 3 * 40
    assert nbytes(lambda: torch.add(a, b, out=a)) == 3 * 40
    assert nbytes(lambda: a.view(2, 5).t()) == 0
    assert nbytes(lambda: torch.empty(10)) == 0
    assert nbytes(lambda: F.embedding(torch.tensor([1, 2]), torch.ones(1000, 4))) == 2 * 32 + 1000 * 16


def test_attention_counts_pairs_that_see_each_other() -> None:
    q, k = torch.ones(2, 3, 8, 16), torch.ones(2, 3, 8, 16)
    causal = operations(lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True))
    whole = operations(lambda: F.scaled_dot_product_attention(q, k, k))
    assert sum(op.flops for op in causal) == 2 * 2 * 2 * 3 * 16 * (8 * 9 // 2)
    assert sum(op.flops for op in whole) == 2 * 2 * 2 * 3 * 16 * 64


CHIP = Chip(half=1000.0, single=100.0, memory=10.0, link=8.0, between=2.0, host=4.0)
WORK = StepWork(
    {
        Operation("forward", "product", 2000, 10, 2): 1.0,  # two seconds of arithmetic
        Operation("forward", "other", 0, 30, 2): 1.0,  # three of reading and writing
        Operation("backward", "product", 1000, 10, 4): 1.0,  # ten: float32
        Operation("step", "other", 0, 40, 4): 1.0,
    },
    {"forward": {"all_gather": CollectiveStats(4, 64)}, "backward": {"reduce_scatter": CollectiveStats(4, 64)}},
)
LAYOUT = Layout(ranks=2, node=4, tokens=10, rows=6, layers=4)


def test_the_roofline_by_hand() -> None:
    found = step_time(WORK, CHIP, LAYOUT, LAYOUT)
    assert (found.forward, found.backward, found.update) == (15.0, 30.0, 4.0)
    assert found.communication == 3 * 2 * 4.0, "half of 64 bytes at 8 a second, twice in each micro-step"
    # Of four layers' collectives one runs alone; the other three seconds hide behind 3.75 and 7.5 of computation.
    assert found.exposed == 3 * 2 * 1.0
    assert found.tokens_per_second == pytest.approx(60 / 55)
    once = Layout(**{**vars(LAYOUT), "reduces_once": True})
    assert step_time(WORK, CHIP, once, once).exposed == 3 * 1.0 + 1.0


def test_the_scale() -> None:
    found = list(scaled_step_times(WORK, CHIP, LAYOUT))
    assert [each.layout.ranks for each in found] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert [each.layout.micro_steps for each in found[:4]] == [6, 3, 2, 1]
    assert found[0].exposed == found[0].communication == 0, "one rank has nobody to speak to"
    assert found[0].update == 8.0, "twice what one of two ranks has"
    assert found[3].communication == pytest.approx(2 * 56 / 2), "over the slow link, 7/8 of it"
    assert found[-1].as_json()["exposed_share"] > found[1].as_json()["exposed_share"]


def test_copies_speak_over_the_slow_link_and_shards_do_not() -> None:
    hybrid = Layout(**{**vars(LAYOUT), "ranks": 8, "copies": 2})
    between = StepWork(
        WORK.operations, {"backward": {"all_reduce": CollectiveStats(1, 32), "reduce_scatter": CollectiveStats(1, 64)}}
    )
    found = step_time(between, CHIP, hybrid, hybrid)
    assert found.communication == pytest.approx(2 * 32 / 2 / 2 + 64 * 3 / 4 / 8)
    assert [each.layout.copies for each in scaled_step_times(between, CHIP, hybrid)] == [2, 4, 8, 16, 32, 64, 128]


def test_offload_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share 20 bytes a second of host memory; 4 bytes a second cross between GPU and host."""
    monkeypatch.setattr(roofline, "HOST_MEMORY", 20.0)
    offloaded = StepWork(
        dict(WORK.operations)
        | {
            Operation("backward", "other", 0, 16, 4, COPY): 1.0,  # four seconds, of which one layer's is not overlapped
            Operation("backward", "other", 0, 30, 4, ON_HOST): 1.0,  # three seconds
            Operation("step", "other", 0, 100, 4, ON_HOST): 1.0,  # ten
            Operation("step", "other", 0, 12, 4, COPY): 1.0,  # three
        },
        WORK.collectives,
    )
    without, found = (step_time(work, CHIP, LAYOUT, LAYOUT) for work in (WORK, offloaded))
    assert (found.forward, found.backward, found.update) == (without.forward, without.backward, without.update)
    assert (found.communication, found.exposed) == (without.communication, without.exposed)
    assert found.copies == 3 * 4.0 + 3.0
    assert found.exposed_copies == 3 * 1.0 + 3.0
    assert found.host == 3 * 3.0 + 10.0
    assert found.seconds == without.seconds + 6.0 + 19.0
    alone = step_time(offloaded, CHIP, replace(LAYOUT, ranks=1), LAYOUT)
    assert alone.host == 6 * 2 * 1.5 + 2 * 5.0, "twice the shard, and all of the host's memory for one rank"
    assert alone.exposed_copies == 6 * 2.0 + 6.0, "twice the shard; backward's three other layers take 7.5 seconds"


def test_a_slow_bus_is_waited_for() -> None:
    slow = StepWork(dict(WORK.operations) | {Operation("backward", "other", 0, 80, 4, COPY): 1.0}, WORK.collectives)
    # Twenty seconds: five of the first layer, and of the other fifteen what backward's other three layers leave.
    assert step_time(slow, CHIP, LAYOUT, LAYOUT).exposed_copies == 3 * (5.0 + 15.0 - 7.5)


def test_where_an_operation_runs() -> None:
    device, host = torch.empty(8, device="meta"), torch.empty(8)
    half = torch.empty(8, dtype=torch.float16, device="meta")
    pretended = torch.device("meta")
    assert operation_place("add", pretended, [device, device]) == "device"
    assert operation_place("mul", pretended, [device, torch.tensor(2.0)]) == "device", "a number may be on the host"
    assert operation_place("_fused_adamw_", pretended, [host, host]) == ON_HOST
    assert operation_place("copy_", pretended, [device, host]) == COPY
    assert operation_place("copy_", torch.device("cpu"), [host, host]) == "device", "on a CPU there is one place"
    assert crossing_bytes([host, half]) == crossing_bytes([half, host, host]) == 16, "what is cast is sent narrow"


def test_experts_cost_what_their_tokens_cost() -> None:
    """14 tokens to 2 of 4 experts each are 28 rows by three matrices; backward twice that, as all are trained."""
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        attn_implementation="eager", pad_token_id=0,
    )  # fmt: skip
    work = counted(AutoModelForCausalLM.from_config(config).train())[0]
    without = AutoModelForCausalLM.from_config(config).train()
    for layer in without.model.layers:
        layer.mlp.experts.forward = lambda hidden, *_: hidden
    experts = 2 * 2 * 28 * (32 * 48 + 24 * 32)  # layers, multiply and add, rows, weights of an expert
    plain = counted(without)[0]
    assert work.flops("forward") - plain.flops("forward") == experts
    assert work.flops("backward") - plain.flops("backward") >= 2 * experts
