"""16-bit copies of float32 weights: what is computed with them, when their gradients are passed on, and what is left
of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from finetune.architecture.loss import put_loss_into_forward
from finetune.architecture.recomputation import checkpoint_layers
from finetune.recipe.schema import Lora, Recipe
from finetune.recipe.strategy import read_strategy
from finetune.training.batch_plan import BatchPlan
from finetune.training.cast_weights import AS_THEY_ARE, CastWeights, cast_weights
from finetune.training.loop import evaluate
from finetune.training.objectives.supervised import Supervised
from finetune.training.step import optimizer_step
from tests.support.models.tiny import Documents, flat_batch, tiny_model
from tests.support.runs.recipes import half_recipe
from tests.support.runs.stepping import step_parts

BATCHES = [flat_batch([9, 8], seed=seed) for seed in range(3)]
TOKENS = sum(len(batch["supervised"]) for batch in BATCHES)


def built(*, tied: bool, recomputed: bool = False, half: bool = False) -> PreTrainedModel:
    """The same each time; `half`: with bfloat16 weights, its buffers as they are."""
    model = tiny_model(tie_word_embeddings=tied)
    model.config.use_cache = False
    put_loss_into_forward(model)
    if recomputed:
        checkpoint_layers(model, 1)
    for parameter in model.parameters() if half else ():
        parameter.data = parameter.data.bfloat16()
    return model.train()


def step(model: PreTrainedModel, weights: CastWeights) -> None:
    """Gradients of a step over BATCHES, with an update that changes nothing."""
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    optimizer_step(
        step_parts(accelerator, model, KeepsGradients(model.parameters()), max_grad_norm=None, weights=weights),
        iter(BATCHES),
        micro_steps=len(BATCHES),
        planned_count=TOKENS,
        seed=None,
        stop=False,
    ).result()


class KeepsGradients(torch.optim.SGD):
    def step(self, closure: Any = None) -> None: ...  # type: ignore[override]

    def zero_grad(self, set_to_none: bool = True) -> None: ...


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_sums_in_float32_of_the_bfloat16_models(tied: bool, recomputed: bool) -> None:
    model = built(tied=tied, recomputed=recomputed)
    half, expected = built(tied=tied, recomputed=recomputed, half=True), dict[str, Tensor]()
    for batch in BATCHES:
        half.zero_grad()
        (half(**batch) / TOKENS).backward()
        for name, parameter in half.named_parameters():
            assert parameter.grad is not None
            expected[name] = expected.get(name, 0) + parameter.grad.float()
    step(model, CastWeights(model, torch.bfloat16))
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, expected[name]), name


def test_the_parameters_are_in_their_places_afterwards() -> None:
    model = built(tied=True)
    before = list(model.named_parameters(remove_duplicate=False))
    weights = CastWeights(model, torch.bfloat16)
    with weights.cast():
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == [name for name, _ in before]
    with pytest.raises(ZeroDivisionError), weights.cast():
        1 // 0  # noqa: B018
    after = list(model.named_parameters(remove_duplicate=False))
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(now is then for (_, now), (_, then) in zip(after, before, strict=True))


class Casts(TorchDispatchMode):
    """Counts the casts of tensors of each shape from float32 to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].dtype, result.dtype) == (torch.float32, torch.bfloat16):
            self.shapes[tuple(result.shape)] += 1
        return result


def test_each_weight_is_cast_once_a_step_and_hidden_states_are_bfloat16() -> None:
    model, hidden = built(tied=False, recomputed=True), list[torch.dtype]()
    model.model.layers[1].register_forward_pre_hook(lambda _, given: hidden.append(given[0].dtype))
    with Casts() as casts:
        step(model, CastWeights(model, torch.bfloat16))
    matrices = Counter(tuple(parameter.shape) for parameter in model.parameters() if parameter.ndim == 2)
    matrices[tuple(model.lm_head.weight.shape)] += len(BATCHES)  # the head's gradient, which the loss sums in float32
    assert {shape: casts.shapes[shape] for shape in matrices} == matrices
    assert set(hidden) == {torch.bfloat16}


def test_a_gradient_is_passed_on_as_soon_as_backward_has_it() -> None:
    """Else those of all weights would wait in bfloat16 to the end of backward, and DDP could not reduce any before."""
    model, copies, there = built(tied=False), dict[str, Tensor](), list[dict[str, bool]]()
    weights = CastWeights(model, torch.bfloat16, copies.__setitem__)
    last = [name for name, _ in model.named_parameters() if name.startswith(("model.layers.1.", "lm_head"))]

    def look(_: Tensor) -> None:
        assert not any(copy.grad is not None for copy in copies.values())
        there.append({name: model.get_parameter(name).grad is not None for name in last})

    def look_at(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(look)

    handle = model.model.layers[0].register_forward_hook(look_at)
    masters = dict(model.named_parameters())
    model.get_parameter = masters.__getitem__  # type: ignore[method-assign,assignment]  # the float32 ones
    step(model, weights)
    handle.remove()
    assert there[0] == dict.fromkeys(last, True)


def test_an_evaluation_computes_with_copies_too() -> None:
    model, rows = built(tied=False), Documents([5, 9, 7])
    plan = BatchPlan(3, 3, 1, 3, 3, world_size=1, rank=0, seed=0, flat=True)
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    expected = evaluate(accelerator, built(tied=False, half=True), rows, plan, Supervised())
    assert (
        evaluate(accelerator, model, rows, plan, Supervised(), weights=CastWeights(model, torch.bfloat16)) == expected
    )
    assert evaluate(accelerator, model, rows, plan, Supervised()) != expected
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "strategy", "copied"),
    [
        ({}, "single", True),
        ({}, "ddp", True),
        ({}, "fsdp2", False),
        ({}, "zero1", False),
        ({"training": {"mixed_precision": "fp16"}}, "single", True),
        ({"training": {"mixed_precision": "no"}}, "single", False),
        ({"training": {"pure_bf16": True}}, "ddp", False),
        ({"lora": Lora()}, "ddp", False),
    ],
)
def test_where_there_are_copies(tmp_path: Path, changes: dict[str, Any], strategy: str, copied: bool) -> None:
    recipe: Recipe = half_recipe(tmp_path, **({"lora": None} | changes))
    model = nn.Linear(2, 2)
    half = torch.float16 if recipe.training.mixed_precision == "fp16" else torch.bfloat16
    with cast_weights(recipe, read_strategy(strategy), model).cast():
        assert model.weight.dtype == (half if copied else torch.float32)
    with AS_THEY_ARE.cast():
        assert model.weight.dtype == torch.float32
