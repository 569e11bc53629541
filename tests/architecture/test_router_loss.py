"""The auxiliary loss of a router, by document: transformers' own loss of each document alone is what it is held to.

The library's mean of a document times its supervised tokens, summed: cross-entropy and auxiliary loss together, with a
coefficient so large that the second is a good part of both loss and gradients.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from finetune.errors import FinetuneError
from finetune.model.build import build_model, refuse_early
from finetune.tokens.batches import micro_batches
from tests.support.models.architectures import LENGTHS, Trained, difference, documents, save_shaken
from tests.support.models.tiny import flat_batch
from tests.support.rows.mixtures import save_mixture
from tests.support.runs.recipes import least_recipe

COEFFICIENT = 0.7
# Rows of documents, rows in a forward, and transformers' name of the attention.
SPLITS: dict[str, tuple[list[list[int]], int, str]] = {
    "one forward": ([[0, 1, 2], [3]], 2, "auto"),
    "a forward a row": ([[0, 1, 2], [3]], 1, "auto"),
    "other rows": ([[3, 0], [2], [1]], 2, "auto"),
    "a document a forward": ([[0], [1], [2], [3]], 1, "auto"),
    "padded": ([[0], [1], [2], [3]], 2, "sdpa"),
    "packed and padded": ([[0, 1, 2], [3]], 2, "sdpa"),
}
# qwen3_next's layers run document by document, granitemoe scales its logits, jamba has routers in some layers alone.
OTHERS = "granitemoe jamba qwen2_moe olmoe ernie4_5_moe qwen3_next qwen3_5_moe_text minimax_m2 flex_olmo phimoe".split()


class Rows:
    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.rows = rows

    def documents(self, row: int) -> list[Any]:
        made = documents()
        return [made[index] for index in self.rows[row]]


Width = Callable[[nn.Module], nn.Module]


def librarys(folder: Path, width: Width) -> Trained:
    """`out.loss` of one document is the mean cross-entropy of its tokens + coefficient x its auxiliary loss."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).train()
    model.router_aux_loss_coef, total = COEFFICIENT, torch.zeros(())
    model = width(model)
    for ids, labels in documents():
        tokens, targets = torch.from_numpy(ids)[None], torch.from_numpy(labels)[None]
        output = model(input_ids=tokens, labels=targets, output_router_logits=True, use_cache=False)
        assert COEFFICIENT * output.aux_loss > 0.05 * output.loss
        total = total + int((labels[1:] >= 0).sum()) * output.loss
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def built(folder: Path, split: str, *, checkpointing: bool = False, **model: Any) -> nn.Module:
    rows, at_once, attention = SPLITS[split]
    section = {"dtype": "float32", "attention": attention, **model}
    training = {"activation_checkpointing": checkpointing, "per_device_batch_size": at_once}
    packing = {"packing": any(len(row) > 1 for row in rows)}
    recipe = least_recipe(folder, model=section, data=packing, lora=None, training=training)
    refuse_early(recipe)
    return build_model(recipe, torch.device("cpu"))


def computed(model: nn.Module, split: str) -> Trained:
    rows, at_once, attention = SPLITS[split]
    sizes: dict[str, Any] = {"rank": 0, "world_size": 1, "per_device_batch_size": at_once}
    total = 0.0
    for batch in micro_batches(Rows(rows), range(len(rows)), flat=attention == "auto", **sizes):
        loss = model(**batch)
        if model.training:
            loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def trained(model: nn.Module, split: str, width: Width) -> Trained:
    model = width(model.train())
    model.zero_grad()
    return computed(model, split)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "family", ["mixtral", "qwen3_moe", "gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_any_split_gives_the_librarys_loss_of_each_document(family: str, tmp_path: Path) -> None:
    save_shaken(family, tmp_path)
    expected = partial(librarys, tmp_path)
    refused: list[str] = []
    for split, (_, _, attention) in SPLITS.items():
        try:
            model = built(tmp_path, split, router_aux_loss_coef=COEFFICIENT, checkpointing=split == "one forward")
        except FinetuneError:  # docs/families.md says which run packed, and by which attention
            refused.append(attention)
            continue
        assert difference(partial(trained, model, split), expected) <= 1, split
    assert set(refused) <= {"auto" if family == "phimoe" else "sdpa"}


@pytest.mark.slow
def test_the_models_own_setting_asks_for_it_and_the_recipe_has_the_last_word(tmp_path: Path) -> None:
    save_shaken("qwen3_moe", tmp_path)
    plain = computed(built(tmp_path, "one forward").train(), "one forward")[0]
    asked = computed(built(tmp_path, "one forward", router_aux_loss_coef=COEFFICIENT).train(), "one forward")[0]
    file = tmp_path / "config.json"
    own = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | own), "utf-8")
    model = built(tmp_path, "one forward").train()
    assert computed(model, "one forward")[0] == asked != plain
    without = built(tmp_path, "one forward", router_aux_loss_coef=0.0)
    assert computed(without.train(), "one forward")[0] == plain
    with torch.no_grad():  # a held-out loss is the cross-entropy alone
        assert computed(model.eval(), "one forward")[0] == computed(without.eval(), "one forward")[0]
    assert plain == pytest.approx(computed(without, "one forward")[0], rel=1e-5)


@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("llama", "LlamaForCausalLM has no router of experts"),
        ("llama4_text", "Llama4ForCausalLM has no auxiliary loss of its router"),
        ("glm4_moe", "Glm4MoeForCausalLM has no (auxiliary loss of its router|router of experts)"),  # transformers 5.17
    ],
)
def test_a_model_without_it_is_refused(family: str, says: str, tmp_path: Path) -> None:
    save_shaken(family, tmp_path)
    with pytest.raises(FinetuneError) as caught:
        built(tmp_path, "one forward", router_aux_loss_coef=0.01)
    line = rf"model\.router_aux_loss_coef: 0\.01: {says}; set model\.router_aux_loss_coef: 0"
    assert re.fullmatch(line, str(caught.value))


def test_the_documents_are_ragged() -> None:
    assert len(set(LENGTHS)) == len(LENGTHS) == 4


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_moe"])
def test_tokens_go_to_the_experts_that_they_go_to_without_autocast(family: str, tmp_path: Path) -> None:
    """GLM 4.5 and DeepSeek V3 multiply in float32 there; autocast would send 5 and 6 of 1,028 tokens elsewhere.

    FSDP2 computes without autocast too. It gathers a float32 router in 16 bits, which hold its values.
    """
    folder, batch = save_mixture(tmp_path, family), flat_batch((300, 20, 170, 61, 222, 37, 128, 90), vocabulary=97)
    recipe = least_recipe(folder, model={"dtype": "bfloat16"}, lora={"r": 4})
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for weights in (torch.float32, torch.bfloat16):  # transformers keeps these routers' weights in float32
            model, chosen = build_model(recipe, torch.device("cpu")).bfloat16(), list[torch.Tensor]()
            for path, module in model.named_modules():
                if path.endswith(".mlp.gate") and family != "qwen3_moe":
                    assert "forward" in vars(module)
                    module.to(weights)
                if path.endswith(".mlp.experts") and hasattr(module, "down_proj") and module.down_proj.ndim == 3:
                    module.register_forward_pre_hook(
                        lambda _, given, chosen=chosen: chosen.append(given[1].sort(-1).values)
                    )
            results = []
            for strategy in ("autocast", "none", "fsdp2"):
                if strategy == "fsdp2":
                    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=strategy == "autocast"):
                    results.append((float(model(**batch)), torch.stack(chosen)))
                assert len(chosen) == (2 if family == "qwen3_moe" else 1)
                chosen.clear()
            loss, experts = results[0]
            assert [int((other != experts).sum()) for _, other in results[1:]] == [0, 0]
            assert [other for other, _ in results[1:]] == [loss, loss]
    finally:
        dist.destroy_process_group()
