"""Hidden states in host memory: the same bits, two on the device, and copies that are waited for."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.architecture import offloading
from finetune.architecture.compiled.layers import CompiledLayers, compile_layers
from finetune.architecture.own_layers.compute import compute_layers
from finetune.errors import DoesNotFit, EnvironmentMismatch
from finetune.model.build import build_model, decoder_parts
from finetune.model.quantization import unpacked_weight
from tests.support.models.tiny import flat_batch, save_tiny
from tests.support.runs.recipes import least_recipe
from tests.support.stand_ins.compiling import nothing_compiled
from tests.support.stand_ins.late_copies import LateCopies

assert nothing_compiled
CPU, LAYERS = torch.device("cpu"), 5
ROWS = ((60, 41), (7, 12), (30, 9, 50))  # documents of three micro-batches, the longest row first
METHODS: dict[str, dict[str, Any]] = {
    "full": {"lora": None},
    "lora, dropout": {"lora": {"r": 4, "lora_dropout": 0.3}},
    "4 bits": {"lora": {"r": 4}, "quantization": {"load_in_4bit": True}},
}


def model_of(folder: Path, method: str, *, offloads: bool) -> nn.Module:
    training = {"activation_checkpointing": True, "activation_offloading": offloads}
    model = build_model(least_recipe(folder, model={"dtype": "float32"}, training=training, **METHODS[method]), CPU)
    compute_layers(model, unpacked_weight)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw)
    return model.train()


def layers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def buffers_of(model: nn.Module) -> list[Tensor]:
    free: list[Tensor] = layers_of(model)[0].finetune_states_on_host._free
    return free


def trained(model: nn.Module, *, autocast: bool = False, rows: Any = ROWS) -> list[dict[str, Tensor]]:
    """Loss and gradients after each of three micro-batches, which are added up."""
    found = []
    for lengths in rows:
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(**flat_batch(lengths, vocabulary=97))
        loss.backward()
        gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        found.append(gradients | {"the loss": loss.detach()})
    return found


def assert_same_bits(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for here, there in zip(found, expected, strict=True):
        assert here.keys() == there.keys() != set()
        assert [name for name, tensor in here.items() if not torch.equal(tensor, there[name])] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path, num_hidden_layers=LAYERS)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("method", "autocast"), [("full", True), ("4 bits", False), ("lora, dropout", True)])
def test_bitwise_as_on_the_device(folder: Path, method: str, autocast: bool) -> None:
    expected = trained(model_of(folder, method, offloads=False), autocast=autocast)
    model = model_of(folder, method, offloads=True)
    assert_same_bits(trained(model, autocast=autocast), expected)
    assert len(buffers_of(model)) == LAYERS, "later rows take the same buffers"
    assert len({buffer.data_ptr() for buffer in buffers_of(model)}) == LAYERS


def test_two_hidden_states_are_on_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted when a layer begins and in its middle, in forward and in recomputation, and at the head."""
    model = model_of(folder, "lora, dropout", offloads=True)
    alive: dict[str, weakref.ref[torch.UntypedStorage]] = {}
    counted: list[tuple[str, int]] = []

    def note(name: str, tensor: Tensor) -> None:
        alive[name] = weakref.ref(tensor.untyped_storage())

    def count(place: str) -> None:
        phase = "backward" if any(name.startswith("fetched") for name in alive) else "forward"
        names = {name for name, storage in alive.items() if storage() is not None}
        if phase == "forward":  # the model's own forward refers to it
            names.discard("the embeddings' output")
        counted.append((f"{phase}, {place}", len(names)))

    fetched = offloading.StatesOnHost._fetched

    def fetch(states: Any, state: Any) -> Tensor:
        is_new, tensor = state.on_device is None, fetched(states, state)
        if is_new:
            note(f"fetched {len(alive)}", tensor)
        return tensor

    monkeypatch.setattr(offloading.StatesOnHost, "_fetched", fetch)
    parts: Any = decoder_parts(model)
    parts.get_input_embeddings().register_forward_hook(lambda *each: note("the embeddings' output", each[2]))
    for index, layer in enumerate(layers_of(model)):
        layer.register_forward_hook(lambda *each, index=index: note(f"output {index}", each[2]))
        layer.input_layernorm.register_forward_pre_hook(lambda *_: count("beginning"))
        layer.mlp.register_forward_pre_hook(lambda *_: count("middle"))
    parts.lm_head.register_forward_pre_hook(lambda *_: count("head"))
    for lengths in ROWS:
        alive.clear()
        counted.clear()
        model(**flat_batch(lengths, vocabulary=97)).backward()
        assert len(counted) == 2 * 2 * LAYERS + 1
        assert max(number for place, number in counted if place.startswith("forward")) == 1, "and the embeddings'"
        assert [number for place, number in counted if place.startswith("backward")] == [2] * 2 * (LAYERS - 1) + [1, 1]
        assert [storage() for storage in alive.values() if storage() is not None] == []


@pytest.mark.parametrize("method", ["full", "4 bits"])
def test_copies_are_waited_for_and_no_sooner(folder: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in device with streams, on which a copy runs when something waits for it."""
    expected = trained(model_of(folder, method, offloads=False))
    device = LateCopies()
    monkeypatch.setattr(offloading, "copying_module", lambda _: device)
    assert_same_bits(trained(model_of(folder, method, offloads=True)), expected)
    assert len(device.copying.waiting) == 2 * LAYERS * len(ROWS), "each state crosses twice"
    assert device.copying.done == len(device.copying.waiting)


@pytest.mark.parametrize("place", ["_wait_for_copy", "_copy"])
def test_the_stand_in_notices(folder: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the present stream's wait, and without the copying stream's."""
    device = LateCopies()
    monkeypatch.setattr(offloading, "copying_module", lambda _: device)
    if place == "_copy":
        monkeypatch.setattr(type(device.copying), "wait_stream", lambda *_: None)
    else:
        monkeypatch.setattr(offloading.StatesOnHost, place, lambda *_: None)
    model = model_of(folder, "full", offloads=True)

    def run() -> None:
        trained(model)
        device.copying.record_event().run()

    with pytest.raises(AssertionError, match=r"before its copy|does not wait"):
        run()


@pytest.mark.thorough
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("method", ["full", "4 bits"])
def test_compiled_layers(folder: Path, method: str) -> None:
    """Each layer's graph keeps its input, and is compared with the layer as written while its state is sent."""

    def compiled(*, offloads: bool) -> list[dict[str, Tensor]]:
        torch._dynamo.reset()
        model, said = model_of(folder, method, offloads=offloads), list[str]()
        layers = CompiledLayers(required=True, say=said.append, backend="aot_eager")
        compile_layers(decoder_parts(model), layers)
        found = trained(model)
        assert (layers.stopped, len(layers.seconds), said) == (None, 1, [])
        return found

    assert_same_bits(compiled(offloads=True), compiled(offloads=False))


def test_nothing_is_sent_without_gradients(folder: Path) -> None:
    model = model_of(folder, "full", offloads=True)
    with torch.no_grad():
        model(**flat_batch(ROWS[0], vocabulary=97))
    model.eval()
    model(**flat_batch(ROWS[0], vocabulary=97))
    assert buffers_of(model) == []


def test_a_graph_without_backward_gives_its_buffers_back(folder: Path) -> None:
    model = model_of(folder, "full", offloads=True)
    loss = model(**flat_batch(ROWS[0], vocabulary=97))
    assert buffers_of(model) == []
    del loss
    assert len(buffers_of(model)) == LAYERS


def test_longer_rows_take_larger_buffers(folder: Path) -> None:
    rows = sorted(ROWS, key=sum)
    expected = trained(model_of(folder, "full", offloads=False), rows=rows)
    model = model_of(folder, "full", offloads=True)
    assert_same_bits(trained(model, rows=rows), expected)
    assert [buffer.nbytes for buffer in buffers_of(model)] == LAYERS * [max(map(sum, ROWS)) * 64 * 4]


def test_two_graphs_at_once(folder: Path) -> None:
    """Both forwards, then both backwards in either order."""
    found = []
    for offloads in (False, True):
        model = model_of(folder, "full", offloads=offloads)
        first, second = (model(**flat_batch(lengths, vocabulary=97)) for lengths in ROWS[:2])
        first.backward()
        second.backward()
        found.append([{name: each.grad for name, each in model.named_parameters() if each.grad is not None}])
    assert_same_bits(*found)


class Layer(GradientCheckpointingLayer):
    """A layer that does something that cannot be offloaded."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.linear, self.wrong = nn.Linear(8, 8), wrong

    def forward(self, hidden: Tensor) -> Tensor:
        if self.wrong == "changes it":
            hidden.mul_(2)
        return hidden + self.linear(hidden.clone() if self.wrong == "copies it" else hidden)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("names it", "Layer takes its input by name; set it to false"),
        ("changes it", "Layer does not keep its input; set it to false"),
        ("copies it", "Layer does not keep its input; set it to false"),
    ],
)
def test_a_layer_that_cannot_is_an_error(wrong: str, says: str) -> None:
    layer, states = Layer(wrong), offloading.StatesOnHost()
    layer.register_forward_pre_hook(states.begin)
    layer.register_forward_hook(states.end, always_call=True)
    given = {"hidden": torch.ones(1, 3, 8)}
    call = partial(layer, **given) if wrong == "names it" else partial(layer, *given.values())
    with pytest.raises(EnvironmentMismatch, match=says):
        call()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "the hooks are gone"


def test_a_layer_that_fails_leaves_no_hooks() -> None:
    layer, states = Layer(""), offloading.StatesOnHost()
    layer.register_forward_pre_hook(states.begin)
    layer.register_forward_hook(states.end, always_call=True)
    with pytest.raises(RuntimeError, match="shapes"):
        layer(torch.ones(1, 3, 9))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_no_room_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(folder, "full", offloads=True)
    batch = flat_batch(ROWS[0], vocabulary=97)
    empty = torch.empty

    def fail(*size: Any, **options: Any) -> Tensor:
        if options.get("dtype") == torch.uint8:
            raise RuntimeError("CUDA error: out of memory\nlong")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(DoesNotFit) as refusal:
        model(**batch)
    assert str(refusal.value).startswith("training.activation_offloading: no room for 0.00 GiB of pinned host memory; ")
