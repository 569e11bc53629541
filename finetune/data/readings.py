"""How a data set's rows may be read: one reading if it is sure, several if a user must choose, or what is in the way.

`finetune init`, and every message about columns that a recipe does not name, ask here. Columns are judged by content
(lengths, question marks, how many values differ) and by names in several languages.

    nr      distinct whole numbers                -> not text
    thema   12 texts in 300 rows, short           -> a category
    frage   distinct, 80 % end with "?"           -> the question
    antwort distinct, longer, after the question  -> the answer
    daumen  up, down                              -> a judgement: are all answers wanted?
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any

from finetune.data.cells import OTHER_ROLES, ROLES, BadRow, flattened, json_kind, json_text, turns_in
from finetune.output_stream import one_line
from finetune.recipe.layouts import LAYOUTS, OF_CHATS, KnownFormat
from finetune.recipe.schema import RowFormat
from finetune.recipe.sections.training import Objective
from finetune.wording import counted

# Parts of column names, in the languages that data sets are most often written in. Lower case.
QUESTION_WORDS = (
    "instruction question prompt query problem request task user human input frage anfrage aufgabe eingabe pregunta "
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
# Plurals and others: lists of answers, and choices that belong to the question.
ANSWERS_WORDS = (
    "answers responses outputs replies completions solutions targets generations candidates references antworten "
    "respuestas réponses respostas"
).split()
CHOICE_WORDS = (
    "choice choices option options endings alternatives candidates antwortoptionen opciones 选项 選択肢".split()
)
KEY_WORDS = "answerkey answer_key correct_option cop answer_idx answer_index".split()  # which choice is right
TURN_WORDS = "messages message conversation conversations dialog dialogue dialogs turns chat utterances".split()
LABEL_WORDS = (
    "label category class sentiment intent topic kategorie klasse categoria catégorie 라벨 분류 标签 类别".split()
)
JUDGING_WORDS = (
    "label labels kto_tag kto rating ratings rated score stars feedback thumb thumbs vote votes like liked dislike "
    "accepted accept approved helpful helpfulness correct correctness quality good desirable wanted preferred reward "
    "verdict judgement judgment grade bewertung wertung urteil rückmeldung daumen puntuación valoración calificación "
    "évaluation avis avaliação nota voto valutazione beoordeling ocena değerlendirme puan penilaian оценка تقييم "
    "评分 评价 反馈 评分 点赞 評価 평가 점수 좋아요 bad toxic unsafe harmful flagged rejected disliked spam wrong"
).split()
# Beginnings of names whose true means unwanted.
AGAINST_STEMS = tuple(
    "bad toxic unsafe harm flag reject dislik spam wrong error delet fail report violat hallucin rework offens abus "
    "block remov invalid incorrect refus bug fehler gelösch falsch erreur supprim borrad удал ошиб".split()
)
# Names of columns whose few values say what a row is about, or where it comes from, and not how good it is.
TOPIC_WORDS = (
    "lang language locale sprache idioma langue lingua 语言 split fold subset set source origin quelle channel kanal "
    "type kind art typ tipo genre domain subject theme thema tema thème area bereich region country land gender sex "
    "model version difficulty level product produkt department abteilung team priority author autor user role style "
    "tone format date year month day id group cluster persona tag tags section part chapter license licence task "
    "dataset name title count num number turns steps tokens size words index module modul"
).split()
CHOOSING_WORDS = "winner better preference preferred chosen best label labels safer choice judgement judgment".split()
NEGATIONS = "un in im dis non no not nicht pas não nao не niet inte ikke nie 不 没 非".split()
SYSTEM_NAMES = ("system", "system_prompt", "systemprompt", "system_message")
REASON_NAMES = ("reasoning_content", "thinking", "reasoning")
CONTEXT_WORDS = (
    "context passage kontext contexto contexte contesto контекст 문맥 맥락 文脈 上下文 background document".split()
)
SPEAKER_NAMES = ("role", "from", "speaker", "sender", "author", "user", "who")
SAID_NAMES = ("content", "value", "text", "message", "body", "utterance")
JUDGED_NAMES = ("label", "kto_tag", "desirable", "is_desirable", "wanted", "thumbs_up", "liked")
# Words for a wanted answer and for an unwanted one. Numbers on a scale (0.7, 5, -1) are not read: the data's owner
# decides where the line is, by `labels`.
LABELS = dict.fromkeys(
    "true t 1 1.0 +1 yes y good desirable wanted chosen accepted accept approved up upvote thumbs_up thumbs-up "
    "thumbsup like liked positive helpful correct pass passed ok okay 👍 ✅ ✓ ✔ ja oui sí si sim да tak evet sì "
    "是 对 好 はい 예 네 نعم हाँ ναι gut bon bueno 赞".split(), True
) | dict.fromkeys(
    "false f 0 0.0 no n bad undesirable unwanted rejected reject down downvote thumbs_down thumbs-down thumbsdown "
    "dislike disliked negative unhelpful incorrect wrong fail failed nok 👎 ❌ ✗ ✘ nein non não нет nie hayır "
    "否 不对 差 いいえ 아니요 아니오 لا नहीं όχι nee nej nei schlecht mauvais malo 踩".split(), False
)  # fmt: skip
SILENT_LABELS = frozenset("true false t f 1 0 1.0 0.0 yes no y n +1 ja nein oui non".split())  # of what, the name says
TRANSCRIPT = re.compile(r"\W*(user|human|customer|client|q|question)\s*:.*?\n\W*\w[\w ]{0,20}:", re.I | re.S)
QUESTION_MARKS = ("?", "？", "؟", ";")  # the last one is Greek's
IDENTIFIER = re.compile(r"[0-9a-fA-F-]{8,40}|[A-Za-z]{1,6}[-_]?\d+")
NUMBER = re.compile(r"[-+]?\d[\d.,' ]*%?")
DATE = re.compile(r"\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([T ].*)?|\d{1,2}:\d{2}(:\d{2})?")
ADDRESS = re.compile(r"(https?://|www\.)\S+|\S+@\S+\.\w+|/\S+\.\w{2,4}")
CLEAR = 3.5  # points between the best reading and the next: more than order and length give together
FIRST_TEXTS = 30  # texts from which the share of different ones says something
FEW_VALUES = 10  # values of a label or a scale
MOST_GRADES = 5  # values of a judgement with a name that is not known
COMPARED = 16  # questions and answers that are compared with each other: a survey may have 1,000 columns of text
SHOWN_CHARACTERS = 90  # of a list of columns

# Words in the column names of two answers: `response_chosen` and `response_rejected` are a pair.
PAIR_WORDS = (
    ("chosen", "rejected"), ("win", "lose"), ("winner", "loser"), ("winning", "losing"), ("preferred", "dispreferred"),
    ("preferred", "rejected"), ("accepted", "rejected"), ("better", "worse"), ("good", "bad"), ("best", "worst"),
    ("positive", "negative"), ("wanted", "unwanted"), ("desirable", "undesirable"),
)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """One column, measured over a sample."""

    name: str
    position: int
    typical: Any  # the first value of this kind; turns in a text are parsed
    kind: str  # of most values: text, number, turns, broken (turns in a text that is cut), list, object, other, empty
    filled: float  # share of rows with a value
    texts: float  # share of values that are text, and not numbers, dates or addresses
    distinct: float  # different values, as a share of all
    length: float  # median characters
    questions: float  # share of texts that end with a question mark
    values: tuple[str, ...]  # all of them if they are few and short, lower case

    @property
    def is_text(self) -> bool:
        return self.kind == "text" and self.filled >= 0.3 and self.texts >= 0.6

    @property
    def repeats(self) -> bool:
        """Whether the column has few different values: a category, a label, an author."""
        return self.distinct < 0.2

    @cached_property
    def words(self) -> frozenset[str]:
        """The name in lower case, and its parts: `isGood_answer` has is, good and answer."""
        name = self.name.strip()
        return frozenset({name.lower(), *re.split(r"[\W_\d]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())})

    @property
    def is_nested_text(self) -> bool:
        """Whether its texts are JSON's or Python's lists and objects."""
        if self.kind != "text" or not re.fullmatch(r"\s*(\[.*\]|\{.*\})\s*", self.typical, re.DOTALL):
            return False
        try:
            return isinstance(json_text(self.typical, ""), list | dict)
        except BadRow:
            return False

    def has_word(self, words: Iterable[str]) -> bool:
        """Whether the column's name is one of these words or contains one."""
        name = self.name.lower()
        return any(word in self.words or (not word.isascii() and word in name) for word in words)

    def in_words(self) -> str:
        """The name, and the reason why a user should look at it, for lists of unread columns."""
        if self.kind in ("turns", "list", "object"):
            return f"{self.name!r} ({self.kind.removesuffix('s')}s)"
        if len(self.values) > 1 and self.has_word(JUDGING_WORDS):
            return f"{self.name!r} ({', '.join(self.values[:4])}{', ...' * (len(self.values) > 4)})"
        return repr(self.name)


@dataclass(frozen=True)
class Reading:
    """How the rows are read: our columns -> the data set's. Without columns, the exact names decide."""

    format: KnownFormat
    columns: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, bool] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()  # values of a label that nobody has said anything about

    @property
    def objective(self) -> Objective:
        """training.objective for such rows."""
        return LAYOUTS[self.format].objective

    def in_words(self) -> str:
        """Its columns; without any, the layout's own names."""
        return in_yaml(self.columns or {column: column for column in LAYOUTS[self.format].columns})

    def used(self) -> set[str]:
        """The data set's columns that are read."""
        ours = {*LAYOUTS[self.format].all} - {*self.columns}
        return {*self.columns.values()} | ours


@dataclass(frozen=True)
class Readings:
    """Plausible readings, the best first, and the columns. One reading without an obstacle is sure."""

    plausible: list[Reading]
    columns: list[Column]
    obstacle: str = ""  # why no reading holds what the rows say: `mistake; remedy`

    def unused(self, reading: Reading) -> list[Column]:
        """The columns that a reading leaves out, notable ones first."""
        left = [column for column in self.columns if column.name not in reading.used()]
        words = (*ANSWER_WORDS, *ANSWERS_WORDS, *CHOICE_WORDS, *TURN_WORDS, *JUDGING_WORDS, *KEY_WORDS)
        kinds = ("turns", "list", "object")
        return sorted(left, key=lambda column: not (column.kind in kinds or column.has_word(words)))


def label_of(value: Any, labels: Mapping[str, bool] | None = None) -> bool | None:
    """Whether a label says that an answer is wanted; None if it says neither. `labels` are the recipe's."""
    text = str(value).strip().lower()
    return (labels or {}).get(text, LABELS.get(text))


def profiles(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Measure every column, in the rows' order."""
    result = []
    for position, name in enumerate(dict.fromkeys(name for row in rows for name in row)):
        values = [row[name] for row in rows if row.get(name) not in (None, "", [], {})]
        texts = [value.strip() for value in values if isinstance(value, str) and value.strip()]
        plain = [
            text for text in texts if not any(kind.fullmatch(text) for kind in (NUMBER, DATE, ADDRESS, IDENTIFIER))
        ]
        typical, kind = None, "empty"
        if values:
            kind = Counter(map(_kind_of, values[:1000])).most_common(1)[0][0]
            typical = next(value for value in values if _kind_of(value) == kind)
            with suppress(BadRow):
                typical = turns_in(typical, "")
        different = Counter(str(value).strip().lower() for value in values)
        few: tuple[str, ...] = ()
        if len(different) <= FEW_VALUES and all(len(value) <= 30 for value in different):
            few = tuple(sorted(different))
        result.append(
            Column(
                name,
                position,
                typical,
                kind,
                filled=len(values) / max(1, len(rows)),
                texts=len(plain) / max(1, len(values)),
                distinct=len(different) / max(1, len(values)),
                length=median(map(len, texts)) if texts else 0.0,
                questions=sum(text.endswith(QUESTION_MARKS) for text in plain) / max(1, len(plain)),
                values=few,
            )
        )
    return result


def _kind_of(value: Any) -> str:
    try:
        value = turns_in(value, "")
    except BadRow:
        return "broken"
    if is_turns(value):
        return "turns"
    match value:
        case list() | tuple():
            return "list"
        case dict():
            return "object"
        case str():
            return "text"
        case int() | float():
            return "number"
    return "other"  # dates, bytes


def is_turns(value: Any) -> bool:
    """Whether a value is a list of turns, by its first one."""
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    return {"role", "content"} <= {*value[0]} or {"from", "value"} <= {*value[0]}


def readings(format: RowFormat, rows: Sequence[Mapping[str, Any]]) -> Readings:
    """Plausible readings of these rows, the best first; one alone if it is clear. None of them if no column fits."""
    columns = profiles(rows)
    named = {column.name: column.kind for column in columns}
    for column in columns:
        if column.kind == "broken":
            try:
                turns_in(column.typical, repr(column.name))
            except BadRow as error:
                return Readings([], columns, f"{error}; the turns may be cut (Excel keeps 32,767 characters of a cell)")
    known = known_columns(columns, format) or _pair_reading(columns) or _judged_reading(columns)
    known = known or _chat_reading(columns)
    if known is None and "text" == named.get("instruction") == named.get("output"):
        known = Reading("alpaca")
    if known is not None:
        return _with_judgement(format, [known], columns)
    texts = [column for column in columns if column.is_text]
    candidates = [column for column in texts if column.name.lower() not in (*SYSTEM_NAMES, *REASON_NAMES, *OF_CHATS)]
    # A column of numbers may hold answers only if its name says so.
    numbers = [column for column in columns if not column.is_text and column.filled >= 0.3]
    numbers = [column for column in numbers if column.kind in ("text", "number") and column.has_word(ANSWER_WORDS)]
    answers = [*candidates, *numbers]
    # A column with one value, like a source, is no answer.
    answers = [one for one in answers if not one.repeats or len(one.values) != 1 or one.has_word(ANSWER_WORDS)]
    if len(candidates) < 2 and len(rows) > 1 and any(column.kind == "object" for column in columns):
        inside = readings(format, [*map(flattened, rows)])
        nested = [column.name for column in inside.columns if "." in column.name and column.has_word(ANSWER_WORDS)]
        answered = [reading for reading in inside.plausible if reading.columns.get("output") in nested]
        if not candidates:
            return inside
        if answered:
            return replace(inside, plausible=[*answered, Reading("text", {"text": candidates[0].name})])
    if not candidates:
        return Readings([], columns, _no_texts(rows, columns))
    if not [column for column in answers if column is not candidates[0]]:
        return _read_as_text(candidates[0], columns)
    labels_may_answer = len(candidates) <= 2  # with more texts, a label is more likely a category
    # The likeliest questions and answers by themselves, then each with each.
    asking = sorted(candidates, key=lambda column: (-_question_score(column), column.position))[:COMPARED]
    answering = sorted(answers, key=lambda answer: (-_answer_score(answer, labels_may_answer), answer.position))
    pairs = [
        (_pair_score(question, answer, labels_may_answer), question, answer)
        for question in sorted(asking, key=lambda column: column.position)
        for answer in sorted(answering[:COMPARED], key=lambda column: column.position)
        if question is not answer and not question.repeats
    ]
    if not pairs:  # every text column repeats: the longest is read as text
        return _read_as_text(max(candidates, key=lambda column: column.length), columns)
    pairs.sort(key=lambda pair: -pair[0])
    plausible = [pair for pair in pairs if pairs[0][0] - pair[0] < CLEAR]
    # (answer, question) and (question, other column) each count as another reading.
    result = []
    for _, question, answer in plausible[:4]:
        # Beside the pair: system, reasoning and context columns if their names say so.
        others = [column for column in texts if column not in (question, answer)]
        system = next((column.name for column in others if column.name.lower() in SYSTEM_NAMES), None)
        reasons = next((column.name for column in others if column.name.lower() in REASON_NAMES), None)
        context = next((column.name for column in others if column.has_word(CONTEXT_WORDS)), None)
        if any(column.name == "input" for column in others) and question.name == "instruction":
            context = "input"
        mapped = {
            "system": system, "instruction": question.name, "input": context, "reasoning_content": reasons,
            "output": answer.name,
        }  # fmt: skip
        result.append(Reading("alpaca", {ours: theirs for ours, theirs in mapped.items() if theirs}))
    answer = plausible[0][2]
    if len(result) == 1 and answer.repeats and not answer.has_word((*ANSWER_WORDS, *LABEL_WORDS)):
        result.append(Reading("text", {"text": plausible[0][1].name}))  # a category, as an answer or not
    # Two columns that may both answer the same question may be a better and a worse answer, in either order.
    questions = {reading.columns.get("instruction") for reading in result}
    names = [reading.columns["output"] for reading in result if "output" in reading.columns]
    if len(result) == len(names) == 2 and len(questions) == 1:
        before = {"instruction": str(questions.pop())}
        for chosen, rejected in (names, reversed(names)):
            result.append(Reading("preference", before | {"chosen": chosen, "rejected": rejected}))
    return _with_judgement(format, result, columns)


# -- readings by names and kinds ---------------------------------------------------------------------------------------


def known_columns(columns: Sequence[Column], format: str) -> Reading | None:
    """The reading of known layouts whose names differ: ShareGPT's turns in `messages`, Dolly, LLaMA-Factory."""
    named = {column.name: column for column in columns}
    turns = next((name for name in ("conversations", "messages") if name in named), None)
    if format in ("auto", "sharegpt") and "conversations" not in named and "messages" in named:
        first = named["messages"].typical
        if is_turns(first) and {"from", "value"} <= {*first[0]} and not {"label", "kto_tag"} & {*named}:
            return Reading("sharegpt", {"conversations": "messages"})
    if format in ("auto", "preference", "kto") and turns is not None:
        if {"chosen", "rejected"} <= {*named}:
            answers_alone = isinstance(named["chosen"].typical, dict | str)
            if answers_alone and "prompt" not in named and (format != "auto" or named[turns].kind == "turns"):
                return Reading("preference", {"prompt": turns})
        tag = next((name for name in ("label", "kto_tag") if name in named), None)
        says = [label_of(value) for value in named[tag].values] if tag else []
        if tag and not {"completion", "chosen"} & {*named} and (format != "auto" or (says and None not in says)):
            return Reading("kto", {"completion": turns} | ({} if tag == "label" else {"label": tag}))
    # Without `output`, Dolly's `response` is the answer, and its `context` the input.
    is_dolly = {"instruction", "response"} <= {*named} and not {"output", "messages", "conversations"} & {*named}
    if format in ("auto", "alpaca") and is_dolly and {"chosen", "rejected"} - {*named}:
        if "context" in named and "input" not in named:
            return Reading("alpaca", {"input": "context", "output": "response"})
        return Reading("alpaca", {"output": "response"})
    return None


def pair_of_answers(names: Sequence[str]) -> tuple[str, str] | None:
    """Find the columns with a better and a worse answer by their names; None without such a pair.

    chosen, rejected            -> these
    answer_win, answer_lose     -> these
    chosen, score_chosen, ...   -> chosen and rejected: the shortest names
    """
    by_name = {name.lower(): name for name in names}
    pairs = []
    for name in names:
        parts = re.split(r"([\W_]+)", name)
        for place, part in enumerate(parts):
            for better, worse in PAIR_WORDS:
                other = "".join([*parts[:place], worse, *parts[place + 1 :]]).lower()
                if part.lower() == better and other in by_name:
                    pairs.append((name, by_name[other]))
    return min(pairs, key=lambda pair: len(pair[0]), default=None)


def _pair_reading(columns: Sequence[Column]) -> Reading | None:
    """Two answers to one prompt, by their columns' names. Scores, which are numbers, do not count."""
    named = {column.name: column for column in columns if column.kind in ("text", "turns", "list", "object")}
    pair = pair_of_answers([*named])
    if pair is None:
        return None
    mapped = {ours: theirs for ours, theirs in zip(("chosen", "rejected"), pair, strict=True) if ours != theirs}
    first = answer = named[pair[0]].typical
    if isinstance(answer, list) and answer:
        first = answer[0]
    if isinstance(first, dict) and (first.get("role") or first.get("from")) not in ("assistant", "gpt"):
        return Reading("preference", mapped)  # dialogues that hold the question
    if {"prompt", "conversations"} & {*named} and not isinstance(answer, str):
        return Reading("preference", mapped)  # turns, and their question is in a column that is read by its name
    before = {}
    system = next((name for name in named if name.lower() in SYSTEM_NAMES and name not in pair), None)
    if system and system != "system":
        before["system"] = system
    others = [column for column in named.values() if column.is_text and column.name not in (*pair, system)]
    if "instruction" not in named and not (named.get("prompt") and named["prompt"].kind == "turns"):
        # A name that says so, then question marks, then the first one.
        others.sort(key=lambda column: (-column.has_word(QUESTION_WORDS), column.repeats, -column.questions))
        if others:
            before["instruction"] = others[0].name
    return Reading("preference", before | mapped)


def _judged_reading(columns: Sequence[Column]) -> Reading | None:
    """An answer and a yes-or-no label, by the column names that other tools use."""
    named = {column.name: column for column in columns}
    label = next((name for name in JUDGED_NAMES if name in named), None)
    if label is None or not named[label].values:
        return None
    values = named[label].values
    if not all(label_of(value) is not None for value in values):
        return None
    renamed = {} if label == "label" else {"label": label}
    if "completion" in named and "prompt" in named:
        if named["prompt"].is_text and named["completion"].is_text:
            renamed = {"instruction": "prompt"} | renamed
        return Reading("kto", renamed)
    if label == "label" or not {*values} <= {"true", "false"}:  # beside other names, numbers may be any category
        return None
    texts = [column for column in columns if column.is_text]
    question = [column for column in texts if column.has_word(QUESTION_WORDS)]
    answer = [column for column in texts if column.has_word(ANSWER_WORDS) and column not in question]
    if len(question) != 1 or len(answer) != 1:
        return None
    mapped = {"instruction": question[0].name, "completion": answer[0].name} | renamed
    return Reading("kto", {ours: theirs for ours, theirs in mapped.items() if ours != theirs})


def _chat_reading(columns: Sequence[Column]) -> Reading | None:
    """Chats as lists of turns, in a column with any name. Turns without an answer are the prompt of a text."""
    chats = [column for column in columns if column.kind == "turns"]
    by_name = {column.name: column for column in chats}
    if not chats:
        return None
    if {"prompt", "completion"} <= {*by_name}:
        return Reading("prompt_completion")
    # The exact name comes first, then the first column that ends with an answer.
    chats.sort(key=lambda column: (column.name not in ("messages", "conversations"), not _ends_with_answer(column)))
    chat = chats[0]
    answers = [column for column in columns if column.is_text and column.has_word((*ANSWER_WORDS, *ANSWERS_WORDS))]
    if not _ends_with_answer(chat) and len(answers) == 1:
        mapped = {"prompt": chat.name, "completion": answers[0].name}
        return Reading("prompt_completion", {ours: theirs for ours, theirs in mapped.items() if ours != theirs})
    format: KnownFormat = "sharegpt" if "from" in chat.typical[0] else "messages"
    ours = LAYOUTS[format].columns[0]
    mapped = {} if chat.name == ours else {ours: chat.name}
    system = next((column.name for column in columns if column.is_text and column.name.lower() in SYSTEM_NAMES), None)
    if system and system != "system":
        mapped["system"] = system
    return Reading(format, mapped)


def _ends_with_answer(column: Column) -> bool:
    last = column.typical[-1]
    return isinstance(last, dict) and (last.get("role") or last.get("from")) not in ("user", "human", "system")


def _read_as_text(text: Column, columns: list[Column]) -> Readings:
    """One column of text alone: as text, or with a column of few values as its answer."""
    result = [Reading("text", {} if text.name == "text" else {"text": text.name})]
    for column in columns:
        is_answer = column.has_word((*LABEL_WORDS, *JUDGING_WORDS)) and len(column.values) > 1
        if column is not text and column.kind in ("text", "number") and is_answer:
            result.append(Reading("alpaca", {"instruction": text.name, "output": column.name}))
            break
    obstacle = _obstacle(result[0], columns)
    if not obstacle and len(result) == 1 and text.has_word(QUESTION_WORDS) and not text.has_word(ANSWER_WORDS):
        obstacle = f"only {text.name!r} holds texts, and no column its answers; add a column of answers"
    return Readings(result, columns, obstacle)


# -- points for a question and its answer ------------------------------------------------------------------------------


def _question_score(column: Column) -> float:
    """A name that says so: 4 points, 4 less for one that says the opposite. Question marks: up to 3."""
    score = 4.0 * (column.has_word(QUESTION_WORDS) - column.has_word(ANSWER_WORDS))
    score -= 3.0 * column.has_word(CONTEXT_WORDS) + 4.0 * column.has_word(CHOICE_WORDS)
    return score + 3.0 * column.questions + 0.5 * column.filled


def _answer_score(column: Column, labels_may_answer: bool) -> float:
    """As for a question. A column with few values is an answer if its name says so, or as the one label."""
    score = 4.0 * (column.has_word(ANSWER_WORDS) - column.has_word(QUESTION_WORDS))
    score -= 4.0 * column.has_word(CHOICE_WORDS)
    is_label = column.has_word(LABEL_WORDS)
    score += 1.0 * is_label - 3.0 * column.has_word(CONTEXT_WORDS) - 3.0 * column.questions + 0.5 * column.filled
    if column.repeats and not column.has_word(ANSWER_WORDS) and not (is_label and labels_may_answer):
        score -= 3.0
    return score


def _pair_score(question: Column, answer: Column, labels_may_answer: bool) -> float:
    """Points for two columns: their own, 1 for the order, and 0.5 for an answer that is longer than its question."""
    score = _question_score(question) + _answer_score(answer, labels_may_answer)
    score += 2.0 * (question.position < answer.position) - 1.0
    return score + 1.0 * (answer.length > question.length) - 0.5


# -- judgements, and what is in the way --------------------------------------------------------------------------------


def judgement_of(columns: Iterable[Column]) -> tuple[Column, dict[str, bool | None]] | None:
    """The column that seems to judge the answers, and what each of its values says; None if there is none.

    up, down               -> True, False
    1, -1                  -> True, False: also 1 and 5 in a column with such a name
    hilfreich, nicht hilfreich -> True, False
    toxic: true, false     -> False, True: by the name's beginning
    edited: true, false    -> None each: such a name does not say what is wanted
    rating: 1 to 5         -> None each: the user decides where the line is
    check: a, b            -> None each: two to five short values that repeat may be a judgement in words not known here
    """
    candidates = []
    for column in columns:
        values, is_against = column.values, any(word.startswith(AGAINST_STEMS) for word in column.words)
        is_named = is_against or column.has_word(JUDGING_WORDS)
        if column.kind not in ("text", "number") or len(values) < 2:
            continue
        says = {value: label_of(value) for value in values}
        if None in says.values():  # 0 and 1 belong to a scale, F to grades
            is_scale = all(NUMBER.fullmatch(value) for value in values)
            says = {value: None if is_scale or len(value) == 1 else verdict for value, verdict in says.items()}
        if not is_named and SILENT_LABELS.issuperset(values):
            says = dict.fromkeys(values)
        if len(values) == 2 and None in says.values():
            low, high = sorted(values, key=lambda value: (_as_number(value), len(value)))
            if {low, high} == {"-1", "1"} or (is_named and _as_number(high) > _as_number(low)):
                says = {low: False, high: True}
            elif high.endswith(low) and high.removesuffix(low).strip("-_ ") in NEGATIONS:
                says = {low: True, high: False}
        is_clear = {True, False} == {*says.values()}
        if is_clear and is_against:
            says = {value: not verdict for value, verdict in says.items()}
        may_judge = len(values) <= MOST_GRADES and column.distinct <= 0.5 and column.filled >= 0.5
        may_judge &= not column.has_word((*TOPIC_WORDS, *LABEL_WORDS))
        if is_clear or is_named or may_judge:
            candidates.append((not is_named, not is_clear, column.position, column, says))
    if not candidates:
        return None
    *_, column, says = min(candidates, key=lambda candidate: candidate[:3])
    return column, says


def remarks(reading: Reading, columns: Sequence[Column]) -> list[str]:
    """Lines about supervised rows: a column that seems to judge the answers, lists that are trained as text."""
    if reading.objective != "supervised":
        return []
    lines = []
    judged = judgement_of(column for column in columns if column.name not in reading.used())
    if judged is not None and reading.format != "text":
        column = judged[0]
        lines.append(
            f"{column.name!r} ({', '.join(column.values)}) may judge the answers; all of them are supervised, unwanted "
            "ones too; training.objective: kto reads such a column as label"
        )
    for ours in ("output", "completion", "text"):
        name = reading.columns.get(ours, ours)
        for column in columns:
            if column.name == name and ours in LAYOUTS[reading.format].columns and column.is_nested_text:
                start = one_line(column.typical, 40)
                lines.append(f"{name!r} holds lists or objects as text ({start}); they are trained as they are written")
    return lines


def _as_number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0


def _with_judgement(format: RowFormat, plausible: list[Reading], columns: list[Column]) -> Readings:
    """These readings, and beside the first one its judged answers if an unread column seems to judge them."""
    first, result = plausible[0], Readings(plausible, columns, _obstacle(plausible[0], columns))
    if first.objective != "supervised" or first.format == "text" or format != "auto":
        return result
    judged = judgement_of(result.unused(first))
    if judged is None or result.obstacle:
        return result
    column, says = judged
    answered = {name: first.columns.get(name, name) for name in LAYOUTS[first.format].columns}
    renamed = {"output": "completion", "messages": "completion", "conversations": "completion"}
    mapped = {renamed.get(ours, ours): theirs for ours, theirs in answered.items()}
    mapped |= {ours: theirs for ours, theirs in first.columns.items() if ours in ("system", "input")}
    labels = {value: verdict for value, verdict in says.items() if verdict is not None}
    if all(label_of(value) is verdict for value, verdict in says.items()):
        labels = {}
    unknown = tuple(value for value, verdict in says.items() if verdict is None)
    kto = Reading("kto", {**mapped, "label": column.name}, labels, unknown)
    return replace(result, plausible=[first, kto, *plausible[1:]])


def labels_in_yaml(reading: Reading) -> str:
    """A reading's `labels` for the recipe, with `...` where the user must decide."""
    return in_yaml({**reading.labels, **dict.fromkeys(reading.unknown, "...")})


def _obstacle(reading: Reading, columns: Sequence[Column]) -> str:
    """Why a reading would leave out what the rows say: `mistake; remedy`, or empty."""
    if reading.objective != "supervised":
        return ""
    unread = [column for column in columns if column.name not in reading.used()]
    named = {column.name: column for column in columns}
    answer = named.get(reading.columns.get("output", "output"))
    question = reading.columns.get("instruction") or next(
        (column.name for column in columns if column.has_word(QUESTION_WORDS)), "instruction"
    )
    whole = named.get(reading.columns.get("text", ""))
    if reading.format == "text" and whole and whole.has_word(TURN_WORDS) and TRANSCRIPT.match(whole.typical):
        why = f"{whole.name!r} holds dialogues as one text ({one_line(whole.typical, 40)})"
        return f"{why}; write their turns as messages, or take it as it is: --columns {shlex.quote(reading.in_words())}"
    is_sure = answer is not None and answer.has_word(ANSWER_WORDS) and answer.kind == "text"
    is_key = answer is not None and (answer.length <= 3 or answer.kind == "number")
    nested = [column for column in unread if column.kind in ("turns", "list", "object")]
    for column in columns:
        if column.name.lower() in SPEAKER_NAMES and len({*column.values} & {*ROLES, "prompter", "human", "bot"}) > 1:
            values = in_quotes(column.values)
            return f"each row is one turn ({column.name!r}: {values}); join the turns of a dialogue: messages: [...]"
    if reading.format in ("messages", "sharegpt"):
        ours = LAYOUTS[reading.format].columns[0]
        chat = named[reading.columns.get(ours, ours)]
        if ours in reading.columns and (others := [column for column in nested if column.kind == "turns"]):
            names = in_quotes([chat.name, *(column.name for column in others)])
            return f"{names} are dialogues, and a row has one, or two answers; {_as_pairs(unread)}"
        answers = [column.name for column in unread if column.is_text and column.has_word(ANSWER_WORDS)]
        if len(answers) > 1 and not _ends_with_answer(chat):
            return f"{in_quotes(answers)} answer {chat.name!r}, and a row has one answer, or two; {_as_pairs(unread)}"
        return ""
    for column in nested:
        if column.has_word(TURN_WORDS) or _renamed_turns(column):
            return _unread_turns(column)
    chosen_by = next((column for column in unread if column.has_word((*KEY_WORDS, "label"))), answer)
    for column in nested:
        if column.has_word(CHOICE_WORDS):
            return f"{column.name!r} holds choices, which the question would lack; write them into {question!r}"
    texts = [column for column in columns if column.kind == "text"]
    # Text columns that differ in a last letter or digit: response_a and response_b, opa to opd.
    families: dict[str, list[Column]] = {}
    for column in texts:
        match = re.fullmatch(r"(.*?)[\W_]?([A-Ha-h]|\d{1,2})", column.name)
        if match and (column.name != question or column.has_word(ANSWER_WORDS)):
            families.setdefault(match[1].lower(), []).append(column)
    for stem, members in families.items():
        if not (2 if stem else 3) <= len(members) <= 16:
            continue
        names = in_quotes([column.name for column in members])
        is_read = any(column.name in reading.used() for column in members)
        if stem and len(members) == 2 and any(column.has_word((*ANSWER_WORDS, "ref")) for column in members):
            return f"{names} are two answers to one question; {_as_pairs(unread)}"
        if (is_read or is_key or not is_sure) and len(members) < len(texts):
            text = "".join(f"\\n{chr(65 + place)}. {{{member.name}}}" for place, member in enumerate(members))
            output = "..." if chosen_by is None or chosen_by in members else chosen_by.name
            line = f'{{instruction: "{{{question}}}{text}", output: "{{{output}}}"}}'
            return f"{names} look like choices, which the question would lack; write in the recipe template: {line}"
    if is_sure:
        return ""
    for column in nested:
        if not column.has_word((*ANSWER_WORDS, *ANSWERS_WORDS)):
            continue
        ranked = next((column for column in unread if column.has_word(("rank", "ranks", "ranking"))), None)
        if ranked or (column.name == "output" and isinstance(column.typical, list) and len(column.typical) == 2):
            why = f" ({ranked.name!r} may rank them)" if ranked else ""
            return (
                f"{column.name!r} holds several answers a row{why}; write the best as chosen and another one as "
                "rejected, for training.objective: dpo, or one of them as the answer"
            )
        return f"{column.name!r} holds {_inside(column.typical)}, and a row has one answer; write it as one text"
    for column in unread:
        if column.has_word(ANSWER_WORDS) and column.kind == "other":
            return f"{column.name!r} holds {json_kind(column.typical)}; save it as text"
        if column.has_word(ANSWER_WORDS) and column.filled < 0.3 and not column.values:
            return (
                f"{column.name!r} has a value in {column.filled:.0%} of the rows; fill in the answers (formulas: open "
                "and save the workbook once)"
            )
    return ""


def _as_pairs(unread: Sequence[Column]) -> str:
    """The remedy for two answers a row."""
    judge = next((column for column in unread if column.has_word(CHOOSING_WORDS) and column.kind != "turns"), None)
    says = "" if judge is None else f" ({judge.name!r} may say which is better)"
    return f"write them as chosen and rejected, for training.objective: dpo{says}, or name one of them"


def _inside(value: Any) -> str:
    """A list's or an object's content, in words."""
    if isinstance(value, dict):
        return f"objects with {in_quotes([*value])}"
    first = value[0] if value else None
    if isinstance(first, dict):
        return f"lists of objects with {in_quotes([*first])}"
    return f"lists of {'texts' if isinstance(first, str) else json_kind(first)}"


def _no_texts(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    """The obstacle if no column holds text."""
    names = [column.name for column in columns]
    if len(rows) == 1 and len(names) > 1 and all(isinstance(value, dict) for value in rows[0].values()):
        return f"is one object whose {len(names)} values are the rows; write one a line: jq -c '.[]' FILE > rows.jsonl"
    if turns := next((column for column in columns if column.kind == "list" and _renamed_turns(column)), None):
        return _unread_turns(turns)
    if nested := [column for column in columns if column.kind in ("list", "object")]:
        held = ", ".join(f"{column.name!r} holds {_inside(column.typical)}" for column in nested[:3])
        return f"no column holds texts to train on; {held}; write one question and one answer a row, or messages"
    return f"no column holds texts to train on; the columns are {in_quotes(names) or 'none'}"


def _renamed_turns(column: Column) -> str:
    """The command that renames the fields of a dialogue's turns; empty if they are not an author and a text."""
    first = column.typical[0] if isinstance(column.typical, list) and column.typical else None
    if not isinstance(first, dict) or is_turns(column.typical):
        return ""
    role, content = (
        next((key for key in first if key.lower() in names), None) for names in (SPEAKER_NAMES, SAID_NAMES)
    )
    if role is None or content is None:
        return ""
    path = "".join(f"[{json.dumps(part)}]" for part in column.name.split("."))
    speakers = [*dict.fromkeys(str(turn.get(role)) for turn in column.typical if isinstance(turn, dict))]
    author, who = f".[{json.dumps(role)}]", ""
    if not {*speakers} <= {*ROLES, *OTHER_ROLES}:
        roles = dict.fromkeys(speakers, "...") | dict(zip(speakers, ("user", "assistant"), strict=False))
        author, who = f"{json.dumps(roles, ensure_ascii=False)}[{author}]", " (see who is the user)"
    turn = f"{{role: {author}, content: .[{json.dumps(content)}]}}"
    return f"jq -c {shlex.quote(f'.{path} |= map({turn})')} FILE > rows.jsonl{who}"


def _unread_turns(column: Column) -> str:
    """The obstacle if a column's turns have other fields than a role and its content."""
    remedy = 'write each as {"role": "user", "content": "..."} or {"from": "human", "value": "..."}'
    if command := _renamed_turns(column):
        remedy = f"rename their fields: {command}"
    return f"{column.name!r} looks like a dialogue, and its turns cannot be read ({_inside(column.typical)}); {remedy}"


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


def in_quotes(names: Sequence[str]) -> str:
    """Names in quotes, as many as fit into a message, and a count of the others."""
    return listed([repr(name) for name in names])


def listed(words: Sequence[str]) -> str:
    """Words with commas between them, as many as fit into a message, and a count of the others."""
    text = ""
    for shown, word in enumerate(words):
        part = ", " * bool(text) + word
        if len(text) + len(part) > SHOWN_CHARACTERS:
            if text:
                return f"{text} and {len(words) - shown:,} more"
            return counted(len(words), "name")
        text += part
    return text


def in_quotes_of_yaml(text: str) -> str:
    """A text in YAML's double quotes. YAML takes no control characters, and a terminal should not."""
    return "".join(
        letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in json.dumps(text, ensure_ascii=False)
    )


def in_yaml(mapping: Mapping[str, str | bool] | Mapping[str, str] | Mapping[str, bool]) -> str:
    """A mapping in one line of YAML. The value "..." stays plain, because the reader fills it in."""

    def quoted(name: str | bool) -> str:
        if isinstance(name, bool):
            return str(name).lower()
        is_word = re.fullmatch(r"[A-Za-z_][\w-]*", name, re.ASCII)
        if name == "...":
            return name
        if is_word and name.lower() not in ("y", "n", "yes", "no", "on", "off", "true", "false", "null"):
            return name
        return in_quotes_of_yaml(name)

    return "{" + ", ".join(f"{quoted(key)}: {quoted(value)}" for key, value in mapping.items()) + "}"
