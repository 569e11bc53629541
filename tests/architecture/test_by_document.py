"""Layers with a state, run on one document of a row after another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.architecture.by_document import Mixer, run_by_document, run_document_by_document
from finetune.architecture.recomputation import checkpoint_layers
from finetune.errors import FinetuneError
from tests.support.models.tiny import flat_batch

LENGTHS = (3, 1, 4)
TOKENS = sum(LENGTHS)


class Scan(nn.Module):
    """In an MLP's place: the sum of everything before, of the hidden states and of what comes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(16)), list[Any]()

    def forward(self, hidden: Tensor, pairs: tuple[Tensor, Tensor | None] | None = None, **others: Any) -> Any:
        self.seen.append((hidden.shape[1], others))
        total = (hidden * self.weight).cumsum(1)
        return total if pairs is None else (total, {"kept": 1}, [None if pairs is None else pairs[0].cumsum(-1)])


def model_with_scan() -> tuple[LlamaForCausalLM, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=97
    )
    model = LlamaForCausalLM(config)
    scan = model.model.layers[1].mlp = Scan()
    inputs = {".0": (1,), ".pairs.0": (0,), ".mask": (1, 2), ".cu_seq_lens": ()}
    run_by_document(model, [Mixer("model.layers.1.mlp", inputs, {"": (1,), ".0": (1,), ".2.0": (0,)})])
    return model, scan


def run(model: LlamaForCausalLM, lengths: tuple[int, ...] | None) -> Tensor:
    batch = flat_batch(LENGTHS, vocabulary=97)
    given = {"document_lengths": lengths} if lengths else {}
    hidden: Tensor = model.model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, **given)[0]
    return hidden


def test_each_document_by_itself_and_the_whole_row_without_lengths() -> None:
    model, scan = model_with_scan()
    run(model, LENGTHS)
    assert [tokens for tokens, _ in scan.seen] == list(LENGTHS)
    scan.seen.clear()
    whole = run(model, None)
    assert [tokens for tokens, _ in scan.seen] == [TOKENS]
    assert not torch.equal(whole, run(model, LENGTHS))
    assert run_document_by_document(model) == [scan]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_documents_of_their_own_forward(checkpointing: bool) -> None:
    """Also where another row went through the model before backward, and the layer runs again."""
    model, scan = model_with_scan()
    model.train()
    expected = run(model, LENGTHS).square().sum()
    expected.backward()
    gradient, scan.weight.grad = scan.weight.grad, None
    if checkpointing:
        checkpoint_layers(model, every=1)
    loss = run(model, LENGTHS).square().sum()
    run(model, (5, 3))
    loss.backward()
    assert torch.equal(scan.weight.grad, gradient)


def test_what_comes_by_name_is_cut_and_what_is_nested_joined() -> None:
    model, scan = model_with_scan()
    run(model, LENGTHS)
    scan.seen.clear()
    mask = torch.arange(TOKENS * TOKENS).view(1, TOKENS, TOKENS)
    ends = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    total, kept, (summed,) = scan(
        torch.ones(1, TOKENS, 16),
        pairs=(torch.ones(TOKENS), None),
        mask=mask,
        flag=True,
        cu_seq_lens=ends,
        document_lengths=LENGTHS,
    )
    assert kept == {"kept": 1}
    expected = [1.0, 2, 3, 1, 1, 2, 3, 4]
    assert total[0, :, 0].tolist() == summed.tolist() == expected
    for (_, others), (start, length) in zip(scan.seen, ((0, 3), (3, 1), (4, 4)), strict=True):
        assert others["flag"] is True
        assert torch.equal(others["mask"], mask[:, start : start + length, start : start + length])
        assert others["cu_seq_lens"].tolist() == [0, length]
        assert others["document_lengths"] == (length,)


def test_what_the_trial_did_not_see_is_refused() -> None:
    model, scan = model_with_scan()
    run(model, LENGTHS)
    with pytest.raises(FinetuneError, match=r"model\.layers\.1\.mlp is given states.*set data\.packing: false"):
        scan(torch.ones(1, TOKENS, 16), states=torch.ones(2))


def test_a_copy_sees_the_same_row_and_uses_its_own_weights() -> None:
    """As peft makes one of a module that is trained in full."""
    model, scan = model_with_scan()
    twin = copy.deepcopy(scan)
    twin.weight.data.fill_(2.0)
    run(model, LENGTHS)
    hidden = torch.ones(1, TOKENS, 16)
    assert torch.equal(twin(hidden), 2 * scan(hidden))
    assert twin(hidden)[0, :, 0].tolist() == [2.0, 4, 6, 2, 2, 4, 6, 8]
