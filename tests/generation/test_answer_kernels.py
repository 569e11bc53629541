"""Adapters in the base's number format, or merged, for answering: fewer kernels for each token, the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.finished_run import answer_with_fewer_kernels, models_of
from finetune.finished_run import finished_run as open_finished
from finetune.generation.settings import answering
from tests.support.runs.finished import finished_run

# Operations that only describe a tensor anew.
NO_KERNEL = (
    "view", "detach", "transpose", "aten.t.", "expand", "empty", "alias", "slice", "squeeze", "permute", "split",
    "as_strided", "select",
)  # fmt: skip
LAYERS = 2


class Kernels(TorchDispatchMode):  # torch's documented way, under a private module's name
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(word in str(function) for word in NO_KERNEL)
        return function(*args, **(kwargs or {}))


def decode(model: Any) -> tuple[int, Tensor]:
    """The kernels of one decode step, and its logits."""
    prompt = torch.tensor([[7, 300, 41, 9], [5, 6, 90, 411]])
    with answering(model):
        first = model(input_ids=prompt, use_cache=True)
        with Kernels() as kernels:
            logits = model(input_ids=prompt[:, :1], past_key_values=first.past_key_values, use_cache=True).logits
    return kernels.count, logits.float()


@pytest.mark.sample(1, thorough=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dtype", "less", "tolerance"), [("bfloat16", 29, 0.04), ("float32", 13, 1e-4)], ids=["cast", "merged"]
)
def test_a_decode_step_takes_fewer_kernels(
    dtype: str, less: int, tolerance: float, tmp_path: Path, tiny_llama: Path
) -> None:
    run = finished_run(tmp_path, tiny_llama, model={"dtype": dtype}, lora={"target_modules": "all-linear"})
    models = models_of(open_finished(run), torch.device("cpu"), with_loss=True)
    _, model = next(models)
    _, of_base = decode(model)
    _, model = next(models)
    before, expected = decode(model)
    answer_with_fewer_kernels(model)
    answer_with_fewer_kernels(model)  # each question asks for it
    after, logits = decode(model)
    assert before - after == less * LAYERS
    assert float((expected - of_base).norm()) > 0.1 * float(of_base.norm()), "the adapter changes answers"
    assert float((logits - expected).norm()) < tolerance * float((expected - of_base).norm())


@pytest.mark.filterwarnings("ignore")
def test_over_four_bits_nothing_changes(tmp_path: Path, tiny_llama: Path) -> None:
    run = finished_run(tmp_path, tiny_llama, quantization={"load_in_4bit": True})
    *_, (_, model) = models_of(open_finished(run), torch.device("cpu"), with_loss=True)
    before, expected = decode(model)
    answer_with_fewer_kernels(model)
    after, logits = decode(model)
    assert before == after
    assert torch.equal(logits, expected)
