"""Compiled layers: graphs counted over rows of all lengths, numbers against the layers as they are written, and what
happens where they cannot be compiled."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from finetune.architecture import attention
from finetune.architecture.by_document import Mixer, run_by_document
from finetune.architecture.compiled import layers as choice
from finetune.architecture.compiled.layers import (
    CACHE_VARIABLE,
    CompiledLayers,
    compile_as_asked,
    compile_layers,
    keep_graphs,
    why_not_compiled,
)
from finetune.architecture.loss import put_loss_into_forward
from finetune.architecture.own_layers.compute import compute_layers
from finetune.architecture.recomputation import checkpoint_layers
from finetune.architecture.varlen_kernel import attend_on_cuda
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.recipe.strategy import read_strategy
from finetune.recipe.strategy_fit import unfit
from tests.support.models.tiny import flat_batch, tiny_model
from tests.support.runs.recipes import half_recipe, least_recipe
from tests.support.stand_ins import varlen_stand_in
from tests.support.stand_ins.compiling import Counting, broken_backward, broken_forward, nothing_compiled
from tests.support.stand_ins.planted import Faulty

assert nothing_compiled
assert varlen_stand_in
CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
LAYERS = 3
GEMMA = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 16,
    "query_pre_attn_scalar": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {}, "gemma3_text": GEMMA}
WIDTH = 64  # of the models, and the tokens of the first row: two sizes that are equal by chance


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def built(
    family: str, lora: bool, recomputed: bool, name: str = attention.NAME, dropout: float = 0.0
) -> tuple[nn.Module, PreTrainedModel]:
    attention.register()
    base = tiny_model(family, num_hidden_layers=LAYERS, **FAMILIES[family])
    base.config.use_cache = False
    base.set_attn_implementation(name)
    put_loss_into_forward(base)
    model: nn.Module = base
    if lora:
        config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
        torch.manual_seed(0)
        model = get_peft_model(base, config)
        # As after some training: as large as peft draws them, float32's own rounding would be 2e-5 of a gradient.
        for weight in (each for name, each in model.named_parameters() if ".lora_B." in name):
            nn.init.normal_(weight, std=0.02)
    compute_layers(model, lambda *_: pytest.fail("no layer is packed"))
    model.train()
    if recomputed:
        checkpoint_layers(base, 1)
    return model, base


def rows(count: int) -> list[dict[str, Any]]:
    """Rows of 1 to 12 documents of 1 to 60 tokens, after one whose tokens are as many as the model is wide."""
    draw = random.Random(0)
    lengths = [[draw.randint(1, 60) for _ in range(draw.randint(1, 12))] for _ in range(count - 2)]
    return [flat_batch(each, seed=index) for index, each in enumerate([[WIDTH], *lengths, [1] * WIDTH])]


def learned(model: nn.Module, row: dict[str, Any]) -> dict[str, Tensor]:
    """Loss and gradients, by name."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**row)
    loss.backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return found | {"the loss": loss.detach()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert (found[name] - each).norm() <= 1e-5 * each.norm(), name


def by_the_kernel(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    cu_seq_lens: Tensor,
    document_lengths: Sequence[int] = (),
    longest_document: int = 0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What is run on a GPU."""
    longest = longest_document or max(document_lengths)
    assert scaling is not None
    return attend_on_cuda(query, key, value, cu_seq_lens, longest, scaling, sliding_window), None


def assert_one_graph_a_kind(
    family: str, lora: bool, recomputed: bool, name: str, count: int, backend: Any, graphs: Callable[[], int]
) -> None:
    AttentionInterface.register("by_the_kernel", by_the_kernel)
    model, base = built(family, lora, recomputed, name)
    batches, said = rows(count), list[str]()
    expected = [learned(model, row) for row in batches[:4]]
    compiled = CompiledLayers(required=True, say=said.append, backend=backend)
    compile_layers(base, compiled)
    learned(model, batches[0])
    first = graphs()
    for row, as_written in zip(batches, expected, strict=False):
        assert_same(learned(model, row), as_written)
    for row in batches[4:]:
        assert learned(model, row)["the loss"].isfinite()
    assert first == graphs() == len(compiled.seconds)
    assert first == (2 if family == "gemma3_text" else 1), "one kind of layer, one graph"
    assert said == []
    assert (compiled.stopped, compiled.facts()["layers"]) == (None, True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "lora", "recomputed", "name"),
    [("llama", False, False, attention.NAME), ("gemma3_text", False, True, "by_the_kernel")],
)
def test_one_graph_a_kind_of_layer_whatever_the_lengths(family: str, lora: bool, recomputed: bool, name: str) -> None:
    counting = Counting()
    assert_one_graph_a_kind(family, lora, recomputed, name, 12, counting, lambda: counting.graphs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [attention.NAME, "by_the_kernel"])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_by_inductor(family: str, lora: bool, recomputed: bool, name: str) -> None:
    """200 rows, by the compiler that trains, on a CPU."""
    from torch._dynamo.utils import counters

    counters.clear()
    assert_one_graph_a_kind(family, lora, recomputed, name, 200, "inductor", lambda: counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]


def without_gradients(model: nn.Module, row: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        loss: Tensor = model.eval()(**row)
    return loss


@pytest.mark.thorough
@pytest.mark.parametrize("lora", [False, True])
def test_a_long_pass_without_gradients_has_one_graph_too(lora: bool) -> None:
    model, base = built("llama", lora, True)
    batches, counting = rows(8), Counting()
    expected = [without_gradients(model, row) for row in batches]
    compiled = CompiledLayers(required=True, say=pytest.fail, backend=counting)
    compile_layers(base, compiled)
    for row, as_written in zip(batches, expected, strict=True):
        assert without_gradients(model, row) == as_written
    assert counting.graphs == 0, "an evaluation"
    with compiled.forwards():
        for row, as_written in zip(batches, expected, strict=True):
            assert without_gradients(model, row) == pytest.approx(float(as_written), rel=1e-6)
    assert counting.graphs == 1
    model.train()
    learned(model, batches[0])
    assert counting.graphs == 2, "training has its own"
    assert compiled.stopped is None


@pytest.mark.thorough
@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize(
    ("backend", "reason"),
    [(broken_forward, "no compiler here"), (Faulty("output"), "LlamaDecoderLayer computes something else: output")],
)
def test_a_pass_without_gradients_goes_on_as_written(backend: Any, reason: str) -> None:
    model, base = built("llama", False, False)
    row, said = rows(3)[1], list[str]()
    expected = without_gradients(model, row)
    compiled = CompiledLayers(required=False, say=said.append, backend=backend)
    compile_layers(base, compiled)
    with compiled.forwards():
        assert without_gradients(model, row) == expected
    (line,) = said
    assert reason in line


@pytest.mark.slow
def test_dropout_is_drawn_from_the_steps_seed() -> None:
    """A resumed run draws it again; trying a layer draws none of it."""
    row, (model, base) = rows(3)[1], built("llama", True, False, dropout=0.3)
    expected = learned(model, row)
    compile_layers(base, CompiledLayers(required=True, say=pytest.fail, backend=Counting()))
    first, again = learned(model, row), learned(model, row)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert_same(first, expected)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("backend", "reason"),
    [(broken_forward, "no compiler here"), (broken_backward, "no compiler for the backward")],
)
def test_layers_that_cannot_be_compiled_run_as_they_are_written(backend: Any, reason: str) -> None:
    row = rows(3)[1]
    model, base = built("llama", False, False)
    expected, said = learned(model, row), list[str]()
    compiled = CompiledLayers(required=False, say=said.append, backend=backend)
    compile_layers(base, compiled)
    found = learned(model, row)
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    (line,) = said
    assert line.startswith("training.compile: layers run without it from here on: ")
    assert reason in line
    assert "more lines" not in line
    none = {"layers": False, "kinds_of_layers": 0, "first_seconds": 0, "furthest": None}
    graphs = compiled.facts()["graphs"]
    assert (graphs.pop("folder"), graphs) == (os.environ.get(CACHE_VARIABLE, ""), {"found": 0, "made": 0})
    assert compiled.facts() | {"graphs": None} == none | {"left_off": compiled.stopped, "graphs": None}
    required = CompiledLayers(required=True, say=pytest.fail, backend=backend)
    compile_layers(base, required)
    with pytest.raises(EnvironmentMismatch, match=f"LlamaDecoderLayer cannot be compiled here: .*{reason}.*: auto"):
        learned(model, row)


def kept_for_backward(model: nn.Module, row: dict[str, Any]) -> int:
    """Bytes of distinct storages, without those of parameters."""
    free = {each.untyped_storage().data_ptr() for each in model.parameters()}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**row)
    loss.backward()
    return sum(each.untyped_storage().nbytes() for at, each in held.items() if at not in free)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_a_compiled_layer_keeps_what_it_keeps_as_written(lora: bool) -> None:
    """A graph of torch 2.11 kept the products of adapters, although it computes them again."""
    row = flat_batch([100, 50])
    model, base = built("llama", lora, True)
    model(**row).backward()
    expected = kept_for_backward(model, row)
    compile_layers(base, CompiledLayers(required=True, say=pytest.fail, backend="aot_eager_decomp_partition"))
    model(**row).backward()
    assert kept_for_backward(model, row) <= 1.1 * expected
    assert expected < kept_for_backward(built("llama", lora, False)[0], row) / 4


class _Hoarding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor.repeat(1, 1, 30))
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return slopes[0]


def hoarding(graph: Any, inputs: Any) -> Any:
    return lambda *given: tuple(_Hoarding.apply(each) for each in graph.forward(*given))  # type: ignore[no-untyped-call]


@pytest.mark.thorough
def test_layers_that_keep_much_more_than_as_written_are_not_compiled() -> None:
    row, said = flat_batch([100, 50]), list[str]()
    model, base = built("llama", False, False)
    expected = learned(model, row)
    compiled = CompiledLayers(required=False, say=said.append, backend=hoarding)
    compile_layers(base, compiled)
    found = learned(model, row)
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    (line,) = said
    assert re.search(r": compiled, LlamaDecoderLayer keeps [\d,]+ bytes for backward, as it is written [\d,]+; ", line)
    assert compiled.facts()["left_off"] == compiled.stopped
    required = CompiledLayers(required=True, say=said.append, backend=hoarding)
    compile_layers(base, required)
    learned(model, row)
    with pytest.raises(EnvironmentMismatch, match=r"^training\.compile: true: compiled, .* bytes for backward"):
        required.agree(lambda own: own, CPU)


def test_a_rank_stops_where_another_has() -> None:
    said: list[str] = []
    compiled = CompiledLayers(required=False, say=said.append, applied=True)
    compiled.agree(lambda own: own, CPU)
    assert (compiled.stopped, said) == (None, [])
    compiled.agree(lambda own: own + 1, CPU)
    assert compiled.stopped == "another rank has stopped, for its own reason"
    CompiledLayers(required=False, say=said.append).agree(lambda _: pytest.fail("nothing is compiled"), CPU)
    assert len(said) == 1


def test_what_does_not_train_is_not_compiled() -> None:
    counting, (model, base) = Counting(), built("llama", False, False)
    compile_layers(base, CompiledLayers(required=True, say=pytest.fail, backend=counting))
    with torch.no_grad():
        model(**rows(3)[1])
    model.eval()
    model(**rows(3)[1])
    base.set_attn_implementation("sdpa")
    base.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False)
    base.set_attn_implementation(attention.NAME)
    model.train()
    assert learned(model, flat_batch([1]))["the loss"] == 0  # the row of a rank that has none
    assert counting.graphs == 0


@pytest.mark.thorough
def test_too_many_graphs_are_noticed() -> None:
    """torch would silently run the layers as they are written."""
    counting, said, (model, base) = Counting(), list[str](), built("llama", False, False)
    first, second = rows(3)[:2]
    with torch.autocast("cpu", torch.bfloat16):  # for which there has to be another graph
        expected = learned(model, second)
    compiled = CompiledLayers(required=True, say=said.append, backend=counting)
    compile_layers(base, compiled)
    torch._dynamo.config.recompile_limit = 1
    learned(model, first)
    with torch.autocast("cpu", torch.bfloat16):
        found = learned(model, second)
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert counting.graphs == 1
    (line,) = said
    assert "recompile limit" in line
    assert compiled.facts()["left_off"] == compiled.stopped


@pytest.mark.parametrize("asked", ["plain", "window", "sinks", "cap"])
def test_the_operator_is_the_loop_over_documents_to_the_bit(asked: str) -> None:
    lengths = (5, 20, 1, 13)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, sum(lengths), 8), (1, 2, sum(lengths), 8), (1, 2, sum(lengths), 8), (4,)
    *inputs, sinks = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    options: dict[str, Any] = {"sliding_window": 6} if asked == "window" else {}
    options |= {"s_aux": sinks} if asked == "sinks" else {}
    options |= {"softcap": 2.0} if asked == "cap" else {}
    leaves = [*inputs, *([sinks] if asked == "sinks" else [])]
    found = []
    for given in ({"document_lengths": lengths}, {"longest_document": 32, "document_ends": ends}):
        output, _ = attention.varlen_attention(
            nn.Module(), *inputs, None, cu_seq_lens=ends.int(), scaling=0.7, **options, **given
        )
        slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        found.append([output, *torch.autograd.grad((output * slope).sum(), leaves)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_the_operator_draws_no_dropout() -> None:
    """Recomputed in backward, it would be another one."""
    query, ends = torch.zeros(1, 4, 8, 8), torch.tensor([0, 8])
    given: dict[str, Any] = {"cu_seq_lens": ends.int(), "longest_document": 8, "document_ends": ends, "dropout": 0.1}
    with pytest.raises(FinetuneError, match="no dropout in compiled attention"):
        attention.varlen_attention(nn.Module(), query, query, query, None, **given)


def choose(asked: bool | str, device: torch.device = CARD, name: str = "single", **sections: Any) -> CompiledLayers:
    recipe = half_recipe(training={"compile": asked}, **sections)
    for problem in unfit(recipe, read_strategy(name)):
        raise EnvironmentMismatch(str(problem))
    return compile_as_asked(recipe, read_strategy(name), built("llama", False, False)[1], device, pytest.fail)


INT8 = {"quantization": {"load_in_8bit": True}}


@pytest.mark.parametrize(
    ("asked", "device", "name", "sections", "reason"),
    [
        (False, CARD, "single", {}, "training.compile: false"),
        ("auto", CPU, "single", {}, "on a CPU"),
        ("auto", CARD, "zero3", {}, "zero3 gathers weights inside layers"),
        ("auto", CARD, "ddp", INT8, "8-bit layers"),
        ("auto", CARD, "single", {"model": {"router_aux_loss_coef": 0.01}}, "the router's auxiliary loss"),
    ],
)
def test_what_is_left_off_says_why(
    asked: Any, device: torch.device, name: str, sections: dict[str, Any], reason: str
) -> None:
    left_off = choose(asked, device, name, **sections)
    assert left_off.facts()["left_off"].startswith(reason)
    assert not left_off.applied


@pytest.mark.parametrize(("asked", "device"), [(True, CPU), (True, CARD), ("auto", CARD)])
@pytest.mark.parametrize("name", ["single", "ddp", "fsdp2", "hsdp", "zero1", "zero2"])
def test_where_it_is_compiled(asked: Any, device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "where the user wants it")
    chosen = choose(asked, device, name)
    assert (chosen.applied, chosen.stopped, chosen.required) == (True, None, asked is True)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_before_ampere_only_what_is_asked_for_is_compiled(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers of such a GPU's code may end the process by a signal, which no fallback sees."""
    monkeypatch.setenv(CACHE_VARIABLE, "where the user wants it")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    left_off = choose("auto")
    assert not left_off.applied
    assert left_off.facts()["left_off"] == (
        f"on a GPU of compute capability 7.{capability[1]}; training.compile: auto compiles from 8.0 on"
    )
    assert choose(True).applied


@pytest.mark.parametrize(("name", "sections"), [("zero3", {}), ("single", INT8)])
def test_what_cannot_be_is_refused_in_one_line(name: str, sections: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentMismatch, match=r"^training\.compile: true: .*; set training\.compile: false$"):
        choose(True, name=name, **sections)


def test_architectures_whose_layers_are_no_graph() -> None:
    assert why_not_compiled(built("llama", False, False)[1]) is None
    base = tiny_model()
    run_by_document(base, [Mixer("model.layers.0.mlp", {".0": (1,)}, {"": (1,)})])
    assert why_not_compiled(base) == "LlamaMLP runs on one document after another"
    chunked = tiny_model()
    chunked.config.attention_chunk_size = 8
    assert why_not_compiled(chunked) == "its layers attend in chunks"
    recipe = least_recipe(training={"compile": True})
    with pytest.raises(EnvironmentMismatch, match=r"attend in chunks; set training\.compile: false"):
        choice.compile_as_asked(recipe, read_strategy("single"), chunked, CPU, pytest.fail)


def test_graphs_are_kept_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", "/somewhere")
    environment: dict[str, str] = {}
    assert str(keep_graphs(environment)) == environment[CACHE_VARIABLE] == "/somewhere/compiled"
    users = {CACHE_VARIABLE: "/mine"}
    assert str(keep_graphs(users)) == users[CACHE_VARIABLE] == "/mine"


START = """
import json, sys
from finetune.architecture.compiled.layers import CompiledLayers, compile_layers
from tests.architecture.test_compiled import built, learned, rows
model, base = built("llama", True, False)
compiled = CompiledLayers(required=True, say=print)
compile_layers(base, compiled)
learned(model, rows(3)[1])
print(json.dumps(compiled.facts()))
"""


@pytest.mark.slow
def test_a_second_start_finds_its_graphs(tmp_path: Path) -> None:
    """Forward and backward of the one kind of layer, with adapters, by inductor on a CPU."""
    found = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", START],
            env=os.environ | {CACHE_VARIABLE: str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
        found.append(json.loads(run.stdout.splitlines()[-1]))
    print([each["first_seconds"] for each in found])  # the second start's are the shorter ones
    first, second = (each["graphs"] for each in found)
    assert first == {"found": 0, "made": 2, "folder": str(tmp_path)}
    assert second == {"found": 2, "made": 0, "folder": str(tmp_path)}
