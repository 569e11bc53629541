"""Stages one after another compute what the whole model does, of any family whose layers are a line."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from finetune.architecture.recomputation import checkpoint_layers
from finetune.errors import FinetuneError
from finetune.measure.phases import Phases
from finetune.run_folder.background import HostCopies
from finetune.run_folder.checkpoint import own_pieces
from finetune.strategies.pieces import Elsewhere
from finetune.strategies.pipeline.build import split_layers
from finetune.strategies.pipeline.layout import parts_of
from finetune.strategies.pipeline.schedule import Pipeline
from tests.support.models.tiny import FAMILIES, flat_batch, tiny_model
from tests.support.runs.stages import CPU, Chain, gradients_of, structure, taught

# Scales of embeddings, residuals and logits; windows and global layers; an architecture of experts.
FURTHER: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {"sliding_window": 8},
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.2, "attention_multiplier": 0.1},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def model_of(family: str, layers: int = 4, **config: Any) -> PreTrainedModel:
    return tiny_model(family, num_hidden_layers=layers, **FURTHER.get(family, {}), **config)


@pytest.mark.sample(5, thorough=16)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, *FURTHER])
def test_stages_are_the_model(family: str, tied: bool) -> None:
    """Loss and gradients of three stages, of one, two and one layers, are those of the model in one piece."""
    whole, batch = taught(model_of(family, tie_word_embeddings=tied)), flat_batch((7, 12, 5))
    loss = whole(**batch)
    loss.backward()
    chain = Chain(lambda: model_of(family, tie_word_embeddings=tied), [range(1), range(1, 3), range(3, 4)])
    torch.testing.assert_close(chain.forward_and_backward(batch), loss.detach(), rtol=1e-6, atol=0)
    found, expected = chain.gradients(), gradients_of(whole)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.sample(1, thorough=4)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_runs_that_take_turns_are_the_model(family: str, recomputed: bool) -> None:
    """Two stages of two runs each, one or two layers long, the first and the third, the second and the last; layers
    that are computed again in backward, with no run's forward around them, too."""
    whole, batch = taught(model_of(family, layers=6)), flat_batch((7, 12, 5))
    loss = whole(**batch)
    loss.backward()
    runs = [range(1), range(1, 3), range(3, 5), range(5, 6)]
    chain = Chain(lambda: model_of(family, layers=6), runs, stages=2)
    for model in chain.models if recomputed else ():
        model.train()
        checkpoint_layers(model, 1)
    torch.testing.assert_close(chain.forward_and_backward(batch), loss.detach(), rtol=1e-6, atol=0)
    found, expected = chain.gradients(), gradients_of(whole)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
    held = [name for name, weight in chain.models[0].named_parameters() if not isinstance(weight, Elsewhere)]
    assert {name.split(".")[2] for name in held if "layers" in name} == {"0", "3", "4"}


def test_a_layer_that_is_called_with_no_run_around_it_computes() -> None:
    """Releases of transformers whose checkpoint wraps a layer's call do so in backward (5.24's wraps its forward)."""
    runs = [range(1), range(1, 3), range(3, 5), range(5, 6)]
    stage = Chain(lambda: model_of("llama", layers=6), runs, stages=2).models[0]
    whole, batch = taught(model_of("llama", layers=6)), flat_batch((5,))
    hidden = torch.randn(1, 5, whole.config.hidden_size)
    positions = whole.get_submodule("model.rotary_emb")(hidden, batch["position_ids"])
    ends = {"cu_seq_lens": batch["cu_seq_lens"], "document_lengths": batch["document_lengths"]}
    expected, found = (
        model.get_submodule("model.layers.3")(hidden, position_embeddings=positions, **ends) for model in (whole, stage)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_each_run_of_a_stage_draws_numbers_of_its_own() -> None:
    """Of two runs and three micro-batches, in any order of the two."""
    runs = [range(2), range(2, 4)]
    chain, seen = Chain(lambda: model_of("llama"), runs, stages=1), list[int]()
    pipeline = Pipeline(chain.runs, runs, "interleaved_1f1b", chain.holdings[0], chain.trained[0], CPU)

    def forwards(micro_batches: int, tokens: int, *, train: bool) -> None:
        given = [chain.runs[0](torch.empty(1)) for _ in range(micro_batches)]
        for hidden in given:
            chain.runs[1](hidden)

    pipeline._run = forwards  # type: ignore[method-assign]
    pipeline.forward_and_backward(
        [flat_batch((7, 12))] * 3,
        divisor=1,
        loss_sum=torch.zeros((), dtype=torch.float64),
        before_each=seen.append,
        phases=Phases(CPU, enabled=False),
    )
    assert seen == [3, 4, 5, 0, 1, 2]


def test_a_stage_holds_its_own_part_alone() -> None:
    chain = Chain(lambda: model_of("llama", tie_word_embeddings=True), [range(2), range(2, 3), range(3, 4)])
    held = [
        {name for name, weight in model.named_parameters() if not isinstance(weight, Elsewhere)}
        for model in chain.models
    ]
    names = {name for name, _ in chain.models[0].named_parameters()}
    assert set.union(*held) == names
    assert set.intersection(held[0], held[2]) == {"model.embed_tokens.weight"}  # tied: embeddings and head
    assert held[1] == {name for name in names if name.startswith("model.layers.2.")}
    assert chain.holdings[0].stages["model.embed_tokens.weight"] == (0, 2)
    shared = [{name for name in own if len(chain.holdings[0].stages[name]) > 1} for own in chain.trained]
    assert shared == [{"model.embed_tokens.weight"}, set(), {"model.embed_tokens.weight"}]
    written = [
        set(holding.pieces(dict(model.named_parameters())))
        for holding, model in zip(chain.holdings, chain.models, strict=True)
    ]
    assert sorted(itertools.chain(*written)) == sorted(names)  # each by one stage


def test_a_step_during_a_save_changes_nothing_in_it() -> None:
    """A thread writes while the stage trains on: what it writes is a copy."""
    chain = Chain(lambda: model_of("llama"), [range(2), range(2, 4)])
    for holding, model in zip(chain.holdings, chain.models, strict=True):
        weights = dict(model.named_parameters())
        found = own_pieces({"model": holding.pieces(weights)}, holding.stage)
        copied = HostCopies().copied(found)["model"].tensors
        before = {name: tensor.clone() for name, tensor in copied.items()}
        assert before
        with torch.no_grad():
            for name in before:
                weights[name].add_(1)
        assert all(torch.equal(copied[name], tensor) for name, tensor in before.items())


def test_layers_that_are_no_line_are_refused() -> None:
    """One that is given another tensor than the layer before it gave: a stage could not see what made it."""
    model = structure(model_of("llama"))
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]), prepend=True)
    with pytest.raises(FinetuneError, match="does not hand layer 1 what layer 0 gave"):
        parts_of(model)


@pytest.mark.parametrize("seed", [*range(17), 128, 191, 837])  # of the last three the most even split is another
def test_split_is_the_best(seed: int) -> None:
    """Against every split that there is: the largest stage is as small as can be, then all are as even as can be."""
    draw = random.Random(seed)
    layers = [draw.randint(1, 9) for _ in range(draw.randint(4, 8))]
    first, last, stages = draw.randint(0, 20), draw.randint(0, 20), draw.randint(1, 4)

    def costs(cuts: tuple[int, ...]) -> list[int]:
        ends = [0, *cuts, len(layers)]
        held = [sum(layers[begin:end]) for begin, end in itertools.pairwise(ends)]
        held[0] += first
        held[-1] += last
        return held

    every = [costs(cuts) for cuts in itertools.combinations(range(1, len(layers)), stages - 1)]
    best = min((max(each), sum(cost**2 for cost in each)) for each in every)
    found = split_layers(layers, first, last, stages)
    assert [index for held in found for index in held] == list(range(len(layers)))
    own = costs(tuple(held.stop for held in found[:-1]))
    assert (max(own), sum(cost**2 for cost in own)) == best
