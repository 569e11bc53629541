"""The optimizer that a recipe names, its state and its learning rate."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from finetune.errors import RecipeError
from finetune.model.dtypes import dtype_name
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe, Training
from finetune.wording import counted

if TYPE_CHECKING:
    from finetune.model.optimizers.rounded_adamw import LocalPart

RATE_RATIO = "rate_ratio"  # of a parameter group: its learning rate over the step's


def make_optimizer(model: nn.Module, recipe: Recipe, local_part: LocalPart | None = None) -> torch.optim.Optimizer:
    """AdamW over the trained weights, with the recipe's betas, epsilon and decay. Only matrices decay.

    Biases and norms are vectors and do not decay, as in transformers' Trainer. The loop writes each step's learning
    rate into the groups.

    Args:
        local_part: Passed to RoundedAdamW (`pure_bf16`) and to BlockwiseAdamW, which updates shards; None: no rank
            has a shard.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training, decay = recipe.training, recipe.training.weight_decay
    groups: list[dict[str, Any]] = [{"params": trained}]
    if decay:  # else one group: the fused kernel runs once for each
        groups = [
            {"params": [p for p in trained if _dimensions(p) >= 2], "weight_decay": decay},
            {"params": [p for p in trained if _dimensions(p) < 2], "weight_decay": 0.0},
        ]
    if recipe.lora and recipe.lora.loraplus_lr_ratio:
        # LoRA+ (Hayou et al., LoRA+: Efficient Low Rank Adaptation of Large Models, 2024): B learns faster than A.
        b = {
            id(parameter) for name, parameter in model.named_parameters() if re.search(r"\.lora_(embedding_)?B\.", name)
        }
        rest = [group | {"params": [p for p in group["params"] if id(p) not in b]} for group in groups]
        faster = [
            group | {"params": [p for p in group["params"] if id(p) in b], RATE_RATIO: recipe.lora.loraplus_lr_ratio}
            for group in groups
        ]
        groups = [*rest, *faster]
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
        "weight_decay": 0.0,
    }
    own_part: dict[str, Any] = {} if local_part is None else {"local_part": local_part}
    spec = OPTIMIZERS[training.optim]
    if spec.bitsandbytes_class is not None:
        # Float32 moments where others have one byte: every vector, because a norm in Llama 3 8B has 4,096 elements, and
        # embeddings, because their rows are as uneven as words (transformers does the same).
        embeddings: list[torch.Tensor] = [
            module.weight for module in model.modules() if isinstance(module, nn.Embedding)
        ]
        embeddings += [p for name, p in model.named_parameters() if ".trainable_tokens_delta." in name]  # rows of such
        vectors = [parameter for parameter in model.parameters() if _dimensions(parameter) < 2]
        in_float32 = [parameter for parameter in (*embeddings, *vectors) if parameter.requires_grad]
        if any(isinstance(parameter, DTensor) for parameter in trained):
            from finetune.model.optimizers.blockwise_adamw import BlockwiseAdamW

            settings |= {"seed": training.seed} | own_part
            return BlockwiseAdamW(groups, in_float32=in_float32, **settings)
        import bitsandbytes

        library: Any = bitsandbytes.optim
        # bitsandbytes keeps one list of exceptions for the whole process, by a parameter's identity. A new parameter
        # may have the identity of one that is gone.
        manager = library.GlobalOptimManager.get_instance()
        for group in groups:
            for parameter in group["params"]:
                manager.pid2config.pop(id(parameter), None)
        if in_float32:  # with 8 bits it keeps tensors under 4,096 elements in float32 by itself
            manager.override_config(in_float32, "optim_bits", 32)
        optimizer: torch.optim.Optimizer = getattr(library, spec.bitsandbytes_class)(groups, **settings)
        return optimizer
    if training.pure_bf16:
        from finetune.model.optimizers.rounded_adamw import RoundedAdamW

        return RoundedAdamW(groups, seed=training.seed, **own_part, **settings)
    # Fused: one kernel for all parameters; on a CPU too.
    return torch.optim.AdamW(groups, **settings, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the next update's rate. In a group with a ratio, the rate is multiplied by it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE_RATIO, 1.0)


def allocate_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Allocate these parameters' state as the optimizer's first step would; loading then fills it in place.

    bitsandbytes allocates its own pages and code books, and BlockwiseAdamW its own state. torch's optimizers take any
    tensor as state, so nothing is done for them.
    """
    inner = unwrap_optimizer(optimizer)
    if not hasattr(inner, "init_state"):
        return
    chosen = {id(parameter) for parameter in parameters}
    for group_index, group in enumerate(inner.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) in chosen:
                inner.init_state(group, parameter, group_index, index)


def allocate_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state that the first update would allocate: 8 bytes per trained weight for AdamW's float32 moments.

    torch's optimizers allocate only within `step`. So this is an update with zero gradients at learning rate 0, which
    changes no weight; step counts grow by one. An optimizer that has state already is left as it is.
    """
    inner = unwrap_optimizer(optimizer)
    if inner.state:
        return
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    inner.step()
    inner.zero_grad()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate


def call_after_first_step(optimizer: torch.optim.Optimizer, callback: Callable[[Counter[str]], None]) -> None:
    """Call `callback` with `optimizer_state_elements` once a state exists: now if resumed, else after a step."""
    if elements := optimizer_state_elements(optimizer):
        callback(elements)
        return

    def look(*_: Any) -> None:
        hook.remove()
        callback(optimizer_state_elements(optimizer))

    hook = unwrap_optimizer(optimizer).register_step_post_hook(look)


def optimizer_state_elements(optimizer: torch.optim.Optimizer) -> Counter[str]:
    """Elements of moments that this rank holds, by number format; none before the first step.

    Moments are state with their parameter's shape. Step counts, block maxima and code books are not. An engine that
    keeps them elsewhere (on disk) holds none.
    """
    count: Counter[str] = Counter()
    for parameter, state in unwrap_optimizer(optimizer).state.items():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim:
                local = value.to_local() if isinstance(value, DTensor) else value
                count[dtype_name(value.dtype)] += local.numel()
    return count


def formats(elements: Counter[str]) -> str:
    """Number formats, the most frequent first."""
    return ", ".join(name for name, _ in elements.most_common()) or "none"


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer that holds the state, inside Accelerate's wrapper and an engine's own."""
    inner: Any = optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    return inner


def _dimensions(parameter: nn.Parameter) -> int:
    """The unsharded parameter's number of dimensions: ZeRO-3 leaves an empty vector in its place."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


class Schedule:
    """The learning rate for steps 0 to `total_steps - 1`, above 0 in the first and the last.

    transformers builds the shape around a throw-away optimizer with one parameter; only its lambda is kept. Raises
    RecipeError if the shape refuses its arguments, the warmup is longer than the run, or steps at either end would
    train nothing.
    """

    def __init__(self, training: Training, total_steps: int) -> None:
        self._highest, self._warmup = training.learning_rate, training.warmup_of(total_steps)
        if self._warmup > total_steps:
            remedy = f"set training.warmup_steps to at most {total_steps}, or train for more steps"
            longer = f"a warmup of {counted(self._warmup, 'step')} is longer than the run of {total_steps:,}"
            raise RecipeError([f"training.warmup_steps: {longer}; {remedy}"])
        # transformers' factor of each step, 1 at the highest rate.
        carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
        try:
            scheduler = get_scheduler(
                training.lr_scheduler_type,
                carrier,
                num_warmup_steps=self._warmup,
                # Given both, transformers takes the stable steps and warns.
                num_training_steps=None if "num_stable_steps" in training.lr_scheduler_kwargs else total_steps,
                scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs),
            )
        except (TypeError, ValueError) as error:
            place = "training.lr_scheduler_kwargs"
            raise RecipeError(
                [f"{place}: {training.lr_scheduler_type} refuses these: {error}; correct them"]
            ) from error
        assert isinstance(scheduler, LambdaLR)
        factor: Callable[[int], float] = scheduler.lr_lambdas[0]
        self._factor = factor
        # With rate 0, the first or the last steps would cost time and train nothing.
        moving = next((step for step in range(total_steps) if self.rate(step) > 0), None)
        if moving == 0 and self.rate(total_steps - 1) > 0:
            return
        if moving is None:
            steps = counted(total_steps, "step")
            problem = f"the highest rate of all {steps} is 0 (learning_rate {training.learning_rate:g})"
        else:
            ended = next(step for step in range(total_steps - 1, -1, -1) if self.rate(step) > 0)
            first, until = (1, moving) if moving else (ended + 2, total_steps)
            problem = f"the rate of steps {first:,} to {until:,} of {total_steps:,} is 0"
        remedy = "correct training.lr_scheduler_kwargs or training.learning_rate, or train for another number of steps"
        raise RecipeError([f"training.lr_scheduler_type: {training.lr_scheduler_type}: {problem}; {remedy}"])

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        if step >= self._warmup:
            return self._highest * float(self._factor(step))
        # The shape is at its top at (warmup / warmup); what it makes of step `warmup` belongs to the decay.
        return self._highest * (1.0 if step + 1 == self._warmup else float(self._factor(step + 1)))
