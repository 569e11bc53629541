"""Every architecture of the table is trained rightly or refused in a line; docs/families.md says which."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from finetune.architecture import families, operations, trial
from finetune.architecture.by_document import run_document_by_document
from finetune.architecture.families import refuse_unsuitable
from finetune.errors import FinetuneError
from finetune.model.build import build_model, refuse_early
from finetune.recipe.schema import Recipe
from tests.support.models.architecture_columns import COLUMNS, cell, right_way
from tests.support.models.architectures import (
    ARCHITECTURES,
    NEEDS,
    NO_DECODERS,
    WAYS,
    Way,
    config_of,
    outcomes,
    recipe_of,
    save_shaken,
)
from tests.support.models.families_page import GOLDEN, MASKS, PAGE, entry_of, page_of, recorded, words_of
from tests.support.models.tiny import save_tiny
from tests.support.runs.recipes import least_recipe

# Of each kind of outcome one or more; all of them are slow (ten minutes).
QUICK = ("llama", "gpt2", "gpt_oss", "cohere", "qwen3_next", "bloom", "falcon", "doge", "cpmant")
RECORDED_WITH = Version("5.24")  # of transformers
KNOWN = """
    llama mistral ministral ministral3 qwen2 qwen3 smollm3 phi3 gemma3_text gemma4_text glm4 granite olmo2 olmo3 exaone4
    hunyuan_v1_dense arcee ernie4_5 mixtral qwen3_moe seed_oss gpt_oss gemma2 cohere cohere2 llama4_text qwen3_5_text
    qwen3_next lfm2 falcon_h1 granitemoehybrid
""".split()


def test_the_page_is_that_of_the_record() -> None:
    record = recorded()
    entries = record["architectures"]
    assert PAGE.read_text("utf-8") == page_of(record)
    assert len(entries) == 142
    right = [name for name, entry in entries.items() if entry["ways"][WAYS[0].title]["word"] == "right"]
    assert len(right) >= 90
    assert set(KNOWN) <= set(right)
    found = {cell for entry in entries.values() for cell, _ in entry["columns"].values()}
    assert not found & {"WRONG", "TRACEBACK"}
    for name in KNOWN:
        columns = {column: cell for column, (cell, _) in entries[name]["columns"].items()}
        refused = {column for column, shown in columns.items() if shown == "refused"}
        # Its sizes of states are tied to each other in a way that no divisor keeps.
        assert refused == ({"rehearsal"} if name == "granitemoehybrid" else set()), name
        assert columns["plan"] == "planned", name


def test_every_decoder_of_transformers_is_a_line_of_the_page() -> None:
    """A release of transformers with a new decoder turns this red by its name: run benchmarks/families.py."""
    new = ARCHITECTURES.keys() - recorded()["architectures"].keys()
    assert not new, f"transformers {transformers.__version__} has decoders that docs/families.md lacks: {sorted(new)}"
    listed = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert listed - NO_DECODERS == ARCHITECTURES.keys()
    if Version(transformers.__version__) >= RECORDED_WITH:  # an older one has not all of these
        assert listed >= NO_DECODERS
        assert ARCHITECTURES.keys() >= NEEDS.keys()


def test_golden_masks_are_those_that_there_are() -> None:
    assert {name for names in MASKS.values() for name in names} <= GOLDEN
    assert MASKS.keys() <= ARCHITECTURES.keys()


@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(ARCHITECTURES)]
)
def test_right_or_refused_in_a_line(name: str, tmp_path: Path) -> None:
    actual = outcomes(name, tmp_path)
    assert {outcome.word for outcome in actual.values()} <= {"right", "refused"}, actual
    assert all("\n" not in (outcome.refusal or "") for outcome in actual.values())
    for way, outcome in actual.items():  # what is proposed is right
        proposed = re.search(r"; set (.*)$", outcome.refusal or "")
        if proposed is not None:
            attention = re.search(r"model\.attention: (\w+)", proposed[1])
            packing = way.packing and "data.packing: false" not in proposed[1]
            assert actual[Way(attention[1] if attention else way.attention, packing)].word == "right", outcome
    entry, way_taken = recorded()["architectures"][name], right_way(actual)
    found, record = words_of(entry_of(actual, {})), words_of(entry)
    if Version(transformers.__version__) < RECORDED_WITH:  # it may give another reason, and the same answer
        found, record = ({way: word for way, (word, *_) in each.items()} for each in (found, record))
    assert found == record
    untraced = [column for column in COLUMNS if column != "plan"]  # a trace needs a process of its own: tests/planner/
    cells = {} if way_taken is None else {column: cell(column, name, tmp_path, way_taken) for column in untraced}
    assert all("\n" not in each.why for each in cells.values())
    columns = entry_of(actual, cells)["columns"]
    assert columns == {column: found for column, found in entry["columns"].items() if column != "plan"}


def recipe(folder: Path, attention: str = "auto", **changes: Any) -> Recipe:
    return least_recipe(folder, model={"dtype": "float32", "attention": attention}, lora=None, **changes)


def test_the_head_is_looked_at_behind_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all layers have been run already; of Gemma 3 12B's 48 that was a third of what a probe costs."""
    ran, forward = [], LlamaDecoderLayer.forward

    def counted(layer: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(layer)
        return forward(layer, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", counted)
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=8)
    found = [
        trial.check_head_is_last(LlamaForCausalLM, config, None, decoder_ran=ran_before) for ran_before in (True, False)
    ]
    assert found[0] == found[1]
    assert len(ran) == 2 + 2 * 8


def test_refused_before_weights_are_read(tmp_path: Path) -> None:
    save_shaken("gpt_neox_japanese", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FinetuneError, match=r"GPTNeoXJapaneseAttention: _softmax.*data\.packing: false"):
        refuse_early(recipe(tmp_path))


def test_building_alone_refuses_too(tmp_path: Path) -> None:
    """As a planner and a rehearsal do; an attention that a model's own table lacks is a line as well."""
    for name, words in (("gpt_neox_japanese", "GPTNeoXJapaneseAttention"), ("falcon", "varlen")):
        save_shaken(name, tmp_path / name)
        for device in ("cpu", "meta"):
            with pytest.raises(FinetuneError, match=words):
                build_model(recipe(tmp_path / name), torch.device(device))


def test_the_users_configuration_is_tried_and_not_the_architecture(tmp_path: Path) -> None:
    """Without a convolution LFM2 is a plain decoder, on which no layer is run by itself."""
    for kind, mixers in (("full_attention", 0), ("conv", 1)):
        save_tiny(tmp_path, "lfm2", layer_types=["full_attention", kind], block_ff_dim=64)
        model = build_model(recipe(tmp_path), torch.device("meta"))
        assert len(run_document_by_document(model)) == mixers


def test_flash_attention_of_several_packed_rows_is_refused(tmp_path: Path) -> None:
    """transformers looks for documents in a single row alone."""
    model = AutoModelForCausalLM.from_config(config_of("llama"))
    requested = recipe(tmp_path, "flash_attention_2", training={"per_device_batch_size": 2})
    with pytest.raises(FinetuneError, match="per_device_batch_size: 1"):
        refuse_unsuitable(model, requested)


class Spoilt(nn.Module):
    """It replaces a layer's MLP, and also does something with positions."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(hidden)
        match self.how:
            case "nothing":
                return hidden
            case "shift":
                return hidden + nn.functional.pad(hidden, (0, 0, 1, -1))
            case "scan":
                return hidden.cumsum(1)
            case "mean":
                return hidden + hidden.mean(1, keepdim=True)
            case "product":
                return torch.einsum("bth,bsh,bsk->btk", hidden, hidden, hidden)
            case "previous":
                return torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)
            case "loop":
                return torch.stack([hidden[:, at] for at in range(hidden.shape[1])], dim=1)
            case "positions":
                return hidden * torch.arange(hidden.shape[1], device=hidden.device)[None, :, None]
            case _:
                return nn.functional.conv1d(hidden.mT, self.linear.weight[:, :, None]).mT


KINDS = ["nothing", "shift", "scan", "mean", "product", "previous", "loop", "positions", "convolution"]


@pytest.mark.parametrize("how", KINDS)
def test_what_brings_positions_together_is_seen_whatever_it_is_called(how: str) -> None:
    def built(config: Any) -> PreTrainedModel:
        asked = config._attn_implementation
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        config._attn_implementation = asked
        model.model.layers[0].mlp = Spoilt(how)
        return model

    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    mixers = trial.check_documents_isolated(built, config, isolated=True)
    assert [mixer.path for mixer in mixers] == ([] if how == "nothing" else ["model.layers.0.mlp"])
    if how != "nothing":
        assert (mixers[0].inputs, mixers[0].output) == ({".0": (1,)}, {"": (1,)})
        with pytest.raises(operations.Unsuitable, match="own" if how == "positions" else "brings positions together"):
            trial.check_documents_isolated(built, config, isolated=False)


def test_every_way_of_the_table_is_a_recipe(tmp_path: Path) -> None:
    assert len({recipe_of(tmp_path, way, checkpointing=True).model_dump_json() for way in WAYS}) == 6


def test_the_trial_draws_no_random_numbers_and_is_not_repeated(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    families.computed_in_layout.cache_clear()
    before = torch.random.get_rng_state()
    refuse_early(recipe(folder))
    assert torch.equal(before, torch.random.get_rng_state())
    assert families.computed_in_layout.cache_info().misses == 1
