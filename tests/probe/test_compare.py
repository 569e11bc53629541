"""What the probe names, and the setting that it proposes, where the kit's attention, loss or packing is spoilt."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from finetune.architecture import attention, loss, router_loss
from finetune.architecture.families import Computed
from finetune.errors import EnvironmentMismatch
from finetune.probe import compare
from finetune.probe.compare import EXACT, Difference, LibrarySide, LossAndGradients, difference
from finetune.probe.probe import ProbeResult, probe
from finetune.recipe.schema import Recipe
from tests.support.models.architectures import save_shaken
from tests.support.models.own_model import save_own_model
from tests.support.models.tiny import save_tiny
from tests.support.rows.mixtures import save_mixture
from tests.support.runs.recipes import least_recipe


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("narrow"), hidden_size=32, head_dim=8, intermediate_size=32)


def refusal(recipe: Recipe, **options: Any) -> str:
    with pytest.raises(EnvironmentMismatch) as raised:
        probe(recipe, **options)
    assert raised.value.exit_code == 4
    assert "\n" not in str(raised.value)
    return str(raised.value)


def worst_of(result: ProbeResult) -> float:
    return max(off for way in result.facts["found"].values() for off in (way["loss"], way["gradients"]))


@pytest.fixture
def spoilt_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kit's attention with scores that are scaled by a twentieth too much."""
    genuine = attention.varlen_attention

    def spoilt(module: nn.Module, query: Tensor, *others: Any, scaling: float | None = None, **more: Any) -> Any:
        return genuine(module, query, *others, scaling=1.05 * (scaling or query.shape[-1] ** -0.5), **more)

    monkeypatch.setattr(attention, "varlen_attention", spoilt)
    yield
    monkeypatch.undo()
    attention.register()  # transformers keeps the function by its name


@pytest.mark.usefixtures("spoilt_attention")
def test_an_attention_that_differs_is_named_with_one_that_does_not(narrow: Path) -> None:
    message = refusal(least_recipe(narrow))
    assert message.startswith("model.attention: auto: attention differs: LlamaForCausalLM, made small, has a loss ")
    assert message.endswith("; set model.attention: sdpa")
    assert worst_of(probe(least_recipe(narrow, model={"attention": "sdpa"}))) <= EXACT


@pytest.mark.thorough
def test_a_loss_that_differs_is_named(narrow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = loss.loss_and_slope

    def steeper(*given: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        lost, slope = genuine(*given, **options)
        return lost, None if slope is None else slope.mul_(1.001)

    monkeypatch.setattr(loss, "loss_and_slope", steeper)
    message = refusal(least_recipe(narrow, lora=None))
    assert re.match(rf"model\.name_or_path: {narrow}: the loss differs: .*; choose another model$", message)


@pytest.mark.thorough
def test_an_attention_that_sees_other_documents_is_named_as_packing(
    narrow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = attention._by_document

    def leaking(q: Tensor, k: Tensor, v: Tensor, asked: attention.Attended) -> Tensor:
        whole = dataclasses.replace(asked, lengths=(sum(asked.lengths),))
        return genuine(q, k, v, whole if len(asked.lengths) == 3 else asked)

    monkeypatch.setattr(attention, "_by_document", leaking)
    message = refusal(least_recipe(narrow))
    assert message.startswith("data.packing: true: packing differs")
    assert message.endswith("; set model.attention: sdpa")  # which keeps the packing, and was tried


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("setting", [True, "selective"])
def test_checkpointing_that_differs_is_named(
    setting: bool | str, narrow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.model import build

    genuine = build.checkpoint_layers

    def larger(module: Any, _: Any, output: Any) -> Any:
        return 1.01 * output if isinstance(output, Tensor) and module.gradient_checkpointing else output

    def spoilt(model: nn.Module, every: int, **options: Any) -> None:
        genuine(model, every, **options)  # type: ignore[arg-type]
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.register_forward_hook(larger)

    monkeypatch.setattr(build, "checkpoint_layers", spoilt)
    message = refusal(least_recipe(narrow, training={"activation_checkpointing": setting}))
    where = f"training.activation_checkpointing: {str(setting).lower()}"
    assert message.startswith(f"{where}: the recomputation of layers differs")
    assert message.endswith("; set training.activation_checkpointing: false")


@pytest.fixture
def without_sinks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kit's attention as it was before it knew sinks."""
    genuine = attention.varlen_attention
    monkeypatch.setattr(attention, "varlen_attention", lambda *args, s_aux=None, **more: genuine(*args, **more))
    yield
    monkeypatch.undo()
    attention.register()


@pytest.mark.slow
@pytest.mark.usefixtures("without_sinks")
@pytest.mark.parametrize("name", ["gpt_oss", "lfm2"])
def test_numbers_alone_find_what_the_trial_without_data_finds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks that the kit's attention leaves out, convolutions that run across documents: both as before the trial was
    made. What is proposed is tried: the trial is off, and numbers say that it is right."""
    from finetune.model import build

    monkeypatch.setattr(build, "refuse_unsuitable", lambda *_: Computed())
    settings = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings |= {"layer_types": ["conv", "full_attention"]} if name == "lfm2" else {"head_dim": 16}
    config = CONFIG_MAPPING[name](**settings, intermediate_size=64, vocab_size=128)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), "utf-8")
    message = refusal(least_recipe(tmp_path, lora=None))
    sinks = name == "gpt_oss"  # transformers' masks for its packed rows let documents see each other
    place = "model.attention: auto: attention, and packing with any other," if sinks else "data.packing: true: packing"
    assert message.startswith(f"{place} differs")
    remedy = "model.attention: eager and data.packing: false" if sinks else "data.packing: false"
    assert message.endswith(f"; set {remedy}")
    model = {"attention": "eager"} if sinks else {}
    changed = least_recipe(tmp_path, lora=None, data={"packing": False}, model=model)
    assert worst_of(probe(changed)) <= EXACT


@pytest.mark.thorough
def test_rounding_is_told_from_a_difference_in_float64(tmp_path: Path) -> None:
    folder = save_own_model(tmp_path / "own", "chaotic", hidden_size=64, num_hidden_layers=3)
    found = probe(least_recipe(folder, lora=None, model={"trust_remote_code": True}))
    assert found.facts["precision"] == "float64"
    assert worst_of(found) <= EXACT


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["loss", "gradients"])
def test_what_is_not_finite_in_float32_alone_is_refused(
    part: str, narrow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = LibrarySide.computed_by

    def spoilt(side: LibrarySide, *given: Any, **options: Any) -> LossAndGradients:
        computed = genuine(side, *given, **options)
        if side.wide:
            return computed
        if part == "loss":
            return dataclasses.replace(computed, loss=float("nan"))
        return dataclasses.replace(computed, gradients={name: g * torch.nan for name, g in computed.gradients.items()})

    monkeypatch.setattr(LibrarySide, "computed_by", spoilt)
    recipe = least_recipe(narrow, lora=None, training={"activation_checkpointing": False})
    assert "differs" in refusal(recipe)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param("qwen3_next", marks=pytest.mark.slow), "mixtral"])
def test_experts_are_computed_in_float64_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounding is beyond the bound, as a delta rule's is on some CPUs; torch's product of all experts at once
    knows no float64."""
    monkeypatch.setattr("finetune.probe.compare.EXACT", 1e-10)
    save_shaken(name, tmp_path)
    found = probe(least_recipe(tmp_path, lora=None))
    assert found.facts["precision"] == "float64"
    assert worst_of(found) <= 1e-10


@pytest.mark.slow
def test_in_16_bits_the_librarys_own_error_is_the_measure(narrow: Path, tmp_path: Path) -> None:
    """Autocast on a CPU stands for a GPU's: the same path, but for the kernels."""
    right = probe(least_recipe(narrow), compute=torch.bfloat16)
    assert right.facts["precision"] == "bfloat16"
    assert 1e-3 < right.facts["bound"] < 0.1
    assert EXACT < worst_of(right) <= right.facts["bound"]
    folder = save_own_model(tmp_path / "own", "previous", hidden_size=64, num_hidden_layers=3)
    leaking = least_recipe(folder, lora=None, model={"trust_remote_code": True})
    assert "packing differs" in refusal(leaking, compute=torch.bfloat16)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "in_16_bits", "in_float32", "repeats", "right"),
    [
        ("mixtral", 0.09, 0.0, True, True),
        ("mixtral", 0.09, 0.0, False, True),
        ("mixtral", 0.11, 0.0, True, False),
        pytest.param("mixtral", 0.09, 2 * EXACT, True, False, marks=pytest.mark.slow),
        pytest.param("llama", 0.09, 0.0, True, False, marks=pytest.mark.slow),
    ],
)
def test_rounding_may_choose_experts(
    family: str,
    in_16_bits: float,
    in_float32: float,
    repeats: bool,
    right: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mixture that is right in float32 may differ by more in 16 bits, but not by a tenth."""
    monkeypatch.setattr(compare, "TIMES_THE_LIBRARYS", 0.0)
    monkeypatch.setattr(LibrarySide, "repeats", lambda side: repeats)

    def differs(side: LibrarySide, *_: Any) -> Difference:
        return Difference(0.0, in_float32 if side.compute is None else in_16_bits)

    monkeypatch.setattr(LibrarySide, "difference_of", differs)
    save_shaken(family, tmp_path)
    recipe = least_recipe(tmp_path, lora=None)
    if right:
        facts = probe(recipe, compute=torch.bfloat16).facts
        assert facts["bound"] == 0.1
        drawn = "" if repeats else "compared in evaluation mode: it draws random numbers; "
        assert facts["note"] == f"{drawn}float32 agrees; in 16 bits rounding decides which experts are chosen"
    else:
        assert "differs" in refusal(recipe, compute=torch.bfloat16)


@pytest.mark.thorough
@pytest.mark.usefixtures("spoilt_attention")
def test_a_spoilt_attention_is_seen_in_16_bits_too(narrow: Path) -> None:
    assert "attention differs" in refusal(least_recipe(narrow, lora=None), compute=torch.bfloat16)


@pytest.mark.slow
def test_adapters_in_every_form_are_compared(narrow: Path) -> None:
    for lora in ({"use_dora": True}, {"init_lora_weights": "orthogonal"}, {"modules_to_save": ["lm_head"]},
                 {"lora_dropout": 0.5}, {"target_modules": ["q_proj"], "use_rslora": True}):  # fmt: skip
        assert worst_of(probe(least_recipe(narrow, lora=lora))) <= EXACT


MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.thorough
def test_the_reach_of_adapters(narrow: Path) -> None:
    everywhere = probe(least_recipe(narrow)).facts["adapters"]
    assert everywhere["reached_share"] == 1.0
    assert everywhere["left_out"] == {}
    some = probe(least_recipe(narrow, lora={"target_modules": ["q_proj", "down_proj"]}))
    adapters = some.facts["adapters"]
    assert adapters["adapted_modules"] == {"q_proj": 2, "down_proj": 2}
    sizes = {"q_proj": 32 * 32, "k_proj": 32 * 16, "v_proj": 32 * 16, "o_proj": 32 * 32}
    sizes |= dict.fromkeys(MLP, 32 * 32)
    assert adapters["left_out"] == pytest.approx(
        {
            f"{'mlp' if name in MLP else 'self_attn'}.{name}": size / sum(sizes.values())
            for name, size in sizes.items()
            if name not in adapters["adapted_modules"]
        }
    )
    assert adapters["reached_share"] == pytest.approx((sizes["q_proj"] + sizes["down_proj"]) / sum(sizes.values()))
    reached, left_out = some.line().splitlines()[-2:]
    assert reached == "adapters on 4 layers: q_proj 2, down_proj 2; 33% of the matrices' weights"
    assert left_out.startswith("left out: ")
    assert probe(least_recipe(narrow, lora=None)).facts["adapters"] is None


def test_an_attention_of_gpus_is_not_probed_on_a_cpu(narrow: Path) -> None:
    found = probe(least_recipe(narrow, model={"attention": "flash_attention_2"}), offline=True)
    assert found.facts["found"] == {}
    assert "not probed here: model.attention: flash_attention_2 runs on a GPU alone" in found.line()


@pytest.mark.thorough
def test_nothing_else_is_disturbed(narrow: Path) -> None:
    before, default = torch.random.get_rng_state(), torch.get_default_dtype()
    probe(least_recipe(narrow))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.get_default_dtype() == default


@pytest.mark.thorough
def test_a_routers_loss_that_differs_is_named_and_one_that_does_not_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_mixture(tmp_path / "mixtral", "mixtral")
    asked = least_recipe(base, model={"router_aux_loss_coef": 0.5})
    assert worst_of(probe(asked)) <= EXACT
    monkeypatch.setattr(router_loss.RouterLoss, "summed", lambda self, logits, *_: 0.01 * logits[0].sum())
    message = refusal(asked.model_copy(update={"lora": None}))
    assert message.startswith("model.router_aux_loss_coef: the router's auxiliary loss differs: MixtralForCausalLM, ")
    assert message.endswith("; set model.router_aux_loss_coef: 0")


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("at", ["first", "last", "loss"])
def test_what_is_not_finite_is_never_near(at: str, exact: bool) -> None:
    """A NaN is not larger than any number: a maximum passes over it."""
    names = ("first", "middle", "last")
    expected = LossAndGradients(2.0, {name: torch.ones(3) for name in names})
    for bad in (float("nan"), float("inf")):
        gradients = {name: torch.full((3,), bad if name == at else 1.0) for name in names}
        found = LossAndGradients(bad if at == "loss" else 2.0, gradients)
        off = difference(found, expected, exact=exact)
        assert off.largest == compare.FAR
        assert json.loads(json.dumps(dataclasses.asdict(off), allow_nan=False))
    assert difference(expected, expected, exact=exact).largest == 0
