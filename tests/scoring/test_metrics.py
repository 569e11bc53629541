"""Each metric against scores counted by hand."""
# ruff: noqa: E501  # tables of answers

from __future__ import annotations

import contextlib
import re
import time

import pytest

from finetune.errors import DataError, FinetuneError
from finetune.recipe.metric_names import METRICS, read_metric
from finetune.scoring.metrics import Metric, Scored, fitting_metrics, scores_of
from finetune.scoring.texts import normalized, without_thoughts

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>'
TWO_CALLS = '[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": [1]}}]'

# metric -> (answer, reference, score counted by hand)
BY_HAND: dict[str, list[tuple[str, str, float]]] = {
    "exact": [
        ("Bonn", "Bonn", 1), (" Bonn\n", "Bonn", 1), ("bonn", "Bonn", 0), ("Bonn.", "Bonn", 0), ("", "Bonn", 0),
        ("2024-05-06", "2024-05-06", 1), ("2024-5-6", "2024-05-06", 0), ("a b", "a  b", 0), ("ä", "ä", 1),
        ("The answer is Bonn", "Bonn", 0), ("1", "1.0", 0), ("1.0", "1.0", 1), ("Bonn\nBonn", "Bonn", 0),
        ("<think>Bonn?</think>Bonn", "Bonn", 1), ("<think>Bonn", "Bonn", 0), ("x", "<think>y</think>x", 1),
        ("'Bonn'", "Bonn", 0), ("Köln", "Koln", 0), ("yes", "yes", 1), ("no", "yes", 0),
    ],
    "normalized": [
        ("bonn", "Bonn", 1), ("The Bonn!", "bonn", 1), ("a cat", "cat", 1), ("an apple", "the apple.", 1),
        ("Bonn, Germany", "Bonn Germany", 1), ("Bonn", "Berlin", 0), ("", "Bonn", 0), ("two  words", "two words", 1),
        ("it's", "it s", 1), ("U.S.", "U S", 1), ("US", "U.S.", 0), ("Bonn\n", " Bonn", 1), ("theatre", "atre", 0),
        ("STRASSE", "straße", 1), ("ﬁne", "fine", 1), ("“quoted”", "quoted", 1), ("3.5", "3 5", 0), ("35", "3.5", 0),
        ("x-y", "x y", 1), ("Bonn is it", "Bonn", 0),
    ],
    "contains": [
        ("It is Bonn.", "Bonn", 1), ("bonn", "Bonn", 1), ("Bonner", "Bonn", 0), ("Berlin", "Bonn", 0), ("", "Bonn", 0),
        ("the Pacific Ocean, I think", "Pacific Ocean", 1), ("Pacific and Ocean", "Pacific Ocean", 0),
        ("31, 32, 33", "31, 32, 33", 1), ("31 32 33", "31, 32, 33", 1), ("31, 33", "31, 32, 33", 0),
        ("A cat sat", "the cat", 1), ("concat", "cat", 0), ("cat.", "cat", 1), ("not Bonn", "Bonn", 1),
        ("**Bonn**", "Bonn", 1), ("Bonn!Berlin", "Berlin", 1), ("10", "1", 0), ("1 0", "1", 1), ("Vatican", "Vatican City", 0),
        ("<think>Bonn</think>Berlin", "Bonn", 0),
    ],
    "number": [
        ("42", "42", 1), ("The answer is 42.", "#### 42", 1), ("42.0", "42", 1), ("41", "42", 0), ("", "42", 0),
        ("1,234", "1234", 1), ("$1,234.50", "1234.5", 1), ("6 x 7 = 42", "42", 1), ("42 apples of 50", "42", 0),
        ("-3", "-3", 1), ("3", "-3", 0), ("−3", "-3", 1), ("1e3", "1000", 0), (".5", "0.5", 1), ("50%", "50", 1),
        ("forty-two", "42", 0), ("x2", "2", 0), ("e-20", "-20", 0), ("0.1 + 0.2 = 0.3", "0.3", 1), ("3.14159", "3.1416", 0),
    ],
    "choice": [
        ("B", "B", 1), ("b", "B", 1), ("(B)", "B", 1), ("B) Bonn", "B", 1), ("B. Bonn", "B", 1), ("A", "B", 0),
        ("The answer is B", "B", 1), ("Answer: (B)", "B", 1), ("**B**", "B", 1), ("\\boxed{B}", "B", 1), ("", "B", 0),
        ("A bit of both", "A", 0), ("I choose (C)", "C", 0), ("Option D is right", "D", 0), ("Bonn", "B", 0),
        ("The answer is A. No, the answer is B.", "B", 0), ("E", "(E)", 1), ("the choice is: c", "C", 1),
        ("B and C", "C", 0), ("<think>A) no</think>B", "B", 1),
    ],
    "json_valid": [
        ('{"a": 1}', "-", 1), ("[1, 2]", "-", 1), ('"text"', "-", 1), ("12", "-", 1), ("null", "-", 1),
        ('```json\n{"a": 1}\n```', "-", 1), ("```\n[1]\n```", "-", 1), ('Here: ```{"a": 1}```', "-", 1),
        ('{"a": 1', "-", 0), ("{'a': 1}", "-", 0), ('{"a": 1,}', "-", 0), ("text", "-", 0), ("", "-", 0),
        ('{"a": 1} done', "-", 0), ("{a: 1}", "-", 0), ('{"a": 1}{"b": 2}', "-", 0), ('{"ä": "ß"}', "-", 1),
        ("[" * 5000, "-", 0), ("[" * 60 + "]" * 60, "-", 0), (' \n{"a": [1, {"b": null}]}', "-", 1),
    ],
    "json_fields": [
        ('{"a": 1}', '{"a": 1}', 1), ('{"a": 2}', '{"a": 1}', 0), ("no", '{"a": 1}', 0), ('{"a": 1.0}', '{"a": 1}', 1),
        ('{"b": 2, "a": 1}', '{"a": 1, "b": 2}', 1), ('{"a": 1}', '{"a": 1, "b": 2}', 1 / 2),
        ('{"a": 1, "b": 2}', '{"a": 1}', 1 / 2), ('{"a": 1, "c": 3}', '{"a": 1, "b": 2}', 1 / 3),
        ('{"b": [2, 4], "a": 1}', '{"a": 1, "b": [2, 3]}', 2 / 3), ('{"a": true}', '{"a": 1}', 0),
        ('{"a": " x "}', '{"a": "x"}', 1), ('{"a": "X"}', '{"a": "x"}', 0), ('{"a": null}', '{"a": null}', 1),
        ("{}", "{}", 1), ("[]", "{}", 0), ("[1, 2]", "[2, 1]", 0), ("[1]", "[1, 2]", 1 / 2),
        ('{"a": {"b": 1}}', '{"a": {"b": 1, "c": 2}}', 1 / 2), ('```json\n{"a": 1}\n```', '{"a": 1}', 1), ('{"a": "1"}', '{"a": 1}', 0),
    ],
    "tool_name": [
        (CALL, CALL, 1), ('{"name": "weather", "parameters": {}}', CALL, 1), ('{"name": "time", "arguments": {}}', CALL, 0),
        ("It is warm.", CALL, 0), ("", CALL, 0), ('[TOOL_CALLS][{"name": "weather", "arguments": {}}]', CALL, 1),
        ("[time()]", CALL, 0), ("<function=weather><parameter=city>Bonn</parameter></function>", CALL, 0),
        (CALL + CALL, CALL, 0), (TWO_CALLS, TWO_CALLS, 1), ('{"name": "b", "arguments": {}}', TWO_CALLS, 0),
        ("[a(), b(x=[1])]", TWO_CALLS, 1), ("[b(x=[1]), a()]", TWO_CALLS, 1), ("[b(x=[1]), b(x=[1])]", TWO_CALLS, 0), ('{"type": "function", "function": {"name": "weather", "arguments": "{}"}}', CALL, 1),
        ('{"tool": "weather"}', CALL, 0), ("weather", CALL, 0), ('Sure! {"name": "weather", "arguments": {}} Done.', CALL, 1),
        ('{"name": "weather"}', CALL, 1), ('{"name": 3, "arguments": {}}', CALL, 0),
    ],
    "tool_call": [
        (CALL, CALL, 1), ('{"name": "weather", "arguments": {"days": 2, "city": "Bonn"}}', CALL, 1),
        ('{"name": "weather", "arguments": {"city": "Bonn"}}', CALL, 0), ('{"name": "weather", "arguments": {"city": "Bonn", "days": 3}}', CALL, 0),
        ('{"name": "weather", "arguments": {"city": "Bonn", "days": 2, "x": 1}}', CALL, 0), ('{"name": "time", "arguments": {"city": "Bonn", "days": 2}}', CALL, 0),
        ('{"name": "weather", "parameters": {"city": "Bonn", "days": 2.0}}', CALL, 1), ('[weather(city="Bonn", days=2)]', CALL, 1),
        ("[weather(city='Bonn', days=3)]", CALL, 0), ("<function=weather><parameter=city>Bonn</parameter><parameter=days>2</parameter></function>", CALL, 0),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Bonn\\", \\"days\\": 2}"}', CALL, 1), ('{"name": "weather", "arguments": "Bonn"}', CALL, 0),
        ("", CALL, 0), ("Bonn", CALL, 0), ("[a(), b(x=[1])]", TWO_CALLS, 1),
        ("[a(), b(x=[2])]", TWO_CALLS, 0), ("[b(x=[1]), a()]", TWO_CALLS, 1), ("[b(x=[1]), b(x=[1])]", TWO_CALLS, 0), ('{"name": "weather", "arguments": {"city": "Bonn ", "days": 2}}', CALL, 1),
        ('{"name": "weather", "arguments": {"city": "bonn", "days": 2}}', CALL, 0),
    ],
}  # fmt: skip


def pairs(metric: str) -> tuple[list[str], list[Scored], list[float]]:
    rows = BY_HAND[metric]
    items = [Scored(reference, f"rows:{number}") for number, (_, reference, _) in enumerate(rows, 1)]
    return [answer for answer, _, _ in rows], items, [float(score) for _, _, score in rows]


@pytest.mark.parametrize("metric", BY_HAND)
def test_scores_counted_by_hand(metric: str) -> None:
    answers, items, by_hand = pairs(metric)
    assert len(answers) == 20
    scores = scores_of(Metric(metric), answers, items)
    assert [f"{answer!r}: {score:.4f}" for answer, score in zip(answers, scores, strict=True)] == [
        f"{answer!r}: {score:.4f}" for answer, score in zip(answers, by_hand, strict=True)
    ]


def test_normalised_like_squad() -> None:
    """The published script's normalisation, on texts without accents, where both mean the same."""
    import string

    def squad(text: str) -> str:
        letters = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())

    for text in ("The cat, a dog and an owl!", "  many   spaces ", "no articles here", "the the the end."):
        assert normalized(text) == squad(text)


def test_a_relative_tolerance() -> None:
    items = [Scored("100", "rows:1")] * 3
    choice = read_metric("number:tolerance=0.05")
    assert scores_of(Metric.of(choice), ["104", "106", "96"], items) == [1.0, 0.0, 1.0]


# (answer, score counted by hand) of regex, which has no reference; found anywhere unless the pattern is anchored
DATES = r"^\d{4}-\d\d-\d\d$"
WORDS = r"(?i)\b(yes|no)\b"
BY_PATTERN: dict[str, list[tuple[str, float]]] = {
    DATES: [
        ("2024-05-06", 1), ("on 2024-05-06", 0), ("6 May", 0), (" 2024-05-06\n", 1), ("2024-5-6", 0), ("", 0),
        ("2024-05-06.", 0), ("9999-99-99", 1), ("24-05-06", 0), ("<think>2024-05-06</think>6 May", 0),
        ("<think>6 May</think>2024-05-06", 1), ("2024-05-06\n2024-05-07", 0),
    ],
    WORDS: [
        ("Yes.", 1), ("I say NO to it", 1), ("nothing", 0), ("yesterday", 0), ("Eyes", 0), ("(yes)", 1), ("no-one", 1), ("maybe", 0),
    ],
}  # fmt: skip


def test_patterns_counted_by_hand() -> None:
    assert sum(map(len, BY_PATTERN.values())) == 20
    for pattern, rows in BY_PATTERN.items():
        metric = Metric.of(read_metric(f"regex:pattern={pattern}"))
        answers = [answer for answer, _ in rows]
        scores = scores_of(metric, answers, [Scored("-", "rows:1")] * len(rows))
        assert list(zip(answers, scores, strict=True)) == rows


@pytest.mark.thorough
def test_patterns_are_bounded() -> None:
    item = Scored("-", "rows:1")
    slow = Metric("regex", {"pattern": r"^(a|aa)+$"})
    with pytest.raises(FinetuneError, match="more than 1 s; write one without nested repetitions"):
        scores_of(slow, ["a" * 40 + "b"], [item])
    with pytest.raises(FinetuneError, match="is no regular expression"):
        scores_of(Metric("regex", {"pattern": "("}), ["a"], [item])


def test_chrf_is_sacrebleus() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    texts = [("the cat sat", "the cat sits"), ("", "x"), ("same", "same"), ("über", "uber")]
    items = [Scored(reference, "rows:1") for _, reference in texts]
    expected = [sacrebleu.CHRF().sentence_score(answer, [reference]).score / 100 for answer, reference in texts]
    assert scores_of(Metric("chrf"), [answer for answer, _ in texts], items) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metric", "reference", "problem"),
    [
        ("number", "none here", "the reference 'none here' holds no number; take another metric"),
        ("choice", "Bonn and Berlin", "the reference 'Bonn and Berlin' names no letter; write A, B, C or so"),
        ("json_fields", "{", "the reference '{' is no JSON; take another metric"),
        ("tool_call", "hello", "the reference 'hello' calls no tool; take another metric"),
        ("sql", "select 1", "sql needs a database: a column db with statements, or the option sql:db=FILE"),
    ],
)
def test_bad_references_are_one_line_each(metric: str, reference: str, problem: str) -> None:
    items = [Scored(reference, f"rows.jsonl:{line}") for line in range(1, 6)]
    with pytest.raises(DataError) as caught:
        scores_of(Metric(metric), ["x"] * 5, items)
    assert caught.value.mistakes[0] == f"rows.jsonl:1: metric {metric}: {problem}"
    assert caught.value.mistakes[3:] == ("and 2 more",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("exakt", "unknown metric 'exakt'; known are exact, "),
        ("number:tol=1", "number has no option 'tol'; write number:tolerance=..."),
        ("exact:x=1", "exact has no option 'x'; write exact alone"),
        ("number:tolerance=much", "tolerance is 'much'; write a number from 0 on"),
        ("regex", "regex needs a pattern; write regex:pattern=..."),
    ],
)
def test_unknown_metrics(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(problem)):
        read_metric(text)


def test_every_metric_has_a_scorer() -> None:
    database = {"db": ["create table t (a)"]}
    for name in METRICS:
        options = {"pattern": "."} if name == "regex" else {}
        reference = {"sql": "select 1", "number": "1", "choice": "A", "tool_name": CALL, "tool_call": CALL}.get(
            name, "{}"
        )
        assert scores_of(Metric(name, options), [reference], [Scored(reference, "rows:1", database)]) == [1.0]


@pytest.mark.parametrize(
    ("references", "row", "names"),
    [
        (["Bonn", "Berlin"], {}, ["exact", "normalized"]),
        (["12", "3.5"], {}, ["number", "exact"]),
        (["A", "(B)", "C."], {}, ["choice"]),
        (['{"a": 1}', "[1]"], {}, ["json_valid", "json_fields"]),
        ([CALL, TWO_CALLS], {}, ["tool_name", "tool_call"]),
        (["select a from t", "SELECT 1"], {"db": ["create table t (a)"]}, ["sql", "exact"]),
        (["select a from t"], {}, ["exact", "normalized"]),
    ],
)
def test_metrics_that_fit(references: list[str], row: dict[str, list[str]], names: list[str]) -> None:
    items = [Scored(reference, "rows:1", row) for reference in references]
    assert [metric.name for metric in fitting_metrics(items)] == names


def test_long_texts_are_compared_by_overlap() -> None:
    assert [metric.name for metric in fitting_metrics([Scored("word " * 20, "rows:1")])] == ["chrf", "normalized"]


def test_thoughts() -> None:
    assert without_thoughts("<think>a</think>\n\nb") == "b"
    assert without_thoughts("a</think>b") == "b"  # the template opened the block in the prompt
    assert without_thoughts("<think>never ends") == ""
    assert without_thoughts("<think>so it is 4. </think>\n4") == "4"
    assert without_thoughts("<think>what </think> is\n</think>4") == "4"
    assert without_thoughts("<think>never `</think>` ends") == ""
    assert without_thoughts("one writes </think> to end it") == "one writes </think> to end it"


# (metric, answer, reference, score counted by hand): one line of each kind that was once scored wrongly
NEIGHBOURS: list[tuple[str, str, str, float]] = [
    ("number", "12,50", "10,50", 0), ("number", "9.999,50", "1.234,50", 0), ("number", "1,00,000", "2,00,000", 0),
    ("number", "1 234", "5 234", 0), ("number", "3½", "3", 0), ("number", "-$5", "5", 0),
    ("number", "- 5", "-5", 1), ("number", "–5", "-5", 1), ("number", "1.200,00", "1200", 1),
    ("number", "5 million", "5", 0),
    ("number", "1234568", "1234567", 0), ("number", "2024-05-06", "6", 0), ("number", "3-5", "5", 0), ("number", "2π", "2", 0),
    ("number", "\\sqrt{2}", "2", 0), ("number", "±5", "5", 0), ("number", "42 cases of covid-19", "42", 1), ("number", "25 m²", "25", 1),
    ("number", "\\boxed{42} (step 3)", "42", 1),
    ("choice", "A or B", "A", 0), ("choice", "Vitamin C", "C", 0),
    ("choice", "C++", "C", 0),
    ("choice", "C is not correct", "C", 0), ("choice", "The answer cannot be B", "B", 0), ("choice", "Ⓑ", "B", 1),
    ("normalized", "vitamin A deficiency", "vitamin deficiency", 0), ("normalized", "C#", "C", 0), ("normalized", "5%", "5", 0),
    ("normalized", "2²", "22", 0), ("normalized", "3.14", "314", 0), ("normalized", "Ｂｏｎｎ", "bonn", 1), ("normalized", "!", "?", 0),
    ("contains", "東京です", "東京", 1), ("contains", "เมืองหลวงคือกรุงเทพมหานคร", "กรุงเทพ", 1), ("contains", "-5", "5", 0), ("contains", "3.5", "5", 0),
    ("contains", "共10个", "1", 0), ("contains", "正确答案是Bonn。", "Bonn", 1), ("contains", "", "A", 0),
    ("json_valid", '{"a": NaN}', "-", 0), ("json_valid", "[1e99999999999999999999]", "-", 0), ("json_valid", '\ufeff{"a": 1}', "-", 1),
    ("json_fields", '{"a": 0.10000000000000001}', '{"a": 0.1}', 0), ("json_fields", '{"cafe\u0301": 1}', '{"café": 1}', 1),
    ("tool_call", "[f(x=y)]", "[f(x=1)]", 0), ("tool_call", '{"name": "f", "arguments": ""}', '{"name": "f", "arguments": {}}', 1),
    ("tool_call", "[f(a={[1]: 2})]", "[f(a=1)]", 0), ("tool_call", "[f(a=1, a=1)]", "[f(a=1)]", 0), ("tool_call", "[f(a=b'x')]", "[f(a='x')]", 0),
    ("exact", "analysisThe user asks.assistantfinalBonn", "Bonn", 1), ("exact", "<|channel>thought\nBonn?<channel|>Bonn", "Bonn", 1),
    ("exact", "Use `</think>` to end it", "to end it", 0), ("exact", "cafe\u0301", "café", 1),
]  # fmt: skip


def test_neighbours_counted_by_hand() -> None:
    found = []
    for metric, answer, reference, wanted in NEIGHBOURS:
        (score,) = scores_of(Metric(metric), [answer], [Scored(reference, "rows:1")])
        if score != wanted:
            found.append((metric, answer, reference, score))
    assert found == []


def test_the_references_show_their_decimal_mark() -> None:
    items = [Scored("10,50", "rows:1"), Scored("1.200", "rows:2")]
    assert scores_of(Metric("number"), ["10.50", "1200"], items) == [1.0, 1.0]
    assert scores_of(Metric("number"), ["10.50", "1.2"], items) == [1.0, 0.0]
    items = [Scored("10,50", "rows:1"), Scored("1.5", "rows:2"), Scored("1.200", "rows:3")]
    with pytest.raises(DataError, match=r"rows:3: .*1\.200 can be read in two ways"):
        scores_of(Metric("number"), ["1"] * 3, items)


@pytest.mark.parametrize("reference", ["2024-05-06", "12:30", "3-5", "[f(a={[1]: 2})]", "[f(x=y)]", ""])
def test_references_that_cannot_be_read_are_refused(reference: str) -> None:
    metric = "contains" if not reference else "tool_call" if reference.startswith("[") else "number"
    with pytest.raises(DataError, match=r"^rows:7: metric"):
        scores_of(Metric(metric), ["1"], [Scored(reference, "rows:7")])


@pytest.mark.thorough
def test_many_openings_end_soon() -> None:
    """Sixty thousand openings of a call were searched to the end each, which took minutes."""
    item = Scored('<function=a>{"b": {"c": ' * 60_000, "rows:1")
    began = time.process_time()
    fitting_metrics([item])
    with pytest.raises(DataError, match="calls no tool"):
        scores_of(Metric("tool_name"), [item.reference], [item])
    assert time.process_time() - began < 20


@pytest.mark.slow
def test_openings_of_all_kinds_end_soon() -> None:
    began = time.process_time()
    for opening in ('<function=a>{"a":', '{"a":', "[f(", "```", "\\boxed{", "<think>", "1,", "1 ", "\n", "Answer: "):
        item = Scored(opening * 60_000, "rows:1")
        fitting_metrics([item])
        for metric in ("number", "choice", "json_valid", "tool_name"):
            with contextlib.suppress(DataError):
                scores_of(Metric(metric), [item.reference], [item])
    assert time.process_time() - began < 100


def test_numbers_of_other_libraries_are_scores() -> None:
    import numpy as np

    from finetune.scoring.function import call_function

    for value, score in ((np.bool_(True), 1.0), (np.float32(0.5), 0.5), (0.1 * 10, 1.0), (True, 1.0)):
        assert call_function(lambda *_, value=value: value, "", "", {}) == score
    for value in (np.float32(7), float("nan"), "1", None, "x" * 10**6):
        with pytest.raises(ValueError, match="return a number from 0 to 1") as caught:
            call_function(lambda *_, value=value: value, "", "", {})
        assert len(str(caught.value)) < 400


def test_a_nested_pattern_is_one_line() -> None:
    with pytest.raises(FinetuneError, match="is no regular expression"):
        scores_of(Metric("regex", {"pattern": "(" * 5000 + ")" * 5000}), ["a"], [Scored("-", "rows:1")])


FORMULA = "We find \\boxed{\\langle H\\rangle \\ll \\Delta E}."
STATED = [
    (f"{FORMULA}\n\n**Answer: D**", "D"), (FORMULA, ""),
    ("The answer is B: \\boxed{12}", "B"), ("\\boxed{\\text{B. Paris}}", "B"), ("\\boxed{(B) 12 m}", "B"),
    ("\\boxed{\\boxed{B}}", "B"), ("\\boxed{A or B}", ""), ("\\boxed{} The answer is C", "C"),
    ("ANSWER: None of the above", ""),
    ("ANSWER: I don't know", ""),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "letter"), STATED)
def test_letters_as_public_reports_have_them(answer: str, letter: str) -> None:
    """A box with a formula, distractors that are named and ruled out, and answers without a choice."""
    items = [Scored(reference, "rows:1") for reference in "ABCDE"]
    assert scores_of(Metric("choice"), [answer] * 5, items) == [float(each == letter) for each in "ABCDE"]


@pytest.mark.parametrize(
    ("metric", "reference", "right", "wrong"),
    [
        ("normalized", "A", ["A", "A.", "**A**", "*A*", "- A", "(a)"], ["A-", "A*", "A+", "A−", "a-"]),
        ("normalized", "BBB-", ["BBB-", "BBB-."], ["BBB", "BBB+"]),
        ("normalized", "well", ["Well-", "well!"], ["C"]),
        ("contains", "C", ["C is good", "use C.", "C+SQL", "C/D"], ["C++ is good", "C# is good", "a C- here", "C+"]),
        ("contains", "C++", ["use C++."], ["use C."]),
        ("contains", "5", ["5+ years", "5*"], ["15"]),
        ("number", "15", ["15", "30 minus 15 is 15"], ["minus 15", "Negative 15", "20 minus 15", "x minus 15"]),
        ("number", "-3", ["minus 3", "is **minus 3**", "= negative $3", "#### minus 3 (of 5)", "fell to\nminus 3"], ["3"]),
        ("number", "42", ["#### 42 (of 50)", "#### $42, not 50", "7\n#### 42 in 5 steps"], ["#### 50 (of 42)"]),
        ("number", "3", ["a negative number: 3"], ["3 Tsd.", "3 tys. zł"]),
    ],
)  # fmt: skip
def test_short_marks_and_words_that_carry_meaning(
    metric: str, reference: str, right: list[str], wrong: list[str]
) -> None:
    items = [Scored(reference, "rows:1")] * (len(right) + len(wrong))
    assert scores_of(Metric(metric), [*right, *wrong], items) == [1.0] * len(right) + [0.0] * len(wrong)
