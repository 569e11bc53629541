"""The work that the lecture `scaling` derives for HSDP, and a trace of HSDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.closed_form.shape import FAMILIES
from finetune.paths import CHECKOUT
from finetune.planner.plan_recipe import plan_recipe
from finetune.planner.remedies import changed
from finetune.recipe.loader import load_recipe
from lectures.scaling.plans import gpus_of_ranks, plan_size, with_model

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@pytest.mark.slow
def test_hsdp_is_fsdp2_and_an_all_reduce_of_shards(tmp_path: Path) -> None:
    """Traced on two machines of eight: the same operations and bytes as derived from one machine's FSDP2."""
    assert CONFIG["model_type"] in FAMILIES
    recipe = with_model(load_recipe(CHECKOUT / "recipes" / "llama3_full.yaml").recipe, CONFIG, tmp_path)
    cells = dict(plan_size(recipe, CONFIG))
    traced = plan_recipe(changed(recipe, {"accelerate_config": "hsdp"}), gpus_of_ranks(16))
    derived = cells["hsdp"].work
    for phase, kinds in traced.work.collectives.items():
        for name, each in kinds.items():
            if name in ("all_gather", "reduce_scatter", "all_reduce") and each.payload_bytes > 100:
                here = derived.collectives[phase][name]
                assert here.payload_bytes == pytest.approx(each.payload_bytes, rel=0.01), (phase, name)
                assert here.calls == each.calls, (phase, name)
    for phase in ("forward", "backward"):
        assert derived.flops(phase, "product") == traced.work.flops(phase, "product")
