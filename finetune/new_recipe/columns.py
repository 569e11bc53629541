"""Finds the question and answer columns by content: lengths, question marks, how many values differ.

Names count too, in several languages, but columns called `a` and `b` are found as well.

    nr      distinct whole numbers                -> not text
    thema   12 texts in 300 rows, short           -> a category
    frage   distinct, 80 % end with "?"           -> the question
    antwort distinct, longer, after the question  -> the answer
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from statistics import median
from typing import Any

from finetune.data.columns import ANSWERS, QUESTIONS, columns_of_pairs, in_quotes, in_yaml, layout_of
from finetune.data.formats import label_of
from finetune.data.readers import BadRow
from finetune.errors import DataError
from finetune.recipe.schema import DataSet
from finetune.recipe.sections.training import Objective

# Parts of column names, in the languages that data sets are most often written in. Lower case.
QUESTION_WORDS = (
    "question instruction prompt query problem request task user human input frage anfrage aufgabe eingabe pregunta "
    "consulta instruccion instrucción demande consigne domanda richiesta istruzione pergunta vraag spørsmål fråga "
    "pytanie polecenie otázka kérdés soru вопрос запрос запитання ερώτηση سؤال שאלה प्रश्न 질문 문제 지시 "
    "質問 問題 指示 问题 指令 提问 問 câu_hỏi pertanyaan คำถาม swali 입력 入力"
).split()
ANSWER_WORDS = (
    "answer response output reply completion solution target assistant summary antwort lösung loesung ausgabe "
    "respuesta salida solucion réponse reponse sortie risposta uscita resposta saída antwoord svar odpowiedź odpowiedz "
    "odpověď válasz cevap yanıt ответ відповідь απάντηση جواب إجابة תשובה उत्तर 답변 대답 응답 정답 "
    "출력 回答 答え 解答 答案 输出 trả_lời jawaban คำตอบ jibu sql"
).split()
LABEL_WORDS = (
    "label category class sentiment intent topic kategorie klasse categoria catégorie 라벨 분류 标签 类别".split()
)
SYSTEM_NAMES = ("system", "system_prompt", "systemprompt")
CONTEXT_WORDS = (
    "context passage kontext contexto contexte contesto контекст 문맥 맥락 文脈 上下文 background document".split()
)
QUESTION_MARKS = ("?", "？", "؟", ";")  # the last one is Greek's
IDENTIFIER = re.compile(r"[0-9a-fA-F-]{8,40}|[A-Za-z]{1,6}[-_]?\d+")
NUMBER = re.compile(r"[-+]?\d[\d.,' ]*%?")
DATE = re.compile(r"\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([T ].*)?|\d{1,2}:\d{2}(:\d{2})?")
ADDRESS = re.compile(r"(https?://|www\.)\S+|\S+@\S+\.\w+|/\S+\.\w{2,4}")
JUDGED_NAMES = ("label", "kto_tag", "desirable", "is_desirable", "wanted", "thumbs_up", "liked")
CLEAR = 3.5  # points between the best reading and the next: more than order and length give together
FIRST_TEXTS = 30  # texts from which the share of different ones says something


@dataclass(frozen=True)
class Column:
    """One column, measured over a sample."""

    name: str
    position: int
    filled: float  # share of rows with a value
    texts: float  # share of values that are text, and not numbers, dates or addresses
    distinct: float  # different values, as a share of all
    length: float  # median characters
    questions: float  # share of texts that end with a question mark

    @property
    def is_text(self) -> bool:
        return self.filled >= 0.3 and self.texts >= 0.6

    @property
    def repeats(self) -> bool:
        """Whether the column has few different values: a category, a label, an author."""
        return self.distinct < 0.2

    def has_word(self, words: Iterable[str]) -> bool:
        """Whether the column's name is one of these words or contains one."""
        name = self.name.lower().strip()
        parts = set(re.split(r"[\W_\d]+", name))
        return any(word == name or word in parts or (not word.isascii() and word in name) for word in words)


@dataclass(frozen=True)
class Reading:
    """How the rows are read: our columns -> the data set's. Without columns, the core finds the layout by itself."""

    format: str
    columns: Mapping[str, str] = field(default_factory=dict)
    score: float = 0.0

    @property
    def objective(self) -> Objective:
        """training.objective for such rows."""
        objectives: dict[str, Objective] = {"preference": "dpo", "kto": "kto"}
        return objectives.get(self.format, "supervised")

    def in_words(self) -> str:
        if self.columns:
            return in_yaml(self.columns)
        return self.format


def profiles(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Measure every column, in the rows' order."""
    names = dict.fromkeys(name for row in rows for name in row)
    result = []
    for position, name in enumerate(names):
        values = [row[name] for row in rows if row.get(name) not in (None, "", [], {})]
        texts = [value.strip() for value in values if isinstance(value, str) and value.strip()]
        plain = [
            text for text in texts if not any(kind.fullmatch(text) for kind in (NUMBER, DATE, ADDRESS, IDENTIFIER))
        ]
        length = 0.0
        if texts:
            length = median(map(len, texts))
        result.append(
            Column(
                name,
                position,
                filled=len(values) / max(1, len(rows)),
                texts=len(plain) / max(1, len(values)),
                distinct=len({str(value) for value in values}) / max(1, len(values)),
                length=length,
                questions=sum(text.endswith(QUESTION_MARKS) for text in plain) / max(1, len(plain)),
            )
        )
    return result


def readings(entry: DataSet, rows: Sequence[Mapping[str, Any]]) -> list[Reading]:
    """Plausible readings, the best first; one alone if it is clear. Raises DataError without any."""
    columns = profiles(rows)
    names = [column.name for column in columns]
    if preferences := _read_pairs(columns, rows) or _read_judged_answers(columns, rows):
        return [preferences]
    if chats := _read_chats(entry, rows):
        return [chats]
    candidates = [column for column in columns if column.is_text]
    # A column of numbers may hold answers only if its name says so.
    numbers = [column for column in columns if not column.is_text and column.filled >= 0.3]
    answers = [*candidates, *(column for column in numbers if column.has_word(ANSWER_WORDS))]
    if not candidates:
        raise DataError([_no_texts(entry, rows, names)])
    if len(answers) == 1:
        if candidates[0].name == "text":
            return [Reading("text")]
        return [Reading("text", {"text": candidates[0].name})]
    if {"instruction", "output"} <= {*names}:
        return [Reading("alpaca")]
    labels_may_answer = len(candidates) <= 2  # with more texts, a label is more likely a category
    pairs = [
        (_pair_score(question, answer, labels_may_answer), question, answer)
        for question, answer in permutations(answers, 2)
        if question in candidates and not question.repeats
    ]
    if not pairs:  # every text column repeats: the longest is read as text
        longest = max(candidates, key=lambda column: column.length)
        return [Reading("text", {"text": longest.name})]
    pairs.sort(key=lambda pair: -pair[0])
    best = pairs[0][0]
    plausible = [pair for pair in pairs if best - pair[0] < CLEAR]
    # A reversed pair is a reading of its own, and so is a pair with a third column in place of the second one.
    result = [_with_context(score, question, answer, candidates) for score, question, answer in plausible[:4]]
    return result + _as_better_and_worse(result)


def _as_better_and_worse(plausible: Sequence[Reading]) -> list[Reading]:
    """Two columns that may both answer the same question may be a better and a worse answer, in either order."""
    questions = {reading.columns.get("instruction") for reading in plausible}
    answers = [reading.columns["output"] for reading in plausible if "output" in reading.columns]
    if len(plausible) != 2 or len(questions) != 1 or len(answers) != 2:
        return []
    question = str(questions.pop())
    return [
        Reading("preference", {"instruction": question, "chosen": chosen, "rejected": rejected})
        for chosen, rejected in (answers, reversed(answers))
    ]


def _read_pairs(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Reading | None:
    """Two answers to one prompt, by their columns' names: chosen and rejected, win and lose, and others."""
    names = [column.name for column in columns]
    # Each column's first value that is not empty.
    typical = {name: next((row[name] for row in rows if row.get(name)), None) for name in names}
    mapped = columns_of_pairs(typical, names)
    if mapped is None:
        return None
    answers = [mapped.get(name, name) for name in ("chosen", "rejected")]
    are_texts = isinstance(typical[answers[0]], str)
    if are_texts and "instruction" not in {*mapped, *names} and not isinstance(typical.get("prompt"), list):
        others = [column for column in columns if column.is_text and column.name not in (*answers, *mapped.values())]
        # A name that says so, then question marks, then the first one.
        others.sort(key=lambda column: (-column.has_word(QUESTION_WORDS), column.repeats, -column.questions))
        if others:
            mapped = {"instruction": others[0].name, **mapped}
    return Reading("preference", mapped)


def _read_judged_answers(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Reading | None:
    """An answer and a yes-or-no label, by the column names that other tools use."""
    names = [column.name for column in columns]
    label = next((name for name in JUDGED_NAMES if name in names), None)
    if label is None:
        return None
    values = [row[label] for row in rows if row.get(label) is not None]
    if not values or not all(label_of(value) is not None for value in values):
        return None
    texts = {column.name for column in columns if column.is_text}
    renamed = {"label": label}
    if label == "label":
        renamed = {}
    turns = next((name for name in ("messages", "conversations") if name in names), None)
    if "completion" in names and "prompt" in names:
        if "prompt" in texts and "completion" in texts:
            renamed = {"instruction": "prompt"} | renamed
        return Reading("kto", renamed)
    if turns is not None:
        return Reading("kto", {"completion": turns} | renamed)
    if not all(isinstance(value, bool) for value in values):  # numbers beside two texts may be any category
        return None
    question, answer = (next((name for name in words if name in texts), None) for words in (QUESTIONS, ANSWERS))
    if question is None or answer is None:
        return None
    columns_of_chat = {"instruction": question, "completion": answer} | renamed
    return Reading("kto", {ours: theirs for ours, theirs in columns_of_chat.items() if ours != theirs})


def _read_chats(entry: DataSet, rows: Sequence[Mapping[str, Any]]) -> Reading | None:
    """Chats as lists of turns, in a column with any name."""
    for name in dict.fromkeys(name for row in rows for name in row):
        value = next((row[name] for row in rows if row.get(name)), None)
        if not isinstance(value, list) or not value or not isinstance(value[0], dict):
            continue
        if {"role", "content"} <= {*value[0]}:
            format, ours = "messages", "messages"
        elif {"from", "value"} <= {*value[0]}:
            format, ours = "sharegpt", "conversations"
        else:
            continue
        # These two hold one dialogue together.
        if name in ("prompt", "completion") and {"prompt", "completion"} <= {*rows[0]}:
            return Reading("prompt_completion")
        try:
            return Reading(layout_of(entry, rows).format)
        except BadRow:  # the core does not find the column by itself, so the recipe names it
            return Reading(format, {ours: name})
    return None


def _pair_score(question: Column, answer: Column, labels_may_answer: bool) -> float:
    """Points for reading two columns as question and answer.

    A name that says so: 4 points, and 4 less for a name that says the opposite. Question marks: up to 3. Order: 1. An
    answer is longer than its question more often than not: 1. A column with few values is an answer if its name says
    so, or if it is a label and there is no other text.
    """
    score = 4.0 * (question.has_word(QUESTION_WORDS) - question.has_word(ANSWER_WORDS))
    score += 4.0 * (answer.has_word(ANSWER_WORDS) - answer.has_word(QUESTION_WORDS))
    score -= 3.0 * (question.has_word(CONTEXT_WORDS) + answer.has_word(CONTEXT_WORDS))
    score += 3.0 * (question.questions - answer.questions)
    score += 2.0 * (question.position < answer.position) - 1.0
    score += 1.0 * (answer.length > question.length) - 0.5
    is_label = answer.has_word(LABEL_WORDS)
    score += 1.0 * is_label
    if answer.repeats and not answer.has_word(ANSWER_WORDS) and not (is_label and labels_may_answer):
        score -= 3.0
    score += 0.5 * (question.filled + answer.filled)
    return score


def _with_context(score: float, question: Column, answer: Column, candidates: Sequence[Column]) -> Reading:
    """The pair's reading, with a context column if a name says so, or if `input` stands beside `instruction`."""
    columns = {"instruction": question.name}
    for column in candidates:
        if column in (question, answer):
            continue
        if column.has_word(CONTEXT_WORDS) or (column.name == "input" and question.name == "instruction"):
            columns["input"] = column.name
            break
    columns["output"] = answer.name
    for column in candidates:
        if column.name.lower() in SYSTEM_NAMES and column not in (question, answer):
            columns["system"] = column.name
            break
    if all(ours == theirs for ours, theirs in columns.items()):
        return Reading("alpaca", {}, score)
    return Reading("alpaca", columns, score)


def _no_texts(entry: DataSet, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """The message if no column holds text; for nested texts, with the command that flattens them."""
    place = entry.data_files or entry.path
    if len(rows) == 1 and len(names) > 1 and all(isinstance(value, dict) for value in rows[0].values()):
        return (
            f"{place}: is one object whose {len(names)} values are the rows; write them one a line: "
            f"jq -c '.[]' {place} > rows.jsonl"
        )
    for name in names:
        value = next((row[name] for row in rows if isinstance(row.get(name), dict)), None)
        inner = [key for key, text in (value or {}).items() if isinstance(text, str)]
        if inner:
            fields = ", ".join(f"{key}: .{name}.{key}" for key in inner[:4])
            return (
                f"{place}: the texts are nested in the column {name!r} ({in_quotes(inner)}); flatten them: "
                f"jq -c '{{{fields}}}' {place} > flat.jsonl"
            )
    return f"{place}: no column holds texts to train on; the columns are {in_quotes(names) or 'none'}"


def looks_like_data(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a table's first line is a row and not a header.

    It is a row if a name is a number or a date. Else each text column's name must look like the column's values: as
    long, several words, and a question if the values are questions.
    """
    if any(NUMBER.fullmatch(name.strip()) or DATE.fullmatch(name.strip()) for name in names if name.strip()):
        return True
    texts = [column for column in profiles(rows[:FIRST_TEXTS]) if column.is_text and not column.repeats]
    for column in texts:
        is_question = column.name.strip().endswith(QUESTION_MARKS)
        # Four words, or a question in a script like Japanese, which may be written without spaces.
        has_words = len(column.name.split()) >= 4 or (is_question and not column.name.isascii())
        values_are_questions = column.questions > 0.7
        if not has_words or is_question != values_are_questions or len(column.name) <= 0.3 * column.length:
            return False
    return bool(texts)
