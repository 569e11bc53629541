"""Generated pairs: a reference equals itself and its other spellings; an answer with another value does not.

The generator knows each value and how it writes it, so the wanted score comes from no reader of numbers.
"""
# ruff: noqa: E501  # tables

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from finetune.scoring.metrics import Metric, Scored, scores_of

DIGITS = ["0123456789", "０１２３４５６７８９", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "๐๑๒๓๔๕๖๗๘๙"]
SENTENCES = [
    "{}", "The answer is {}.", "**{}**", "$\\boxed{{{}}}$", "Das Ergebnis: {}", "答案是{}。", "정답은 {}입니다", "答えは{}です。",
    "La réponse est {} !", "Ответ: {}.", "คำตอบคือ {}", "الإجابة: {}", "उत्तर {} है", "#### {}", "x = {}", "{} €", "{} km", "{} %",
]  # fmt: skip
STATEMENTS = [
    "{}", "({})", "{}.", "**{}**", "{}\nBecause it is a bird.", "{} - Paris", "{}) Paris", "The answer is {}.", "Answer: ({})", "\\boxed{{\\text{{{}}}}}", "<answer>{}</answer>",
]  # fmt: skip
WORDS = [
    "Bonn",
    "café",
    "北京",
    "서울",
    "Москва",
    "القاهرة",
    "กรุงเทพ",
    "दिल्ली",
    "C#",
    "C++",
    "-5",
    "vitamin A",
    "50 %",
    "2²",
    "Ω",
    ":)",
]
TOOLS = ["weather", "get_time", "db.search"]


def grouped(whole: str, mark: str, indian: bool = False) -> str:
    """1234567 as 1,234,567, or as 12,34,567."""
    head, tail = whole[:-3], whole[-3:]
    size, parts = 2 if indian else 3, []
    while head:
        parts.insert(0, head[-size:])
        head = head[:-size]
    return mark.join([*parts, tail])


def number_in_words(rng: random.Random, units: int, tenths: str) -> str:
    """A number of at least five digits before its decimal mark, and two after it, in a random country's way."""
    sign = "" if units >= 0 else rng.choice("-−–－")
    group, mark = rng.choice(
        [(",", "."), (".", ","), (" ", ","), ("\u202f", ","), ("'", "."), ("’", "."), ("", "."), ("", ",")]
    )
    indian = group == "," and rng.random() < 0.3
    whole = grouped(str(abs(units)), group, indian) if group else str(abs(units))
    text = whole + (mark + tenths if tenths else "")
    if rng.random() < 0.3:
        text = text.translate(str.maketrans(DIGITS[0], rng.choice(DIGITS)))
    currency = rng.choice(["", "", "$", "€", "₹"])
    return rng.choice(SENTENCES).format(sign + currency + text)


def numbers(rng: random.Random) -> tuple[str, str, str]:
    units = rng.choice([-1, 1]) * rng.randint(10**4, 10**9)
    tenths = rng.choice(["", f"{rng.randint(1, 99):02}"])
    near = rng.choice([units + 1, -units, units * 10, units + 1000])
    return (
        str(units) + (f".{tenths}" if tenths else ""),
        number_in_words(rng, units, tenths),
        number_in_words(rng, near, tenths),
    )


def choices(rng: random.Random) -> tuple[str, str, str]:
    letter, other = rng.sample("ABCD", 2)
    right = rng.choice(STATEMENTS).format(rng.choice([letter, chr(ord(letter) - ord("A") + ord("Ａ"))]))
    return letter, right, rng.choice(STATEMENTS).format(other)


def texts(rng: random.Random) -> tuple[str, str, str]:
    import unicodedata

    words = rng.sample(WORDS, rng.randint(1, 3))
    near = words.copy()
    at = rng.randrange(len(words))
    near[at] = rng.choice([each for each in WORDS if each not in words] + [words[at] + "x"])
    same = unicodedata.normalize(rng.choice(["NFC", "NFD"]), " ".join(words))
    return " ".join(words), rng.choice(["", " "]) + same, " ".join(near)


def value(rng: random.Random, depth: int = 0) -> object:
    kinds = [rng.randint(-99, 99), rng.choice(WORDS), rng.random() < 0.5, None, rng.randint(1, 99) / 8]
    if depth < 2:
        kinds += [
            [value(rng, depth + 1) for _ in range(rng.randint(0, 2))],
            {key: value(rng, depth + 1) for key in rng.sample("abcd", 2)},
        ]
    return rng.choice(kinds)


def changed(rng: random.Random, each: object) -> object:
    """Another value: of another kind, or one more."""
    if isinstance(each, bool) or each is None or not isinstance(each, int | float):
        return rng.choice([7, "seven"])
    return rng.choice([each + 1, str(each), [each]])


def objects(rng: random.Random) -> tuple[str, str, str]:
    right = {key: value(rng) for key in rng.sample("abcde", 3)}
    near = dict(right)
    key = rng.choice([*near])
    if rng.random() < 0.3:
        del near[key]
    else:
        near[key] = changed(rng, near[key])
    shuffled = dict(rng.sample([*right.items()], 3))
    form = rng.choice(["{}", "```json\n{}\n```", "~~~\n{}\n~~~", "Here it is:\n```json\n{}", "\ufeff{}"])
    return json.dumps(right), form.format(json.dumps(shuffled, ensure_ascii=False)), json.dumps(near)


def written(rng: random.Random, name: str, arguments: dict[str, object]) -> str:
    """A call as JSON, with tags or without, or as Llama writes it."""
    body = json.dumps(arguments, ensure_ascii=rng.random() < 0.5)
    python = ", ".join(f"{key}={each!r}" for key, each in arguments.items())
    return rng.choice(
        [
            f'<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>',
            f'{{"function": "{name}", "parameters": {body}}}',
            json.dumps({"type": "function", "function": {"name": name, "arguments": body}}),
            f"<function={name}>{body}</function>",
            f"[{name}({python})]",
            f"<|python_tag|>[{name}({python})]",
        ]
    )


def calls(rng: random.Random) -> tuple[str, str, str]:
    name = rng.choice(TOOLS)
    arguments = {key: value(rng) for key in rng.sample(["city", "days", "opts"], rng.randint(1, 3))}
    near = dict(arguments)
    key = rng.choice([*near])
    other = name
    if rng.random() < 0.2:
        other = rng.choice([each for each in TOOLS if each != name])
    elif rng.random() < 0.3:
        near["more"] = 1
    else:
        near[key] = changed(rng, near[key])
    return written(rng, name, arguments), written(rng, name, arguments), written(rng, other, near)


MADE_BY = {
    "number": numbers, "choice": choices, "exact": texts, "normalized": texts, "json_fields": objects, "tool_call": calls,
}  # fmt: skip


def wrong_pairs(metric: str, count: int, seed: int) -> Iterator[str]:
    rng = random.Random(f"{metric} {seed}")
    for _ in range(count):
        reference, same, near = MADE_BY[metric](rng)
        for answer, wanted in ((reference, 1.0), (same, 1.0), (near, 0.0)):
            (score,) = scores_of(Metric(metric), [answer], [Scored(reference, "rows:1")])
            if (score == 1.0) != (wanted == 1.0):
                yield f"{metric}: {answer!r} against {reference!r}: {score}"


@pytest.mark.parametrize("metric", MADE_BY)
def test_equal_pairs_score_one_and_near_misses_less(metric: str) -> None:
    assert [*wrong_pairs(metric, 60, seed=0)] == []


@pytest.mark.slow
def test_five_thousand_pairs() -> None:
    wrong = [each for metric in MADE_BY for each in wrong_pairs(metric, 850, seed=1)]
    assert 850 * len(MADE_BY) >= 5000
    assert wrong == [], Counter(each.split(":")[0] for each in wrong)
