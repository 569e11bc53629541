"""From all sampled answers to training rows, and the figures about both. No torch here.

A prompt is one line of answers.jsonl:

    {"row": 0, "place": "tasks.jsonl:1", "question": {"messages": [...]} or {"prompt": "..."}, "reference": "...",
     "by": {"model": ...}, "answers": [{"text": "...", "tokens": 12, "ended": true, "score": 1.0}, ...]}

An answer on which the scorer failed has null for its score, and a "problem".
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from finetune.data.cells import BadRow, checked_text
from finetune.scoring.function import ROUNDING
from finetune.scoring.intervals import interval
from finetune.scoring.metrics import Unread, unread, unread_in_words
from finetune.scoring.texts import normalized, with_opened_block, without_thoughts
from finetune.wording import counted

Keep = Literal["right", "pairs", "judged", "all"]
ROW_FORMATS = {"right": "messages", "all": "messages", "pairs": "preference", "judged": "kto"}
GRAM, NEAR = 3, 0.9  # letters whose sets are compared to find near copies, and the share that two copies have in common
Line = Mapping[str, Any]
_Answer = Mapping[str, Any]


@dataclass(frozen=True)
class KeepOptions:
    """Decides which answers become rows."""

    keep: Keep
    at_least: float = 1.0  # score of a right answer
    per_prompt: int | None = None  # rows of a prompt, of each label; None: 1 of right and pairs, else all
    pick: Literal["shortest", "random"] = "random"
    leave_out: Sequence[str] = ()  # prompts whose answers are always or never right
    thoughts: bool = True

    def is_right(self, answer: _Answer) -> bool:
        return bool(answer["score"] >= self.at_least - ROUNDING)


def failures(line: Line) -> list[str]:
    """The problems of a prompt's answers on which the scorer failed."""
    return [answer["problem"] for answer in line["answers"] if answer["score"] is None]


def kept_rows(
    lines: Sequence[Line], options: KeepOptions, uniform: Callable[[int, int], float]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The training rows in the order of the prompts, and how many answers became none, by reason.

    Args:
        uniform: The number in [0, 1) of a prompt's answer; random choices take the smallest.
    """
    rows: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    verdicts: dict[tuple[str, str], set[bool]] = {}  # of an answer to a question, which several prompts may ask
    for line in lines:
        for answer in line["answers"]:
            if answer["score"] is not None:
                verdict = verdicts.setdefault((_question_in(line), _shown(answer, options)), set())
                verdict.add(options.is_right(answer))
    for line in lines:
        answers = line["answers"]
        scored = [index for index, answer in enumerate(answers) if answer["score"] is not None]
        if failed := failures(line):
            left_out["the scorer failed"] += len(failed)
        if not scored:
            continue
        right = {index: options.is_right(answers[index]) for index in scored}
        outcome = {0: "never", len(right): "always"}.get(sum(right.values()))
        if outcome in options.leave_out:
            left_out[f"their prompt is {outcome} right"] += len(scored)
            continue
        order = sorted(scored, key=lambda index: uniform(line["row"], index))
        if options.pick == "shortest":
            order.sort(key=lambda index: answers[index]["tokens"])
        usable: dict[bool, list[int]] = {True: [], False: []}
        for index in order:
            text, label = _shown(answers[index], options), options.keep == "all" or right[index]
            reason = _unusable(answers[index], options)
            if not reason and options.keep == "right" and not label:
                reason = "wrong"
            if not reason and options.keep in ("pairs", "judged") and len(verdicts[_question_in(line), text]) == 2:
                reason = "called right and wrong for one question"
            texts = (_shown(answers[kept], options) for kept in usable[label])
            if not reason and any(near_copies(text, other) for other in texts):
                reason = "near copies of another one"
            if reason:
                left_out[reason] += 1
            else:
                usable[label].append(index)
        most = options.per_prompt or (1 if options.keep in ("right", "pairs") else len(answers))
        if options.keep == "pairs":
            most = min(most, *map(len, usable.values()))
        for label, indices in usable.items():
            alone = options.keep == "pairs" and not usable[not label]
            if beyond := len(indices[most:]):
                left_out["no other answer to compare with" if alone else "beyond --per-prompt"] += beyond
        chosen, rejected = (indices[:most] for indices in usable.values())
        if options.keep == "pairs":
            rows += (_row(line, options, pair) for pair in zip(chosen, rejected, strict=True))
        elif options.keep == "judged":
            rows += (_row(line, options, [index], right[index]) for index in sorted([*chosen, *rejected]))
        else:
            rows += (_row(line, options, [index]) for index in sorted(chosen))
    return rows, dict(left_out)


def _unusable(answer: _Answer, options: KeepOptions) -> str:
    """Why nobody should learn from an answer's form, right or wrong; empty if its form is whole."""
    if not answer["ended"]:
        return "cut at --max-new-tokens"
    if answer.get("control"):
        return "control tokens in them"
    text = _shown(answer, options)
    if not without_thoughts(text):  # a thought alone, too
        return "empty"
    if "\ufffd" in text:
        return "bytes in them that are no text"
    try:
        checked_text(text, "answer")
    except BadRow:
        return "characters in them that no row may have"
    return ""


def _shown(answer: _Answer, options: KeepOptions) -> str:
    """The answer's text in a row."""
    return with_opened_block(answer["text"]) if options.thoughts else without_thoughts(answer["text"])


def _question_in(line: Line) -> str:
    return json.dumps(line["question"], sort_keys=True)


def near_copies(text: str, other: str) -> bool:
    """Whether two answers have the same words, or share NEAR of their letter triples (Jaccard)."""
    first, second = normalized(text), normalized(other)
    grams, others = ({text[at : at + GRAM] for at in range(len(text) - GRAM + 1)} for text in (first, second))
    return first == second or len(grams & others) >= NEAR * len(grams | others) > 0


def answered(question: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A question's columns with an answer. In a chat the answer alone is supervised."""
    if "messages" not in question:
        return {**question, "completion": text}
    before = [turn | ({"weight": 0} if turn["role"] == "assistant" else {}) for turn in question["messages"]]
    return {**question, "messages": [*before, {"role": "assistant", "content": text}]}


def _row(line: Line, options: KeepOptions, chosen: Sequence[int], label: bool | None = None) -> dict[str, Any]:
    """A training row."""
    question, author = dict(line["question"]), {"written_by": line["by"]["model"]}
    values: list[Any] = [_shown(line["answers"][index], options) for index in chosen]
    if options.keep in ("right", "all"):
        return answered(question, values[0]) | author
    if "messages" in question:
        values = [[{"role": "assistant", "content": text}] for text in values]
    prompt = {"prompt": question.pop("messages", None) or question.pop("prompt")}
    if options.keep == "pairs":
        return {**prompt, "chosen": values[0], "rejected": values[1], **question, **author}
    return {**prompt, "completion": values[0], "label": label, **question, **author}


def pass_at(right: int, count: int, k: int) -> float:
    """The chance that k of the `count` answers, drawn without repetition, hold a right one (Chen et al. 2021)."""
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def sampled_figures(lines: Sequence[Line], options: KeepOptions) -> dict[str, Any]:
    """pass@k with 95 % intervals, prompts by verdict, and lengths in tokens.

    Answers on which the scorer failed count nowhere: pass@k is of the prompts with k scored answers.
    """
    answers = [answer for line in lines for answer in line["answers"]]
    scored = [answer for answer in answers if answer["score"] is not None]
    right = [[options.is_right(answer) for answer in line["answers"] if answer["score"] is not None] for line in lines]
    right = [verdicts for verdicts in right if verdicts]
    count = len(lines[0]["answers"])
    ks = sorted({*(2**power for power in range(count.bit_length())), count})
    chances = {k: [pass_at(sum(prompt), len(prompt), k) for prompt in right if len(prompt) >= k] for k in ks}
    lengths: dict[str, dict[str, float]] = {}
    for name, is_right in (("right", True), ("wrong", False)):
        if tokens := [answer["tokens"] for answer in scored if options.is_right(answer) is is_right]:
            lengths[name] = {"answers": len(tokens), "median": median(tokens), "longest": max(tokens)}
    return {
        "prompts": len(lines),
        "failed": len(answers) - len(scored),
        "asked_again": len(lines) - len({*map(_question_in, lines)}),
        "answers_each": count,
        "pass_at": {str(k): interval(values).as_json() for k, values in chances.items() if values},
        "solved": interval([float(any(prompt)) for prompt in right]).as_json(),
        "always": sum(map(all, right)),
        "never": len(right) - sum(map(any, right)),
        "alike": sum(len({answer["text"] for answer in line["answers"]}) == 1 for line in lines) if count > 1 else 0,
        "lengths": lengths,
        "cut": sum(not answer["ended"] for answer in answers),
        "unread": unread(
            [answer["text"] for answer in scored], [Unread() if answer.get("unread") else 1.0 for answer in scored]
        ),
    }


def summary_in_words(figures: Mapping[str, Any], keep: Keep) -> Iterator[str]:
    """The lines for a terminal."""
    yield f"{counted(figures['prompts'], 'prompt')}, {counted(figures['answers_each'], 'answer')} to each:"
    yield f"{'':14}{'share':>7}{'95 %':>17}"
    shares = {f"pass@{k}": share for k, share in figures["pass_at"].items()} | {"solved": figures["solved"]}
    for name, share in shares.items():
        yield f"{name:14}{share['mean']:>7.3f}   [{share['low']:.3f}, {share['high']:.3f}]"
    yield f"always right: {counted(figures['always'], 'prompt')}; never right: {figures['never']:,}"
    if figures["alike"] == figures["prompts"]:
        yield "each prompt's answers are one text, so pass@k is pass@1; does the server obey temperature and seed?"
    if figures["asked_again"]:
        yield f"prompts with the question of an earlier one: {figures['asked_again']:,}; each has its own reference"
    for name, lengths in figures["lengths"].items():
        words = f"median {lengths['median']:g} tokens, longest {lengths['longest']:,}"
        yield f"{name} answers: {lengths['answers']:,}, {words}"
    if figures["unread"]["count"]:
        yield unread_in_words(figures["unread"])
    if figures["failed"]:
        yield f"answers whose scorer failed: {figures['failed']:,}; the first: {figures['first_failure']}"
    noun = {"pairs": "pair", "judged": "judged answer"}.get(keep, "row")
    yield f"written: {counted(figures['rows'], noun)}" + ", so no recipe" * (figures["rows"] == 0)
    if left_out := figures["left_out"]:
        yield "other answers: " + ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
