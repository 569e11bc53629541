"""From all sampled answers to training rows, and the figures about both. No torch here.

A prompt is one line of answers.jsonl:

    {"row": 0, "place": "tasks.jsonl:1", "question": {"messages": [...]} or {"prompt": "..."}, "reference": "...",
     "by": {"model": ...}, "answers": [{"text": "...", "tokens": 12, "ended": true, "score": 1.0}, ...]}

A prompt without scores has a "problem" instead: its scorer failed.
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
GRAM = 3  # letters whose sets are compared to find near copies
Line = Mapping[str, Any]
_Answer = Mapping[str, Any]


@dataclass(frozen=True)
class KeepOptions:
    """Decides which answers become rows."""

    keep: Keep
    at_least: float = 1.0  # score of a right answer
    per_prompt: int | None = None  # rows of a prompt, of each label; None: 1 of right and pairs, else all
    pick: Literal["shortest", "random"] = "random"
    near: float = 0.9  # share of common letter triples from which two answers are copies; above 1: none is
    leave_out: Sequence[str] = ()  # prompts whose answers are always or never right
    thoughts: bool = True

    def is_right(self, answer: _Answer) -> bool:
        return bool(answer["score"] >= self.at_least - ROUNDING)


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
        for answer in line["answers"] if "problem" not in line else ():
            known = verdicts.setdefault((_question_in(line), _shown(answer, options)), set())
            known.add(options.is_right(answer))
    for line in lines:
        answers = line["answers"]
        if "problem" in line:
            left_out["the scorer failed"] += len(answers)
            continue
        right = [options.is_right(answer) for answer in answers]
        verdict = {0: "never", len(right): "always"}.get(sum(right))
        if verdict in options.leave_out:
            left_out[f"their prompt is {verdict} right"] += len(answers)
            continue
        order = sorted(range(len(answers)), key=lambda index: uniform(line["row"], index))
        by_length = sorted(order, key=lambda index: answers[index]["tokens"])
        usable: dict[bool, list[int]] = {True: [], False: []}
        for index in by_length if options.pick == "shortest" else order:
            answer, verdict_kept = answers[index], options.keep == "all" or right[index]
            reason = _unusable(answer, options)
            if not reason and options.keep == "right" and not right[index]:
                reason = "wrong"
            text = _shown(answer, options)
            if not reason and options.keep in ("pairs", "judged") and len(verdicts[_question_in(line), text]) == 2:
                reason = "called right and wrong for one question"
            same = [_shown(answers[each], options) for each in usable[verdict_kept]]
            if not reason and any(near_copies(text, each, options.near) for each in same):
                reason = "near copies of another one"
            if reason:
                left_out[reason] += 1
            else:
                usable[verdict_kept].append(index)
        most = options.per_prompt or (1 if options.keep in ("right", "pairs") else len(answers))
        if options.keep == "pairs":
            most = min(most, *map(len, usable.values()))
        for index in [each for found in usable.values() for each in found[most:]]:
            alone = options.keep == "pairs" and not usable[not right[index]]
            left_out["no other answer to compare with" if alone else "beyond --per-prompt"] += 1
        chosen, rejected = (found[:most] for found in usable.values())
        if options.keep == "pairs":
            rows += (_row(line, options, [first, second]) for first, second in zip(chosen, rejected, strict=True))
        elif options.keep == "judged":
            judged = {**dict.fromkeys(chosen, True), **dict.fromkeys(rejected, False)}
            rows += (_row(line, options, [index], judged[index]) for index in sorted(judged))
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


def near_copies(text: str, other: str, near: float) -> bool:
    """Whether two answers have the same words, or share `near` of their letter triples (Jaccard).

    With `near` = 1 only the words are compared, without case and punctuation. Above 1, no answer is a copy.
    """
    if near > 1:
        return False
    first, second = normalized(text), normalized(other)
    if first == second or near == 1:
        return first == second
    grams, others = ({each[at : at + GRAM] for at in range(len(each) - GRAM + 1)} for each in (first, second))
    return len(grams & others) >= near * len(grams | others) > 0


def _row(line: Line, options: KeepOptions, chosen: Sequence[int], label: bool | None = None) -> dict[str, Any]:
    """A training row. In a chat the last answer alone is supervised."""
    question = dict(line["question"])
    texts = [_shown(line["answers"][index], options) for index in chosen]
    prompt, by = question.pop("messages", None), {"written_by": line["by"]["model"]}
    if prompt is None:
        values: list[Any] = texts
        prompt = question.pop("prompt")
    else:
        values = [[{"role": "assistant", "content": text}] for text in texts]
        if options.keep in ("right", "all"):
            before = [turn | ({"weight": 0} if turn["role"] == "assistant" else {}) for turn in prompt]
            return {"messages": [*before, *values[0]], **question, **by}
    if options.keep == "pairs":
        return {"prompt": prompt, "chosen": values[0], "rejected": values[1], **question, **by}
    if options.keep == "judged":
        return {"prompt": prompt, "completion": values[0], "label": label, **question, **by}
    return {"prompt": prompt, "completion": values[0], **question, **by}


def pass_at(right: int, count: int, k: int) -> float:
    """The chance that k of the `count` answers, drawn without repetition, hold a right one (Chen et al. 2021)."""
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def sampled_figures(lines: Sequence[Line], options: KeepOptions) -> dict[str, Any]:
    """pass@k with 95 % intervals, prompts by verdict, and lengths in tokens."""
    scored = [line for line in lines if "problem" not in line]
    if not scored:
        return {"prompts": len(lines), "failed": len(lines)}
    count = len(scored[0]["answers"])
    right = [sum(map(options.is_right, line["answers"])) for line in scored]
    ks = [2**power for power in range(count.bit_length()) if 2**power < count] + [count]
    lengths: dict[str, dict[str, float]] = {}
    for name, wanted in (("right", True), ("wrong", False)):
        found = [each["tokens"] for line in scored for each in line["answers"] if options.is_right(each) is wanted]
        if found:
            lengths[name] = {"answers": len(found), "median": median(found), "longest": max(found)}
    answers = [each for line in scored for each in line["answers"]]
    return {
        "prompts": len(lines),
        "failed": len(lines) - len(scored),
        "asked_again": len(lines) - len({*map(_question_in, lines)}),
        "answers_each": count,
        "pass_at": {str(k): interval([pass_at(each, count, k) for each in right]).as_json() for k in ks},
        "solved": interval([float(each > 0) for each in right]).as_json(),
        "always": right.count(count),
        "never": right.count(0),
        "alike": sum(len({each["text"] for each in line["answers"]}) == 1 for line in scored) if count > 1 else 0,
        "lengths": lengths,
        "cut": sum(not each["ended"] for each in answers),
        "unread": unread(
            [each["text"] for each in answers], [Unread() if each.get("unread") else 1.0 for each in answers]
        ),
    }


def summary_in_words(figures: Mapping[str, Any], keep: Keep) -> Iterator[str]:
    """The lines for a terminal."""
    if "pass_at" in figures:
        yield f"{counted(figures['prompts'], 'prompt')}, {counted(figures['answers_each'], 'answer')} to each:"
        yield f"{'':14}{'share':>7}{'95 %':>17}"
        shares = {f"pass@{k}": each for k, each in figures["pass_at"].items()} | {"solved": figures["solved"]}
        for name, each in shares.items():
            yield f"{name:14}{each['mean']:>7.3f}   [{each['low']:.3f}, {each['high']:.3f}]"
        yield f"always right: {counted(figures['always'], 'prompt')}; never right: {figures['never']:,}"
        if figures["alike"] == figures["prompts"] - figures["failed"]:
            yield "each prompt's answers are one text, so pass@k is pass@1; does the server obey temperature and seed?"
        if figures["asked_again"]:
            yield f"prompts with the question of an earlier one: {figures['asked_again']:,}; each has its own reference"
    for name, each in figures.get("lengths", {}).items():
        lengths = f"median {each['median']:g} tokens, longest {each['longest']:,}"
        yield f"{name} answers: {each['answers']:,}, {lengths}"
    if (not_read := figures.get("unread")) and not_read["count"]:
        yield unread_in_words(not_read)
    if figures["failed"]:
        yield f"prompts whose scorer failed: {figures['failed']:,}; the first: {figures['first_failure']}"
    noun = {"pairs": "pair", "judged": "judged answer"}.get(keep, "row")
    yield f"written: {counted(figures['rows'], noun)}" + ", so no recipe" * (figures["rows"] == 0)
    if left_out := figures["left_out"]:
        yield "other answers: " + ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
