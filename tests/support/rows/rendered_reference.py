"""What is learned of a chat, as the library's own renderings say, and rows of every kind to compare by.

The prompt for an answer is the chat before it with add_generation_prompt=True; the answer is the rest of the chat that
ends with it, up to the token on which the model stops. Nothing here is computed by the package.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from finetune.data.chat import Chat, read_row
from finetune.data.layout import RowLayout
from finetune.tokens.encoder import OTHERWISE, Encoder, RowError
from tests.support.models.chat_families import byte_level_tokenizer
from tests.support.rows.masks import data_section, shown

MODES = ("each_turn", "completion", "assistant")
WORDS_THAT_SOME_MAKE_CONTROL_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@dataclass(frozen=True)
class Family:
    """A template, its control tokens, and what somebody who knows the model knows."""

    template: str
    control: tuple[str, ...]
    eos: str
    stops: tuple[str | None, str | None]  # the token that ends an answer in words, and one with calls
    parts: bool = False  # contents are lists of parts
    text_arguments: bool = False
    null_content: bool = False  # beside calls
    thinking_key: bool = False  # it reads "thinking", not "reasoning_content"
    one_call: bool = False  # it writes one call of a turn

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return _tokenizer(self)

    def with_more_control_tokens(self) -> Family:
        """The words around thoughts and calls are control tokens too, as some tokenizers have them."""
        more = [word for word in WORDS_THAT_SOME_MAKE_CONTROL_TOKENS if word in self.template]
        return Family(**{**self.__dict__, "control": (*self.control, *more)})

    def as_wanted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A row's messages as somebody who knows the template gives them to the library."""
        result = []
        for message in messages:
            message = dict(message)
            if "reasoning_content" in message and self.thinking_key:
                message["thinking"] = message.pop("reasoning_content")
            calls = message.get("tool_calls")
            if calls and not self.text_arguments:
                message["tool_calls"] = [
                    call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
                    for call in calls
                ]
            if calls and not message["content"]:
                message["content"] = None if self.null_content else ""
            elif self.parts:
                message["content"] = [{"type": "text", "text": message["content"]}]
            result.append(message)
        return result


@cache
def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    bos = "<s>" if "bos_token" in family.template else None
    return byte_level_tokenizer(family.template, family.control, bos, family.eos)


TOOLS = [
    {"type": "function", "function": {
        "name": name, "description": "Looks.", "parameters": {
            "type": "object", "properties": {"city": {"type": "string", "description": "A city."}}, "required": ["city"]
        }
    }}
    for name in ("look_up", "list_open")
]  # fmt: skip


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, thought: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({"reasoning_content": thought} if thought else {})


def calls(*arguments: Any, text: str = "", thought: str | None = None, name: str = "look_up") -> dict[str, Any]:
    made = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(each)}}
        for number, each in enumerate(arguments)
    ]
    return says(text, thought) | {"tool_calls": made}


def result(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"call0000{number}", "name": "look_up"}


def with_call(*arguments: Any, **others: Any) -> list[dict[str, Any]]:
    return [user("Ask one."), calls(*arguments, **others), *map(result, ["Result."] * len(arguments),
            range(len(arguments))), says("Reply two.")]  # fmt: skip


ROWS: dict[str, list[dict[str, Any]]] = {
    "one turn": [user("Ask one."), says("Reply one.")],
    "system": [{"role": "system", "content": "Be kind."}, user("Ask one."), says("Reply one.")],
    "several turns": [user("Ask one."), says("Reply one."), user("Ask two."), says("Reply two."), user("Ask three."),
                      says("Reply three.")],
    "system, several turns": [{"role": "system", "content": "Be kind."}, user("Ask one."), says("Reply one."),
                              user("Ask two."), says("Reply two.")],
    "unanswered": [user("Ask one."), says("Reply one."), user("Ask two.")],
    "call: text": with_call({"city": "Paris"}),
    "call: number": with_call({"limit": 5}),
    "call: boolean": with_call({"open": True}),
    "call: null": with_call({"limit": None}),
    "call: no arguments": with_call({}),
    "call: empty text": with_call({"city": ""}),
    "call: nested": with_call({"where": {"city": "Paris", "near": [1, 2.5, None]}, "open": False}),
    "call: list": with_call({"cities": ["Paris", "Rome"]}),
    "call: empty list and object": with_call({"cities": [], "where": {}}),
    "call: beside text": with_call({"city": "Paris"}, text="Let me look."),
    "call: beside text, number": with_call({"limit": 5}, text="Let me look."),
    "call: last": [user("Ask one."), calls({"limit": 5})],
    "call: another name": with_call({"limit": 5}, name="list_open"),
    "calls: parallel": with_call({"city": "Paris"}, {"city": "Rome"}),
    "calls: parallel, no arguments": with_call({}, {}),
    "calls: three": with_call({"a": 1}, {"a": 2}, {"a": None}),
    "calls: one after another": [user("Ask one."), calls({"city": "Paris"}), result("Result."), calls({"limit": 5}),
                                 result("Again."), says("Reply two.")],
    "call: after an answer": [user("Ask one."), says("Reply one."), user("Ask two."), calls({"limit": 5}),
                              result("Result."), says("Reply two.")],
    "call: then a question": [*with_call({"limit": 5}), user("Ask three."), says("Reply three.")],
    "call: empty result": [user("Ask one."), calls({"city": "Paris"}), result(""), says("Reply two.")],
    "reasoning": [user("Ask one."), says("Reply one.", "Thought one.")],
    "reasoning, several turns": [user("Ask one."), says("Reply one.", "Thought one."), user("Ask two."),
                                 says("Reply two.", "Thought two.")],
    "reasoning, then none": [user("Ask one."), says("Reply one.", "Thought one."), user("Ask two."),
                             says("Reply two.")],
    "reasoning before a call": [user("Ask one."), calls({"limit": 5}, thought="Thought one."), result("Result."),
                                says("Reply two.", "Thought two.")],
    "reasoning before a call alone": [user("Ask one."), calls({"limit": 5}, thought="Thought one."), result("Result."),
                                      says("Reply two.")],
}  # fmt: skip
WITH_TOOLS = [name for name in ROWS if "call" in name]
# As many data sets have them: calls, and no tools.
ROWS |= {
    f"{name}, no tools": ROWS[name]
    for name in WITH_TOOLS
    if name.partition(": ")[2] in ("text", "number", "no arguments", "beside text", "last", "parallel", "three",
                                   "one after another", "after an answer")
}  # fmt: skip


SAMPLED_ROWS = 12


def sample_of_rows(name: str, count: int = SAMPLED_ROWS) -> list[str]:
    """Rows for a template, drawn by its name, for tests that a slow one repeats with all rows. Every template can write
    the first row."""
    first, *others = ROWS
    return [first, *random.Random(name).sample(others, count - 1)]


def tools_of(row: str) -> list[dict[str, Any]] | None:
    return TOOLS if row in WITH_TOOLS or row == "system" else None


class Reference:
    """The library's own renderings of one row."""

    def __init__(self, family: Family, row: str) -> None:
        self.messages, self._tools, self._family = ROWS[row], tools_of(row), family

    def render(self, end: int | None = None, *, prompt: bool = False) -> str | None:
        """The chat up to a message; None where the template refuses it."""
        wanted = self._family.as_wanted(self.messages[:end])
        try:
            text = self._family.tokenizer().apply_chat_template(
                wanted, tools=self._tools, add_generation_prompt=prompt, tokenize=False, date_string="26 Jul 2024"
            )
        except Exception:  # whatever a template raises
            return None
        assert isinstance(text, str)
        return text

    def answers(self) -> list[int]:
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    def turn(self, index: int) -> tuple[str, str | None, str, str] | None:
        """(prompt, answer, what follows it, token that ends it); answer None: it does not follow the prompt. None: the
        template cannot write the turn."""
        prompt, text = self.render(index, prompt=True), self.render(index + 1)
        stop = self._family.stops[bool(self.messages[index].get("tool_calls"))]
        if prompt is None or text is None or stop is None:
            return None
        if not text.startswith(prompt):
            return (prompt, None, "", stop) if self.is_whole(text, index, thought=False) else None
        answer, found, rest = text[len(prompt) :].partition(stop)
        if not found or stop in rest or not self.is_whole(text, index):
            return None  # it does not end, goes on after the model has stopped, or is not all there
        return prompt, answer + found, rest, stop

    def is_whole(self, text: str, index: int, *, thought: bool = True) -> bool:
        """Whether all that the turn holds is there."""
        message = self.messages[index]
        texts = [message["content"], message.get("reasoning_content", "") if thought else ""]
        tools = not self._tools or "Looks." in text
        names = len(message.get("tool_calls", ()))
        return all(part in text for part in texts) and tools and self.calls_in(text, index) >= names

    def has_context(self, index: int) -> bool:
        """Whether all messages before a turn are in its text."""
        if self._family.one_call and any(len(m.get("tool_calls", ())) > 1 for m in self.messages):
            return False
        text = self.render(index + 1) or ""
        names = sum(len(message.get("tool_calls", ())) for message in self.messages[:index])
        found = sum(text.count(name) for name in ("look_up", "list_open"))
        return found >= names + 2 * bool(self._tools) and all(m["content"] in text for m in self.messages[:index])

    def calls_in(self, text: str, index: int) -> int:
        """How many calls a turn's text has."""
        name = next((c["function"]["name"] for c in self.messages[index].get("tool_calls", ())), None)
        if name is None:
            return 0
        before = self.render(index) or ""
        return text.count(name) - before.count(name)


def masks(encoder: Encoder, row: str) -> list[tuple[str, tuple[str, ...]]]:
    """The marked text of each example of a row, and its remarks. Raises RowError."""
    read = read_row({"messages": ROWS[row], "tools": tools_of(row)}, RowLayout("messages"))
    assert isinstance(read, Chat)
    examples = encoder.examples(read)
    scripts = [encoder.script(example) for example in examples]
    texts = [shown(encoder.document(example), encoder._tokenizer) for example in examples]  # type: ignore[arg-type]
    return list(zip(texts, (script.remarks for script in scripts), strict=True))


def follows_prompt(text: str, prompt: str, message: dict[str, Any], stop: str) -> bool:
    """Whether a text is this very prompt and, learned, an answer with all that the message holds."""
    if not text.startswith(f"{prompt}⟦"):
        return False
    answer, end, rest = text[len(prompt) + 1 :].partition("⟧")
    parts = [message.get("reasoning_content", ""), message["content"]]
    return bool(end) and answer.endswith(stop) and "⟦" not in rest and all(part in answer for part in parts)


def each_turn_verdict(reference: Reference, index: int, text: str) -> bool:
    turn = reference.turn(index)
    if turn is None:
        return False  # it should have been refused
    prompt, answer, rest, stop = turn
    if answer is None:
        return follows_prompt(text, prompt, reference.messages[index], stop)
    return text == f"{prompt}⟦{answer}⟧{rest}"


def assistant_verdict(reference: Reference, text: str, remarks: tuple[str, ...]) -> bool:
    """Whether each answer of a whole chat is learned as the model would write it."""
    whole, last = reference.render(), len(reference.messages) - 1
    turns = {index: reference.turn(index) for index in reference.answers()}
    if whole is None or any(turn is None for turn in turns.values()):
        return False
    marked, at, exact, is_history_alike = "", 0, True, True
    for index, turn in turns.items():
        assert turn is not None
        prompt, answer, _, _ = turn
        if answer is None or not whole.startswith(prompt + answer):
            exact, is_history_alike = False, is_history_alike and index == last
            continue
        marked += f"{whole[at : len(prompt)]}⟦{answer}⟧"
        at = len(prompt) + len(answer)
    if exact:
        return text == marked + whole[at:] and OTHERWISE not in remarks
    # History is written in another way than answers are: each learned stretch is one turn's, in order and whole.
    runs = [run.split("⟧")[0] for run in text.split("⟦")[1:]]
    if len(runs) != len(turns):
        return False
    for run, (index, turn) in zip(runs, turns.items(), strict=True):
        assert turn is not None
        message, stop = reference.messages[index], turn[3]
        others = [each["content"] for at, each in enumerate(reference.messages) if at != index and each["content"]]
        held = [message["content"], message.get("reasoning_content", "")]
        ends = run.endswith(stop) or (index != last and text.split(run + "⟧")[1].startswith("<|end|>"))
        if not ends or run.count(stop) > 1 or any(o in run for o in others) or not all(h in run for h in held):
            return False
        if (name := next((c["function"]["name"] for c in message.get("tool_calls", ())), None)) and name not in run:
            return False
    return (OTHERWISE in remarks) != is_history_alike


def verdict(family: Family, row: str, mode: str, encoder: Encoder) -> tuple[str, str]:
    """('right' | 'refused' | 'needlessly refused' | 'wrong', the reason or the text)"""
    reference = Reference(family, row)
    answers = reference.answers()
    chosen = answers if mode != "completion" else answers[-1:]
    try:
        made = masks(encoder, row)
    except RowError as error:
        can = all(
            (turn := reference.turn(index)) is not None and turn[1] is not None and reference.has_context(index)
            for index in chosen
        )
        if mode == "assistant" and can:
            whole = reference.render()
            can = whole is not None and all(whole.startswith("".join(reference.turn(i)[:2])) for i in chosen)  # type: ignore[index,misc]
        return ("needlessly refused" if can else "refused"), str(error)
    if mode == "each_turn":
        good = len(made) == len(answers) and all(
            each_turn_verdict(reference, index, text) for index, (text, _) in zip(answers, made, strict=True)
        )
    elif mode == "completion":
        good = each_turn_verdict(reference, answers[-1], made[0][0])
    else:
        good = assistant_verdict(reference, *made[0])
    return ("right" if good else "wrong"), "\n".join(text for text, _ in made)


def assert_rows_are_independent(family: Family, mode: str, rows: Sequence[str]) -> None:
    """Each row has the text, mask and remarks that it has alone, whichever rows one encoder has read before it."""

    def read(rows: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        encoder = Encoder(family.tokenizer(), data_section(train_on=mode))
        for row in rows:
            try:
                found[row] = masks(encoder, row)
            except RowError as error:
                found[row] = str(error)
        return found

    alone = {row: read([row])[row] for row in rows}
    assert read(rows[::-1]) == alone
    assert read(random.Random(1).sample(rows, len(rows))) == alone


def table(name: str, family: Family, rows: Sequence[str]) -> Counter[str]:
    """Print how many cases of a template are right, and why others are refused; how many of each there are.

    Raises AssertionError with each case that is wrong, or refused although it could be right.
    """
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    bad = []
    for mode in MODES:
        encoder = Encoder(family.tokenizer(), data_section(train_on=mode))
        for row in rows:
            outcome, words = verdict(family, row, mode, encoder)
            counts[outcome] += 1
            if "refused" in outcome:
                reasons[words.split(";")[0]] += 1
            if outcome in ("wrong", "needlessly refused"):
                bad.append(f"{mode} | {row} | {outcome}: {words}")
    print(f"\n{name}: {sum(counts.values())} cases: {dict(counts)}")
    for reason, count in reasons.most_common():
        print(f"    {count} x {reason}")
    assert sum(counts.values()) == len(rows) * len(MODES)
    assert not bad, "\n".join(bad)
    return counts
