"""model.add_tokens from recipe to hand-over: what is trained, exported, merged, resumed, and loaded plainly."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.answers.chat import GenerationSettings, answers_to, open_run
from finetune.errors import FinetuneError
from finetune.finished_run import finished_run, load_adapted
from finetune.hand_over.merge import merge_run
from finetune.hub.push import Destination, prepare_upload
from finetune.recipe.loader import load_recipe
from finetune.rehearse.load_back import load_back
from finetune.train import main
from tests.support.models.new_tokens import (
    IDS,
    KNOWN,
    ROOM,
    TEXTS,
    TOKENS,
    chats_with_tokens,
    rows_that_begin,
    save_base,
)
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import skip_where_missing
from tests.support.runs.exports import assert_the_last_step_exports_alike, contents
from tests.support.runs.finished import held_out_figures
from tests.support.runs.one_curve import LENGTHS, TOLERANCE, curve_of, write_curve_recipe
from tests.support.runs.recipes import tiny_lora, write_recipe

# Each method with another kind of base: with and without a head of its own, and room for the tokens.
KINDS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "untied": ("none", False, {}),
    "tied": ("less than none", True, {"lora": {"r": 4, "use_dora": True}}),
    "with room": ("some", False, {"quantization": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}}),
    "all weights": ("none", True, {"lora": None, "training": {"learning_rate": 1e-3}}),
}
CPU = torch.device("cpu")


class Trained:
    """A finished run, and the base that it began from."""

    def __init__(self, folder: Path, kind: str) -> None:
        room, self.tied, self.sections = KINDS[kind]
        self.rows = max(ROOM[room], KNOWN + len(TEXTS))
        self.old = [row for row in range(ROOM[room]) if row not in IDS]
        self.base = save_base(folder / "base", room, tie_word_embeddings=self.tied)
        self.chats = chats_with_tokens(folder / "chats.jsonl", LENGTHS)
        self.recipe = self.write(folder)
        assert main([str(self.recipe)]) == 0
        self.run = folder / "run"
        self.product = self.run / ("adapter" if self.sections.get("lora", {}) is not None else "model")

    def write(self, folder: Path) -> Path:
        steps: dict[str, Any] = {"max_steps": 6, "weight_decay": 0.0}
        content = tiny_lora(
            self.base,
            self.chats,
            model=TOKENS,
            data={"max_length": 512},
            **{"training": steps, "save_steps": 3, "eval_steps": 6, "output_dir": str(folder / "run")},
        )
        for name, section in self.sections.items():
            content[name] = section if section is None else {**(content.get(name) or {}), **section}
        folder.mkdir(exist_ok=True)
        return write_recipe(folder, content)

    @property
    def plain(self) -> Any:
        """Loaded as its users do, in float32."""
        if self.product.name == "model":
            return AutoModelForCausalLM.from_pretrained(self.product, dtype=torch.float32).eval()
        model: Any = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        model.resize_token_embeddings(self.rows)  # at random, as by default
        return PeftModel.from_pretrained(model, str(self.product)).eval()


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("new_tokens"), request.param)


def logits(model: nn.Module) -> Tensor:
    ids = torch.tensor([[3, *IDS, 40, 5, IDS[1], IDS[0], 77]])
    with torch.no_grad():
        found: Tensor = model(input_ids=ids).logits
    return found


def ends(model: Any) -> dict[str, Tensor]:
    """Embeddings and head, with the adapter's rows in them."""
    inner = model.merge_and_unload() if isinstance(model, PeftModel) else model
    both = {"embeddings": inner.get_input_embeddings(), "head": inner.get_output_embeddings()}
    return {name: module.weight.detach() for name, module in both.items()}


@pytest.mark.thorough
@pytest.mark.sample(1)
def test_new_rows_alone_are_trained_beside_adapters(trained: Trained) -> None:
    begun, found = rows_that_begin(trained.base), ends(trained.plain)
    for name, weight in found.items():
        assert weight.shape == (trained.rows, 64)
        moved = (weight - begun[name]).abs().amax(1)
        assert moved[IDS[:2]].min() > 1e-3, "of those that the chats have"
        assert moved[IDS[2]] > 1e-3 or (name, trained.tied) == ("embeddings", False), "a head learns what it is not"
        others = moved[trained.old] > 0
        assert others.any() if trained.product.name == "model" else not others.any(), name
    assert (found["embeddings"] == found["head"]).all() == trained.tied
    assert "1 new token in no document: <|tool|>" in load_notes(trained)


def load_notes(trained: Trained) -> list[str]:
    from finetune.model.new_tokens import load_tokenizer
    from finetune.tokens.dataset import prepare

    recipe = load_recipe(trained.recipe).recipe
    return prepare(recipe, load_tokenizer(recipe)).notes


@pytest.mark.sample(1)
def test_plain_libraries_compute_what_the_run_does(trained: Trained) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained.product)
    assert tokenizer(TEXTS).input_ids == [[token] for token in IDS]
    recipe = load_recipe(trained.recipe).recipe
    if trained.product.name == "adapter":
        by_kit = load_adapted(finished_run(trained.run), CPU)
        if recipe.quantization is None:
            torch.testing.assert_close(logits(trained.plain), logits(by_kit), rtol=1e-5, atol=1e-5)
        settings = json.loads((trained.product / "adapter_config.json").read_text("utf-8"))
        rows = [row for row in range(trained.rows) if row not in trained.old and row < IDS[-1] + 1]
        places = ["model.embed_tokens"] + ["lm_head"] * (not trained.tied)
        assert settings["trainable_token_indices"] == dict.fromkeys(places, rows)
        automatic = AutoPeftModelForCausalLM.from_pretrained(trained.product, dtype=torch.float32).eval()
        torch.testing.assert_close(logits(automatic), logits(trained.plain), rtol=1e-5, atol=1e-5)
    assert "logits equal the checkpoint's" in load_back(recipe, trained.run)


@pytest.mark.sample(1)
def test_the_held_out_loss_is_what_the_run_wrote(trained: Trained) -> None:
    """By the fused loss, with the adapter on; the base begins with the pieces' means."""
    figures = held_out_figures(finished_run(trained.run), CPU)
    assert figures["tuned"]["loss"] == pytest.approx(figures["recorded"], rel=1e-5)
    assert figures["tuned"]["loss"] < figures["base"]["loss"]


@pytest.mark.thorough
@pytest.mark.sample(1)
def test_it_is_merged(trained: Trained) -> None:
    if trained.product.name == "model":
        with pytest.raises(FinetuneError, match="is the whole model already"):
            merge_run(trained.run, dtype=None, base=None, prompts=0)
        return
    facts = merge_run(trained.run, dtype="float32", base=None, prompts=2, say=print)
    merged, info = AutoModelForCausalLM.from_pretrained(
        trained.run / "merged", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    assert merged.config.vocab_size == trained.rows
    adapted = load_adapted(finished_run(trained.run), CPU)
    torch.testing.assert_close(logits(merged.eval()), logits(adapted), rtol=1e-4, atol=1e-5)
    assert facts["agreement"]["candidates"][facts["base"]]["top1"] == 1.0
    assert AutoTokenizer.from_pretrained(trained.run / "merged")(TEXTS).input_ids == [[token] for token in IDS]
    assert (merged.get_input_embeddings().weight is merged.get_output_embeddings().weight) == trained.tied


@pytest.mark.sample(1)
def test_a_resumed_run_is_the_run_bitwise(trained: Trained, tmp_path: Path) -> None:
    """And the checkpoint alone gives the same files."""
    assert_the_last_step_exports_alike(trained.run, tmp_path / "exported")
    folder = tmp_path / "again"
    shutil.copytree(trained.run, folder / "run")
    recipe = trained.write(folder)
    run = folder / "run"
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    shutil.rmtree(run / trained.product.name)
    state = json.loads((run / "run_state.json").read_text("utf-8")) | {"state": "running"}
    (run / "run_state.json").write_text(json.dumps(state), "utf-8")
    assert main([str(recipe)]) == 0
    assert contents(run / trained.product.name) == contents(trained.product)
    assert curve_of(recipe) == curve_of(trained.recipe)


@pytest.mark.sample(1)
def test_it_is_talked_to(trained: Trained) -> None:
    answers = answers_to(open_run(trained.run), ["what is <date> of quiet birds?"], "both", GREEDY)
    assert json.dumps(answers)


GREEDY = GenerationSettings(4, 0.0, None)


@pytest.mark.thorough
@pytest.mark.sample(1)
def test_the_cards_own_lines_load_it(trained: Trained) -> None:
    """The model card's Python, with this machine's folders for the Hub's names."""
    card = prepare_upload(trained.run, Destination("me/made", base="me/base")).card
    code = re.search(r"```python\n(.*?)```", card, re.S)
    assert code is not None
    assert '"<date>", "quiet birds"' in card
    here = code[1].replace("me/made", str(trained.product)).replace("me/base", str(trained.base))
    names: dict[str, Any] = {}
    exec(here, names)
    assert names["tokenizer"](TEXTS).input_ids == [[token] for token in IDS]
    if load_recipe(trained.recipe).recipe.quantization is None:
        torch.testing.assert_close(logits(names["model"].eval()), logits(trained.plain), rtol=1e-5, atol=1e-5)


RANKS = [("lora", name) for name in ("ddp", "fsdp2", "zero2")] + [("full", name) for name in ("fsdp2", "zero3")]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_two_ranks_have_the_same_curve(tmp_path: Path, tied: bool) -> None:
    """And hand over what one process would of their last checkpoint."""
    skip_where_missing("zero3")
    base = save_base(tmp_path / "base", "none", tie_word_embeddings=tied)
    chats = chats_with_tokens(tmp_path / "chats.jsonl", LENGTHS)
    alone: dict[str, Any] = {"training": {"per_device_batch_size": 1}, "model": TOKENS}

    def write(method: str, strategy: str) -> Path:
        folder = tmp_path / f"{method} {strategy}"
        folder.mkdir()
        return write_curve_recipe(folder, base, chats, method, alone, accelerate_config=strategy)

    single = {method: write(method, "single") for method in ("lora", "full")}
    assert launch([*single.values()], ranks=1) == [0, 0]
    recipes = {(method, strategy): write(method, strategy) for method, strategy in RANKS}
    assert launch([*recipes.values()], ranks=2, timeout=600) == [0] * len(RANKS)
    for (method, strategy), recipe in recipes.items():
        for found, expected in zip(curve_of(recipe), curve_of(single[method]), strict=True):
            assert tuple(found) == pytest.approx(tuple(expected), rel=TOLERANCE), f"{method} {strategy}"
        assert_the_last_step_exports_alike(recipe.parent / "run", recipe.parent / "export")


def test_sharded_embeddings_are_refused_at_once(tmp_path: Path, tiny_llama: Path, capsys: Any) -> None:
    from finetune.cli.main import main as cli

    chats = chats_with_tokens(tmp_path / "chats.jsonl", LENGTHS)
    recipe = write_recipe(tmp_path, tiny_lora(tiny_llama, chats, model=TOKENS, accelerate_config="zero3"))
    assert cli(["check", str(recipe)]) == 2
    assert "does not train new rows under zero3" in capsys.readouterr().err
    assert cli(["check", str(recipe), "lora=null"]) == 0
    assert cli(["check", str(recipe), "accelerate_config=fsdp2"]) == 0
