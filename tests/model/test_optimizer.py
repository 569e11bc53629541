"""Each optimizer is the one asked for, says what its state is made of, and continues from a checkpoint bitwise."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from torch import nn

from finetune.errors import FinetuneError
from finetune.model.build import build_model
from finetune.model.optimizer import (
    call_after_first_step,
    make_optimizer,
    optimizer_state_elements,
    set_learning_rate,
)
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.strategy import read_strategy
from finetune.recipe.strategy_fit import pages_problem, unfit
from finetune.run_folder.checkpoint import newest_valid, read_checkpoint, write_checkpoint
from finetune.run_folder.trained_tensors import load_model, load_optimizer, model_tensors, optimizer_tensors
from finetune.strategies.packages import missing_packages
from finetune.train import main
from tests.support.models.tiny import write_chats
from tests.support.runs.one_curve import write_curve_recipe
from tests.support.runs.recipes import least_recipe
from tests.support.runs.stepping import float32_recipe

BITSANDBYTES = [name for name, spec in OPTIMIZERS.items() if spec.bitsandbytes_class]


class Network(nn.Module):
    """An embedding, a matrix of 16,384 elements, one of 512, and a norm of 4,096."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(100, 64)
        self.large = nn.Linear(64, 256, bias=False)
        self.small = nn.Linear(256, 2, bias=False)
        self.norm = nn.LayerNorm(4096, bias=False)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in network.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def build(optim: str, folder: Path) -> tuple[Network, torch.optim.Optimizer]:
    network = Network()
    return network, make_optimizer(network, float32_recipe(folder, optim=optim, learning_rate=1e-2, weight_decay=0.1))


def formats(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of the first moment, by parameter."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return {
        names[id(parameter)]: str(state.get("state1", state.get("exp_avg")).dtype)
        for parameter, state in optimizer.state.items()
    }


def test_fused_adamw_keeps_float32_moments(tmp_path: Path) -> None:
    network, optimizer = build("adamw", tmp_path)
    assert not optimizer_state_elements(optimizer)
    train(network, optimizer, 1, seed=0)
    assert all(group["fused"] for group in optimizer.param_groups)
    assert list(optimizer_state_elements(optimizer)) == ["float32"]


def test_8_bits_are_for_large_matrices_alone(tmp_path: Path) -> None:
    """The CPU kernel is real: one byte a moment, and the curve of AdamW within what a byte can say."""
    network, optimizer = build("adamw_8bit", tmp_path)
    plain, reference = build("adamw", tmp_path)
    train(network, optimizer, 10, seed=0)
    train(plain, reference, 10, seed=0)
    assert formats(network, optimizer) == {
        "embedding.weight": "torch.float32",
        "large.weight": "torch.uint8",
        "small.weight": "torch.float32",
        "norm.weight": "torch.float32",
    }
    assert [name for name, _ in optimizer_state_elements(optimizer).most_common()] == ["uint8", "float32"]
    start = Network()
    for name, parameter in network.named_parameters():
        moved = parameter - start.get_parameter(name)
        difference = parameter - plain.get_parameter(name)
        assert difference.norm() < (0.05 if name == "large.weight" else 1e-5) * moved.norm(), name


def test_rows_of_new_tokens_are_in_float32_as_embeddings_are(tmp_path: Path, tiny_llama: Path) -> None:
    """70 rows of 64, more than the 4,096 elements from which on bitsandbytes takes 8 bits."""
    model = {"dtype": "float32", "add_tokens": [f"<{number}>" for number in range(70)]}
    recipe = least_recipe(tiny_llama, model=model, training={"optim": "adamw_8bit"}, lora={"r": 64})
    network = build_model(recipe, torch.device("cpu"))
    optimizer = make_optimizer(network, recipe)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    kinds = formats(network, optimizer)
    assert {kind for name, kind in kinds.items() if "trainable_tokens_delta" in name} == {"torch.float32"}
    assert "torch.uint8" in kinds.values()


def test_exceptions_of_another_run_are_forgotten(tmp_path: Path) -> None:
    network, _ = build("adamw_8bit", tmp_path)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.override_config(list(network.parameters()), "optim_bits", 32)  # as if identities were used again
    optimizer = make_optimizer(network, float32_recipe(tmp_path, optim="adamw_8bit"))
    train(network, optimizer, 1, seed=0)
    assert formats(network, optimizer)["large.weight"] == "torch.uint8"


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("optim", ["adamw", *BITSANDBYTES])
def test_three_steps_are_adamws_by_definition(optim: str, tmp_path: Path) -> None:
    """Loshchilov and Hutter 2019, algorithm 2, in float64, with constants that are nobody's default."""
    constants = {"adam_beta1": 0.6, "adam_beta2": 0.7, "adam_epsilon": 0.1}
    network = Network()
    settings = constants | {"optim": optim, "learning_rate": 1e-2, "weight_decay": 0.1}
    optimizer = make_optimizer(network, float32_recipe(tmp_path, **settings))
    start = Network()
    expected = {name: weight.detach().double() for name, weight in start.named_parameters()}
    mean, square = ({name: torch.zeros_like(weight) for name, weight in expected.items()} for _ in range(2))
    draws = torch.Generator().manual_seed(5)
    for step in (1, 2, 3):
        for name, parameter in network.named_parameters():
            gradient = torch.randn(parameter.shape, generator=draws)
            parameter.grad, gradient = gradient, gradient.double()
            mean[name] = 0.6 * mean[name] + 0.4 * gradient
            square[name] = 0.7 * square[name] + 0.3 * gradient**2
            unbiased = mean[name] / (1 - 0.6**step), square[name] / (1 - 0.7**step)
            decay = 0.1 if parameter.ndim > 1 else 0.0
            update = unbiased[0] / (unbiased[1].sqrt() + 0.1) + decay * expected[name]
            expected[name] = expected[name] - 1e-2 * update
        optimizer.step()
    for name, parameter in network.named_parameters():
        moved = (expected[name] - start.get_parameter(name)).norm()
        allowed = 0.05 if "8bit" in optim and name == "large.weight" else 1e-5  # what a moment of one byte can say
        assert (parameter - expected[name]).norm() < allowed * moved, name


def test_bfloat16_alone_is_rounded_at_random_by_the_recipes_seed(tmp_path: Path) -> None:
    def updated(seed: int) -> torch.Tensor:
        network = Network().bfloat16()
        pure = float32_recipe(tmp_path, mixed_precision="bf16", pure_bf16=True, seed=seed)
        optimizer = make_optimizer(network, pure)
        for parameter in network.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return network.get_parameter("large.weight").detach()

    assert torch.equal(updated(1), updated(1))
    assert not torch.equal(updated(1), updated(2))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lora_plus_is_pefts(decay: float, tiny_llama: Path) -> None:
    """Rates and three updates of peft's own optimizer; its weight decay is that of A and B alike, as ours."""
    plain = {"mixed_precision": "no", "activation_checkpointing": False, "learning_rate": 1e-2, "weight_decay": decay}
    lora = {"r": 4, "loraplus_lr_ratio": 16.0}
    asked = least_recipe(tiny_llama, model={"dtype": "float32"}, lora=lora, training=plain)
    ours, theirs = (build_model(asked, torch.device("cpu")) for _ in range(2))
    settings = {"lr": 1e-2, "loraplus_lr_ratio": 16.0, "loraplus_weight_decay": decay}
    optimizer = make_optimizer(ours, asked)
    reference = create_loraplus_optimizer(theirs, torch.optim.AdamW, **settings)
    start, theirs_by_name = (
        {name: each.clone() for name, each in ours.named_parameters()},
        dict(theirs.named_parameters()),
    )
    for _ in range(3):
        set_learning_rate(optimizer, 1e-2)
        for name, parameter in ours.named_parameters():
            if parameter.requires_grad:
                parameter.grad = theirs_by_name[name].grad = torch.randn(parameter.shape)
        optimizer.step()
        reference.step()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, theirs_by_name[name], rtol=1e-5, atol=1e-7)
        assert parameter.requires_grad != torch.equal(parameter, start[name])
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2, 0.16}
    set_learning_rate(optimizer, 5e-3)
    assert {group["lr"] for group in optimizer.param_groups} == {5e-3, 0.08}


def test_decay_reaches_matrices_alone(tmp_path: Path) -> None:
    for optim in ("adamw", "adamw_8bit"):
        _, optimizer = build(optim, tmp_path)
        by_decay = {group["weight_decay"]: len(group["params"]) for group in optimizer.param_groups}
        assert by_decay == {0.1: 3, 0.0: 1}


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("optim", ["adamw", *BITSANDBYTES])
def test_it_continues_bitwise(optim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under bitsandbytes the state is in its own buffers (a paged one in its pages) and shares its code books."""
    network, optimizer = build(optim, tmp_path)
    train(network, optimizer, 3, seed=1)
    groups = {"model": model_tensors(network), "optimizer": optimizer_tensors(network, optimizer)}
    folder = write_checkpoint(tmp_path, 3, groups, {}, keep=1)
    newest, _ = newest_valid(tmp_path)
    assert newest is not None
    saved, _ = read_checkpoint(newest)

    pages: list[torch.Tensor] = []
    again, resumed = build(optim, tmp_path)
    if optim in BITSANDBYTES:
        own = resumed.get_state_buffer
        monkeypatch.setattr(resumed, "get_state_buffer", lambda *a, **k: (pages.append(own(*a, **k)), pages[-1])[1])
    load_model(again, saved["model"])
    load_optimizer(again, resumed, saved["optimizer"])
    if optim in BITSANDBYTES:
        assert len(pages) == 8
        states = list(resumed.state.values())
        assert all(any(state[key] is page for page in pages) for state in states for key in ("state1", "state2"))
    if optim.endswith("8bit"):
        stored = {"qmap1", "qmap2", "absmax1", "absmax2"}
        assert stored <= {key.split(":")[1] for key in saved["optimizer"]}
        assert (folder / "optimizer-00000.safetensors").stat().st_size < 130_000  # in float32: 225,000
        books = [state["qmap1"] for state in states if "qmap1" in state]
        assert books
        assert all(book is resumed.name2qmap["dynamic"] for book in books)
    train(network, optimizer, 3, seed=2)
    train(again, resumed, 3, seed=2)
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
        for key, value in optimizer.state[parameter].items():
            other = resumed.state[again.get_parameter(name)][key]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def test_state_of_another_kind_is_refused(tmp_path: Path) -> None:
    network, optimizer = build("adamw_8bit", tmp_path)
    train(network, optimizer, 1, seed=1)
    tensors = optimizer_tensors(network, optimizer)
    tensors["large.weight:absmax1"] = tensors["large.weight:absmax1"][:3]
    other, resumed = build("adamw_8bit", tmp_path)
    with pytest.raises(FinetuneError, match="absmax1"):
        load_optimizer(other, resumed, tensors)
    tensors["large.weight:state1"] = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(FinetuneError, match="state1: shape"):
        load_optimizer(other, resumed, tensors)


@pytest.mark.parametrize(("optim", "remedy"), [("paged_adamw_8bit", "adamw_8bit"), ("paged_adamw_32bit", "adamw")])
def test_pages_are_refused_on_a_cpu(optim: str, remedy: str) -> None:
    """bitsandbytes would take its plain class instead, with a warning."""
    problem = pages_problem(least_recipe(training={"optim": optim}))
    assert problem.endswith(f"training.optim={remedy}")
    assert "\n" not in problem
    for other in ("adamw", "adamw_8bit"):
        assert pages_problem(least_recipe(training={"optim": other})) == ""


@pytest.mark.parametrize(("optim", "remedy"), [("paged_adamw_8bit", "adamw_8bit"), ("paged_adamw_32bit", "adamw")])
def test_shards_are_refused(optim: str, remedy: str) -> None:
    sharded = read_strategy("fsdp2")
    (line,) = map(str, unfit(least_recipe(training={"optim": optim}), sharded))
    assert f"training.optim={remedy}, " in line
    assert line.endswith("ddp")
    assert list(unfit(least_recipe(training={"optim": remedy}), sharded)) == []


@pytest.mark.parametrize("optim", BITSANDBYTES)
def test_without_bitsandbytes_the_line_to_install_it(optim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    single, sharded = read_strategy("single"), read_strategy("fsdp2")
    assert "pip install" in missing_packages(least_recipe(training={"optim": optim}), single)
    assert missing_packages(least_recipe(training={"optim": "adamw"}), single) == ""
    assert missing_packages(least_recipe(training={"optim": "adamw_8bit"}), sharded) == ""  # the kit's own


def test_the_state_is_reported_once_it_exists(tmp_path: Path) -> None:
    states: list[Counter[str]] = []
    network, optimizer = build("adamw_8bit", tmp_path)
    call_after_first_step(optimizer, states.append)
    assert states == []
    train(network, optimizer, 3, seed=1)
    assert [set(formats) for formats in states] == [{"uint8", "float32"}]
    assert states[0].total() == 2 * sum(parameter.numel() for parameter in network.parameters())
    call_after_first_step(optimizer, states.append)
    assert states[1] == states[0]


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize(("optim", "state"), [("adamw", "float32"), ("adamw_8bit", "uint8, float32")])
def test_a_run_says_what_its_state_is(optim: str, state: str, tiny_llama: Path, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", [40, 50, 60, 70])
    changes: dict[str, Any] = {"optim": optim, "max_steps": 2, "global_batch_size": 2, "per_device_batch_size": 2}
    path = write_curve_recipe(tmp_path, tiny_llama, chats, "full", {"training": changes})
    assert main([str(path)]) == 0
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert receipt["dtypes"]["optimizer_state"] == state


def test_bitsandbytes_has_the_classes() -> None:
    """Names that only a GPU would else look up."""
    for name in BITSANDBYTES:
        spec = OPTIMIZERS[name]
        assert spec.bitsandbytes_class is not None
        assert issubclass(getattr(bitsandbytes.optim, spec.bitsandbytes_class), torch.optim.Optimizer)
