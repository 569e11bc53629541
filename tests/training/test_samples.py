"""The answers before and after training: how prompts are asked, what that costs, and that it is said first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.files import read_lines
from finetune.generation import held_out
from finetune.generation.generate import prompt_batches
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.results import Samples
from finetune.train import main
from finetune.training import samples
from finetune.training.samples import cost_in_words
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import skip_where_missing
from tests.support.runs.recipes import least_recipe, tiny_lora, write_recipe

LENGTHS = [30, 45, 60, 80, 25, 100, 40, 55, 70, 35, 65, 50]
PROMPTS = ["why", "tell me what it is", "which of them will sing first when morning comes over hills", "one two"]
SHARDED = {"fsdp2": 2, "zero3": 2}  # strategies, and ranks of each
NEW = 6


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


def asking(folder: Path, base: Path, chats: Path, **changes: Any) -> Path:
    folder.mkdir()
    rest: dict[str, Any] = {
        "training": {"max_steps": 2, "per_device_batch_size": 1},
        "samples": {"prompts": PROMPTS, "max_new_tokens": NEW},
        "output_dir": str(folder / "run"),
    }
    recipe = tiny_lora(base, chats, **rest)
    for name, value in changes.items():
        recipe[name] = recipe[name] | value if isinstance(value, dict) else value
    return write_recipe(folder, recipe)


def answers(recipe: Path) -> list[tuple[str, str, str]]:
    lines = read_lines(recipe.parent / "run" / "samples.jsonl")
    return [(line["when"], line["prompt"], line["answer"]) for line in lines]


def costs(recipe: Path, rank: int) -> list[dict[str, Any]]:
    return read_lines(recipe.parent / f"run.answers{rank}")


@pytest.mark.thorough
def test_all_prompts_share_a_batch_and_their_answers_are_those_of_each_alone(
    tiny_llama: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    genuine = held_out.greedy_answers

    def counted(model: Any, tokenizer: Any, prompts: Any, **options: Any) -> list[str]:
        asked.append(len(prompts))
        return genuine(model, tokenizer, prompts, **options)

    monkeypatch.setattr(held_out, "greedy_answers", counted)
    together, alone = (asking(tmp_path / name, tiny_llama, chats) for name in ("together", "alone"))
    assert main([str(together)]) == 0
    assert asked == [4, 4]
    monkeypatch.setattr(samples, "may_share_a_batch", lambda _: False)
    assert main([str(alone)]) == 0
    assert asked == [4, 4] + [1] * 8
    assert answers(together) == answers(alone)
    assert [(when, prompt) for when, prompt, _ in answers(together)] == [
        (when, prompt) for when in ("before", "after") for prompt in PROMPTS
    ]
    assert len({answer for *_, answer in answers(together)}) >= 4


@pytest.mark.slow
def test_where_weights_are_sharded_every_rank_makes_the_same_forwards(
    tiny_llama: Path, chats: Path, tmp_path: Path
) -> None:
    for name in SHARDED:
        skip_where_missing(name)
    alone = asking(tmp_path / "single", tiny_llama, chats)
    sharded = [asking(tmp_path / name, tiny_llama, chats, accelerate_config=name) for name in SHARDED]
    assert launch([alone], ranks=1, program="tests/support/runs/counted_answers.py") == [0]
    codes = launch(sharded, ranks=2, program="tests/support/runs/counted_answers.py", timeout=400)
    assert codes == [0] * len(SHARDED)
    for recipe in sharded:
        assert answers(recipe) == answers(alone), recipe
        first, second = (costs(recipe, rank) for rank in range(2))
        assert [(cost["prompts"], cost["forwards"]) for cost in first] == [(len(PROMPTS), NEW)] * 2
        # A rank without a batch of its own computes the shortest prompt, because each forward gathers weights.
        assert [(cost["prompts"], cost["forwards"]) for cost in second] == [(1, NEW)] * 2
    assert [cost["forwards"] for cost in costs(alone, 0)] == [NEW] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("interleaved_1f1b", 2),
        pytest.param("gpipe", 4, marks=pytest.mark.slow),
        pytest.param("1f1b_ddp2", 4, marks=pytest.mark.slow),
    ],
)
def test_a_pipelines_answers_are_those_of_one_process(strategy: str, ranks: int, chats: Path, tmp_path: Path) -> None:
    """Before and after training; prompts of several lengths share a batch, whose padding every stage leaves out."""
    base = save_tiny(tmp_path / "model", num_hidden_layers=4)
    steps = {"global_batch_size": 8, "per_device_batch_size": 1, "max_steps": 2, "learning_rate": 1e-2}
    alone, staged = (asking(tmp_path / name, base, chats, training=steps) for name in ("alone", "staged"))
    assert main([str(alone)]) == 0
    assert launch([staged], ranks=ranks, words=[f"accelerate_config={strategy}"], timeout=400) == [0]
    assert answers(staged) == answers(alone)
    before, after = (
        [answer for when, _, answer in answers(staged) if when == wanted] for wanted in ("before", "after")
    )
    assert all(before)
    assert before != after


@pytest.mark.parametrize(
    ("lengths", "most", "batches"),
    [
        ([5, 20, 13, 7], 100, [range(4)]),  # 4 x (20 + 5)
        ([5, 20, 13, 7], 99, [range(3), range(3, 4)]),
        ([5, 20, 13, 7], 0, [range(1), range(1, 2), range(2, 3), range(3, 4)]),
        ([5, 90, 5, 5], 100, [range(1), range(1, 2), range(2, 4)]),
        ([500], 100, [range(1)]),
        ([], 100, []),
    ],
)
def test_batches_have_no_more_tokens_than_a_micro_batch(lengths: list[int], most: int, batches: list[range]) -> None:
    assert prompt_batches(lengths, 5, most) == batches


def test_answers_are_as_long_as_the_references_unless_weights_are_sharded_or_the_recipe_says_how_many() -> None:
    usual, chosen = Samples(), Samples(max_new_tokens=40)
    assert [usual.length(longest, sharded=False) for longest in (0, 9, 100, 256, 5000)] == [64, 9, 100, 256, 256]
    assert usual.length(100, sharded=True) == 16
    assert (chosen.length(100, sharded=False), chosen.length(100, sharded=True)) == (40, 40)
    recipe: Recipe = least_recipe()
    assert recipe.samples.max_new_tokens is None


def test_the_cost_is_a_line() -> None:
    together = cost_in_words(3, 16, 16, staged=False)
    assert together.startswith("samples: 3 prompts, 16 new tokens each: at most 16 forwards, and each gathers")
    alone = cost_in_words(3, 48, 16, staged=True)
    assert "16 new tokens each: at most 48 forwards, and each computes all tokens again" in alone
