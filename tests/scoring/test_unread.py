"""Answers in forms that are read, with their scores, and answers in other forms, which are unread and score 0."""
# ruff: noqa: E501  # tables of answers

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from finetune.answers.scores import compared, scores_table
from finetune.generation.generate import Answer
from finetune.run_folder.facts import is_as_written
from finetune.scoring.metrics import Metric, Scored, Unread, scores_of, unread
from finetune.training.row_scorer import score_line, score_line_in_words


class Case(NamedTuple):
    metric: str
    answer: str
    reference: str
    score: float | None  # None: unread
    among: tuple[str, ...] = ()  # other references


LETTERS = "ABCD"
CHOICES = [
    "{}", "({})", "[{}]", "{}.", "{})", "**{}**", "$\\boxed{{{}}}$", "The box: \\boxed{{\\text{{{}}}}}", "{}) Paris", "{}. 12 metres", "({}) the Rhine",
    "{}\n\nIt is the longest river in Europe.", "Answer: {}", "**Answer:** ({})", "Final answer: {}", "The answer is {}.", "The correct answer is ({}).",
    "The Rhine is long. The answer is {}.", "First, A and B are shorter.\n\nAnswer: {}", "{} - Paris", "<think>A, no, D</think>{}", "answer: {}",
]  # fmt: skip
LABELS = ["Antwort", "Réponse", "Respuesta", "Ответ", "答案", "답", "الجواب"]  # as the references have them
WHOLE = [
    "{}", "The answer is {}.", "**{}**", "$\\boxed{{{}}}$", "5 and 7 make {}", "#### {}", "x = {}", "{} apples", "{} km", "{} %", "€{}", "Das Ergebnis: {}",
    "La réponse est {} euros.", "step 3: {}", "\\({}\\)", "3 x 4 = 12, so {}", "Ответ: {}.", "答案是{}。", "{} m²", "\\boxed{{{}}} (step 3)",
]  # fmt: skip
NUMBERS = [("1234", "1234"), ("-1,234", "-1234"), ("1,234.50", "1234.5"), ("12 345", "12345")]
MARKED = [("1.234,50", "1234,50"), ("12,5", "12,50"), ("1.234", "1234"), ("2'000,5", "2000,50")]  # a decimal comma
TOOLS = [("weather", {"city": "Bonn", "days": 2}), ("db.search", {"words": ["a", "b"], "exact": True, "most": None})]
CALLS = [
    '{{"name": "{0}", "arguments": {1}}}', '<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>', '[TOOL_CALLS][{{"name": "{0}", "arguments": {1}}}]',
    '{{"name": "{0}", "parameters": {1}}}', '{{"type": "function", "function": {{"name": "{0}", "arguments": {1}}}}}', "<function={0}>{1}</function>",
    '<|python_tag|>{{"name": "{0}", "parameters": {1}}}<|eom_id|>', 'Sure.\n```json\n{{"name": "{0}", "arguments": {1}}}\n```', "[{0}({2})]", "<|python_tag|>[{0}({2})]",
]  # fmt: skip


def read_cases() -> Iterator[Case]:
    for form in CHOICES:
        for letter in LETTERS:
            yield Case("choice", form.format(letter), letter, 1.0)
        yield Case("choice", form.format("C"), "B", 0.0)
    for label in LABELS:
        among = tuple(f"{label}: {letter}" for letter in LETTERS)
        yield Case("choice", f"{label}: C", among[2], 1.0, among)
        yield Case("choice", f"{label}: C", among[1], 0.0, among)
        yield Case("choice", f"Rhein.\n{label}: ({LETTERS[0]})", among[0], 1.0, among)
    for form in WHOLE:
        for written, reference in NUMBERS:
            yield Case("number", form.format(written), reference, 1.0)
        yield Case("number", form.format("1,235"), "1234", 0.0)
    for written, reference in MARKED:
        yield Case("number", f"Es sind {written} Liter.", reference, 1.0, ("10,50",))
        yield Case("number", f"Es sind 9{written} Liter.", reference, 0.0, ("10,50",))
    for form in CALLS:
        for name, arguments in TOOLS:
            reference = json.dumps({"name": name, "arguments": arguments})
            for given, score in ((arguments, 1.0), ({**arguments, "more": 1}, 0.0)):
                python = ", ".join(f"{key}={value!r}" for key, value in given.items())
                answer = form.format(name, json.dumps(given), python)
                yield Case("tool_call", answer, reference, score)
                yield Case("tool_name", answer, reference, 1.0)


STATED = [  # of one letter, in words that only a table of languages reads
    "Die Antwort ist {}.", "Antwort: {}", "La réponse est {}.", "Réponse : {}", "La respuesta correcta es la {}.", "A resposta é {}.", "La risposta è {}.",
    "Правильный ответ: {}", "答案是{}。", "答案：{}", "正解は{}です。", "정답은 {}입니다.", "Odpowiedź: {}", "Cevap: {}", "الإجابة الصحيحة هي {}", "คำตอบคือ {}", "सही उत्तर {} है",
    "Đáp án là {}", "Het antwoord is {}.", "Svaret är {}.", "Vastaus on {}.", "I choose ({})", "Option {} is right", "It must be ({}).", "My pick would be {}!", "Probably {}",
]  # fmt: skip
HEDGED = [
    "A or B", "B or maybe C", "A, B", "B and C", "AB", "Answer: B or C", "The answer is A. No, the answer is B.", "B\nNo, C is right.", "(A) and (B)",
    "Not the answer: B", "The answer is not B", "It is not B", "Nicht B, sondern C", "not (B)", "B is wrong", "(B) is wrong", "B, not A", "答案不是A，而是B", "None of them",
    "Vitamin B", "B12", "A-B", "C++", "Bonn", "ABBA", "a plan B", "Plan B is good", "", "I do not know.", "E = mc²", "\\boxed{A or B}", "\\boxed{x = A + B}",
]  # fmt: skip
SPELLED = [
    "forty-two", "zweiundvierzig", "quarante-deux", "cuarenta y dos", "сорок два", "四十二", "마흔둘", "اثنان وأربعون", "42/1", "84/2", "\\frac{84}{2}", "\\frac{1}{42}", "\\dfrac12",
    "41½", "42½", "4.2e1", "4.2 × 10^1", "42 × 10^3", "42 \\times 10^{3}", "10^{42}", "10^42", "2^42", "√42", "\\sqrt{42}", "42π", "42\\pi", "40-42", "40–42", "40 + 2", "84 / 2",
    "6 x 7", "42:00", "2024-05-42", "1.2.42", "42 million", "42 Millionen", "42 Mio.", "42k", "42 тысячи", "42万", "42 lakh", "42 crore", "4,2,42", "x42", "F-42", "±42", "no idea", "",
    "x - 42", "\\binom{50}{42}", "3(42/7)", "1/42", "0x42", "42 bn", "42 Milliarden", "42 mil",
]  # fmt: skip
DIALECTS = [
    "<function={0}>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>",  # Qwen 3 Coder
    '<function_calls><invoke name="{0}"><parameter name="city">Bonn</parameter><parameter name="days">2</parameter></invoke></function_calls>',
    "<tool_call>{0}\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",  # GLM
    'call:{0}{{city:<|"|>Bonn<|"|>,days:2}}',  # Gemma 4
    "[TOOL_CALLS]{0}[ARGS]{1}", "{0}{1}", "{0}\n```json\n{1}\n```", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{0}\n{1}",  # Mistral, DeepSeek
    "to=functions.{0} <|constrain|>json<|message|>{1}", "<|channel|>commentary to=functions.{0}<|message|>{1}",  # gpt-oss
    "{0}({2})", "print({0}({2}))", "```python\n{0}({2})\n```", "```tool_code\n{0}({2})\n```", "Calling: [{0}({2})]", "[{0}('Bonn', 2)]", "[{0}(city=Bonn, days=2)]",
    "{0}", "Use {0} with Bonn and 2 days.", "It is warm in Bonn.", "", "{{'name': '{0}', 'arguments': {1}", "<tool name='{0}'>{1}</tool>", "Action: {0}\nAction Input: {1}",
    '<function={0}>oops</function>{{"name": "{0}", "arguments": {1}}}', '{0}{1}\n{{"name": "{0}", "arguments": {1}}}', '<invoke name="other"><parameter name="x">{{"name": "{0}", "arguments": {1}}}</parameter></invoke>',
]  # fmt: skip


def other_cases() -> Iterator[Case]:
    for form in STATED:
        for letter in LETTERS:
            yield Case("choice", form.format(letter), letter, None)
    for answer in HEDGED:
        for letter in "BC":
            yield Case("choice", answer, letter, None)
    for answer in SPELLED:
        yield Case("number", answer, "42", None)
    for form in DIALECTS:
        for name in ("weather", "get_forecast"):
            arguments = json.dumps({"city": "Bonn", "days": 2})
            reference = f'{{"name": "{name}", "arguments": {arguments}}}'
            answer = form.format(name, arguments, "city='Bonn', days=2")
            yield Case("tool_call", answer, reference, None)
            if name == "weather":
                yield Case("tool_name", answer, reference, None)


def found(case: Case) -> float:
    items = [Scored(reference, "rows:1") for reference in (case.reference, *case.among)]
    (score,) = scores_of(Metric(case.metric), [case.answer], items[:1], items)
    return score


def test_forms_that_are_read_have_their_scores() -> None:
    cases = [*read_cases()]
    assert len(cases) >= 300
    scores = [found(case) for case in cases]
    assert [case for case, score in zip(cases, scores, strict=True) if score != case.score] == []
    assert [case for case, score in zip(cases, scores, strict=True) if isinstance(score, Unread)] == []


def test_other_forms_are_unread_and_never_right() -> None:
    cases = [*other_cases()]
    assert len(cases) >= 300
    scores = [found(case) for case in cases]
    assert [case for case, score in zip(cases, scores, strict=True) if not isinstance(score, Unread)] == []
    assert {*scores} == {0.0}


def test_unread_answers_count_as_0_and_are_told_for_each_model() -> None:
    answers = [["Antwort: B", "B", "A"], ["B", "B or C", "vielleicht \x1b[31mB"]]
    items = [Scored("B", "rows:1")] * 3
    base, tuned = (scores_of(Metric("choice"), texts, items) for texts in answers)
    figures = compared(base, tuned, answers=answers)
    assert (figures["base"]["mean"], figures["tuned"]["mean"]) == (1 / 3, 1 / 3)
    assert {name: each["count"] for name, each in figures["unread"].items()} == {"base": 1, "tuned": 2}
    assert {key: figures[key] for key in ("better", "worse", "equal")} == {"better": 1, "worse": 1, "equal": 1}
    told = scores_table({"choice": figures}).splitlines()[2:]
    assert told[0] == "choice of the base model: unread: 1 (scored 0), as 'Antwort: B'"
    assert told[1].startswith("choice of the tuned model: unread: 2 (scored 0), as 'B or C', 'vielleicht ")
    assert "\x1b" not in told[1]
    alone = compared(tuned, answers=answers[1:])
    assert alone["unread"] == {"tuned": figures["unread"]["tuned"]}
    assert len(unread(["?"] * 9, [Unread()] * 9)["examples"]) == 3


def test_training_tells_unread_answers() -> None:
    texts = ["4", "five", "no idea"]
    scores = scores_of(Metric("number"), texts, [Scored("4", "rows:1")] * 3)
    line = score_line(2, {"number": scores}, [Answer(text, True) for text in texts])
    assert line["unread"] == {"number": {"count": 2, "examples": ["five", "no idea"]}}
    assert score_line_in_words(json.loads(json.dumps(line))) == (
        "number 0.333 (3 answers); number unread: 2 (scored 0), as 'five', 'no idea'"
    )
    assert is_as_written(line)
