"""Rows, pairs and labels from all answers, against a script that reads answers.jsonl alone; pass@k by counting."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from finetune.answers.kept_rows import (
    KeepOptions,
    kept_rows,
    near_copies,
    pass_at,
    sampled_figures,
    summary_in_words,
)
from finetune.generation.generate import Sampling

WORDS = "river boat sea stone bird hill morning road green song".split()


def made(prompts: int = 40, count: int = 8) -> list[dict[str, Any]]:
    """Lines with right, wrong, cut, empty and equal answers."""
    draw = random.Random(1)
    lines: list[dict[str, Any]] = []
    for row in range(prompts):
        ease = draw.random()
        answers = []
        for _ in range(count):
            text = " ".join(draw.choices(WORDS[: draw.randint(1, 10)], k=draw.randint(0, 6)))
            score = float(draw.random() < ease) if row % 10 else float(row % 20 == 0)
            answers.append({"text": text, "tokens": len(text), "ended": draw.random() < 0.9, "score": score})
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * (row % 3 == 0)
        question = {"messages": [*turns, {"role": "user", "content": f"question {row}"}]}
        lines.append({"row": row, "question": question, "by": {"model": "me"}, "answers": answers})
    for answer in lines[7]["answers"][:6]:
        answer |= {"score": None, "problem": "took more than 10 s"}
    return lines


def by_script(lines: list[dict[str, Any]], keep: str, most: int, skipped: str, seed: int) -> list[dict[str, Any]]:
    """The same rows in plain loops. Copies share nine tenths of their letter triples, or have the same words."""

    def triples(text: str) -> set[str]:
        return {text[at : at + 3] for at in range(len(text) - 2)}

    hashed, rows = Sampling(1.0, seed=seed), list[dict[str, Any]]()
    for line in lines:
        scores = [each["score"] for each in line["answers"]]
        known = [score for score in scores if score is not None]
        if (skipped == "always" and min(known) == 1) or (skipped == "never" and max(known) == 0):
            continue
        order = sorted(range(len(scores)), key=lambda index: hashed.uniform((line["row"], index), -1))
        found: dict[float, list[int]] = {1.0: [], 0.0: []}
        for index in order:
            if scores[index] is None:
                continue
            answer, kind = line["answers"][index], 1.0 if keep == "all" else scores[index]
            texts = [line["answers"][each]["text"] for each in found[kind]]
            both = {each["score"] for each in line["answers"] if each["text"] == answer["text"]} == {0.0, 1.0}
            if keep in ("pairs", "judged") and both:
                continue
            own = triples(answer["text"])
            shares = [len(own & triples(text)) / max(1, len(own | triples(text))) for text in texts]
            if answer["ended"] and answer["text"] and answer["text"] not in texts and max(shares, default=0) < 0.9:
                found[kind].append(index)
        good, bad = found[1.0], found[0.0]
        prompt = line["question"]["messages"]
        said = [[{"role": "assistant", "content": each["text"]}] for each in line["answers"]]
        before = [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in prompt]
        if keep in ("right", "all"):
            rows += [{"messages": before + said[index]} for index in sorted(good[:most])]
        elif keep == "pairs":
            two = list(zip(good, bad, strict=False))[:most]
            rows += [{"prompt": prompt, "chosen": said[one], "rejected": said[other]} for one, other in two]
        else:
            both = sorted([*good[:most], *bad[:most]])
            rows += [{"prompt": prompt, "completion": said[i], "label": scores[i] == 1} for i in both]
    return [row | {"written_by": "me"} for row in rows]


@pytest.mark.parametrize("keep", ["right", "pairs", "judged", "all"])
@pytest.mark.parametrize(("most", "skipped"), [(1, ""), (3, "always"), (8, "never")])
def test_rows_are_those_of_a_script(keep: Any, most: int, skipped: str) -> None:
    lines, hashed = made(), Sampling(1.0, seed=5)
    options = KeepOptions(keep, per_prompt=most, leave_out=[skipped] if skipped else [])
    rows, left_out = kept_rows(lines, options, lambda row, index: hashed.uniform((row, index), -1))
    assert rows == by_script(lines, keep, most, skipped, 5)
    assert len(rows) > 15
    answers = {"pairs": 2}.get(keep, 1) * len(rows)
    assert answers + sum(left_out.values()) == 40 * 8  # each answer is a row, or has a reason


def test_shortest_first() -> None:
    rows, _ = kept_rows(made(), KeepOptions("right", pick="shortest"), lambda row, index: 0.0)
    for row in rows:
        line = next(each for each in made() if each["question"]["messages"][-1] == row["messages"][-2])
        usable = [each for each in line["answers"] if each["score"] == 1 and each["ended"] and each["text"]]
        assert len(row["messages"][-1]["content"]) == min(len(each["text"]) for each in usable)


def test_pass_at_k_is_the_share_of_all_choices() -> None:
    for count, right in [(8, 0), (8, 1), (8, 3), (8, 8), (5, 2)]:
        for k in range(1, count + 1):
            choices = list(itertools.combinations([index < right for index in range(count)], k))
            assert pass_at(right, count, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_the_summary() -> None:
    lines = made()
    figures = sampled_figures(lines, KeepOptions("right"))
    right = [[each["score"] for each in line["answers"] if each["score"] is not None] for line in lines]
    assert [len(scores) for scores in right] == [2 if row == 7 else 8 for row in range(40)]
    assert [*figures["pass_at"]] == ["1", "2", "4", "8"]
    assert figures["pass_at"]["1"]["mean"] == pytest.approx(sum(sum(scores) / len(scores) for scores in right) / 40)
    assert figures["pass_at"]["8"]["mean"] == pytest.approx(sum(map(any, right[:7] + right[8:])) / 39)
    assert figures["solved"]["mean"] == pytest.approx(sum(map(any, right)) / 40)
    assert (figures["always"], figures["never"]) == (sum(map(all, right)), 40 - sum(map(any, right)))
    assert (figures["prompts"], figures["failed"]) == (40, 6)
    for each in figures["pass_at"].values():
        assert each["low"] <= each["mean"] <= each["high"]


@pytest.mark.parametrize(
    ("text", "other", "copies"),
    [
        ("The answer is 12.", "the answer is 12", True),
        ("The answer is 12.", "The answer is 13.", False),
        ("so we add two and two and get the sum four", "so we add two and two and get the sum four!", True),
        ("so we add two and two and get the sum four", "so we add two and two, and get a sum: four", True),
        ("so we add two and two and get the sum four", "so we add two and two and get the sum five", False),
        ("12", "13", False),
        ("12", "12", True),
        ("", "", True),
    ],
)
def test_near_copies(text: str, other: str, copies: bool) -> None:
    assert near_copies(text, other) is copies


@pytest.mark.parametrize(
    ("score", "at_least", "right"),
    [
        (sum([0.1] * 10), 1.0, True),  # 0.9999999999999999
        (sum([0.1] * 8), 0.8, True),
        (float(np.float32(0.7)), 0.7, True),  # 0.69999998...
        (0.9999, 1.0, False),
        (0.79, 0.8, False),
    ],
)
def test_a_score_is_right_up_to_rounding(score: float, at_least: float, right: bool) -> None:
    assert KeepOptions("right", at_least).is_right({"score": score}) is right


def asked(questions: str, texts: list[list[tuple[str, float]]]) -> list[dict[str, Any]]:
    """A prompt for each letter, with its answers and their scores."""
    return [
        {
            "row": row,
            "question": {"prompt": letter},
            "by": {"model": "m"},
            "answers": [{"text": text, "tokens": len(text), "ended": True, "score": score} for text, score in answers],
        }
        for row, (letter, answers) in enumerate(zip(questions, texts, strict=True))
    ]


def test_copies_are_those_of_the_rows() -> None:
    """Without thoughts only the answers are compared: equal ones are copies, whatever the thoughts."""
    long = "the river and the sea and the boat and the bird and the stone and the hill"
    thought = [f"<think>{long}</think>red", f"<think>{long[::-1]}</think>red", f"<think>{long}</think>blue"]
    lines = asked("q", [[(text, 1.0) for text in thought]])
    kept, left_out = kept_rows(lines, KeepOptions("all", thoughts=False), lambda row, index: index / 8)
    assert [row["completion"] for row in kept] == ["red", "blue"]
    assert left_out == {"near copies of another one": 1}
    assert len(kept_rows(lines, KeepOptions("all"), lambda row, index: index / 8)[0]) == 3


@pytest.mark.parametrize("keep", ["right", "pairs", "judged", "all"])
def test_one_question_has_one_verdict_for_an_answer(keep: Any) -> None:
    """A question with two right answers, a row each: red and blue are right for one row and wrong for the other."""
    lines = asked("qqr", [[("red", 1), ("blue", 0), ("nine", 0)], [("red", 0), ("blue", 1)], [("red", 0), ("tea", 1)]])
    rows, left_out = kept_rows(lines, KeepOptions(keep), lambda row, index: index / 8)
    assert left_out.get("called right and wrong for one question", 0) == {"pairs": 4, "judged": 4}.get(keep, 0)
    if keep == "pairs":
        assert [(row["prompt"], row["chosen"], row["rejected"]) for row in rows] == [("r", "tea", "red")]
    if keep == "judged":
        assert [(row["prompt"], row["completion"]) for row in rows] == [("q", "nine"), ("r", "red"), ("r", "tea")]
    figures = sampled_figures(lines[:2], KeepOptions(keep)) | {"rows": 0, "left_out": {}}
    assert figures["asked_again"] == 1
    assert "prompts with the question of an earlier one: 1; each has its own reference" in summary_in_words(
        figures, keep
    )


def test_a_text_that_was_no_text_is_no_row() -> None:
    lines = asked("q", [[("re\ufffd", 1.0), ("red", 1.0)]])
    rows, left_out = kept_rows(lines, KeepOptions("all"), lambda row, index: index / 8)
    assert [row["completion"] for row in rows] == ["red"]
    assert left_out == {"bytes in them that are no text": 1}


@pytest.mark.parametrize(
    ("opening", "text"),
    [
        ("<think>\n", "two and two\n</think>\n\nfour"),  # the prompt opened the block, here or on a server
        ("[THINK]\n", "two and two[/THINK]four"),
        ("<|channel>thought\n", "two and two<channel|>four"),
        ("<|START_THINKING|>\n", "say </think>?<|END_THINKING|>four"),
        ("", "<think>\ntwo and two\n</think>\n\nfour"),
        ("", "  <Think>a</think><think>b</think>four"),
        ("", "four"),
    ],
)
def test_thoughts_are_kept_or_not(opening: str, text: str) -> None:
    answer = {"text": text, "tokens": 9, "ended": True, "score": 1.0}
    line = {"row": 0, "question": {"prompt": "2+2?"}, "by": {"model": "m"}, "answers": [answer]}
    rows, _ = kept_rows([line], KeepOptions("right"), lambda row, index: 0.0)
    assert rows[0]["completion"] == opening + text
    rows, _ = kept_rows([line], KeepOptions("right", thoughts=False), lambda row, index: 0.0)
    assert rows[0]["completion"] == "four"
    answer["text"] = "never ends</think>"
    assert kept_rows([line], KeepOptions("right", thoughts=False), lambda row, index: 0.0) == ([], {"empty": 1})


@pytest.mark.parametrize("keep", ["all", "judged"])
def test_a_thought_alone_is_no_row(keep: Any) -> None:
    """A server may end an answer with `stop` though it has only thought."""
    lines = asked("q", [[("<think>\nhm", 0.0), ("red", 0.0)]])
    rows, left_out = kept_rows(lines, KeepOptions(keep), lambda row, index: index / 8)
    assert ([row["completion"] for row in rows], left_out) == (["red"], {"empty": 1})


@pytest.mark.parametrize(("texts", "said"), [(["a", "a"], True), (["a", "b"], False), (["a"], False)])
def test_answers_that_are_all_one_text_are_told(texts: list[str], said: bool) -> None:
    lines = asked("q", [[(text, 1.0) for text in texts]])
    figures = {**sampled_figures(lines, KeepOptions("all")), "rows": 1, "left_out": {}}
    assert any("answers are one text" in line for line in summary_in_words(figures, "all")) is said


def test_control_tokens_that_decoding_left_out_are_no_row() -> None:
    answer = {"text": "call", "tokens": 9, "ended": True, "score": 1.0, "control": True}
    line = {"row": 0, "question": {"prompt": "q"}, "by": {"model": "m"}, "answers": [answer]}
    assert kept_rows([line], KeepOptions("all"), lambda row, index: 0.0)[0] == []
