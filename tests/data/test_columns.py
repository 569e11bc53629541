"""The columns of the data sets that people train on: each is read, or answered with the line to add."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.data.chat import Chat, Passage
from finetune.data.rows import RowReader, check_rows
from finetune.data.sources import resolve
from finetune.errors import DataError
from finetune.recipe.schema import Data, DataSet

ASKED, ANSWERED = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
TURNS = [ASKED, ANSWERED]
SHAREGPT = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
BRIEF = {"role": "system", "content": "Be brief."}


def write(folder: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": "json", "data_files": str(file)}


def read(folder: Path, *rows: dict[str, Any], **entry: Any) -> list[Chat | Passage]:
    """The rows as the one reader of all verbs gives them."""
    found = list(RowReader(resolve(DataSet.model_validate(write(folder, *rows) | entry))).rows())
    assert not [row.problem for row in found if row.problem]
    return [row.read for row in found if row.read is not None]


def checked(folder: Path, *rows: dict[str, Any], **entry: Any) -> list[str]:
    """What `check --data` tells of good rows, without the file's name."""
    source = write(folder, *rows) | entry
    notes: list[str] = []
    assert [*check_rows(Data.model_validate({"train": [source]}), notes.append).values()] == [len(rows)]
    return [note.removeprefix(f"{source['data_files']}: ") for note in notes]


def answers(folder: Path, *rows: dict[str, Any], **entry: Any) -> list[str]:
    """What it answers to rows that it refuses, each without the file's name."""
    source = write(folder, *rows) | entry
    with pytest.raises(DataError) as raised:
        check_rows(Data.model_validate({"train": [source]}))
    assert raised.value.exit_code == 2
    return [mistake.removeprefix(f"{source['data_files']}:") for mistake in raised.value.mistakes]


# Name -> (columns as the data set's page states them, keys of its entry, messages read, what is told of it).
DATA_SETS: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]], list[str]]] = {
    "HuggingFaceTB/smoltalk": ({"messages": TURNS, "source": "x"}, {}, TURNS, ["columns not used: 'source'"]),
    "HuggingFaceH4/no_robots": (
        {"prompt": "Why?", "prompt_id": "1f", "messages": TURNS, "category": "Open QA"},
        {}, TURNS, ["columns not used: 'prompt', 'prompt_id', 'category'"],
    ),
    "HuggingFaceH4/ultrachat_200k": (
        {"prompt": "Why?", "prompt_id": "1f", "messages": TURNS}, {}, TURNS, ["columns not used: 'prompt', 'prompt_id'"]
    ),
    "HuggingFaceH4/ultrachat_200k with variables": (  # its prompt is a text, its rows are chats
        {"prompt": "Why?", "prompt_id": "1f", "messages": TURNS}, {"chat_template_kwargs": {"enable_thinking": False}},
        TURNS, ["columns not used: 'prompt', 'prompt_id'"],
    ),
    "allenai/tulu-3-sft-mixture": (
        {"id": "1", "messages": TURNS, "source": "x"}, {}, TURNS, ["columns not used: 'id', 'source'"]
    ),
    "yahma/alpaca-cleaned": ({"instruction": "Why?", "input": "", "output": "So."}, {}, TURNS, []),
    "yahma/alpaca-cleaned with an input": (
        {"instruction": "Why?", "input": "It rains.", "output": "So."},
        {}, [{"role": "user", "content": "Why?\n\nIt rains."}, ANSWERED], [],
    ),
    "databricks/databricks-dolly-15k": (
        {"instruction": "Why?", "context": "It rains.", "response": "So.", "category": "closed_qa"},
        {}, [{"role": "user", "content": "Why?\n\nIt rains."}, ANSWERED],
        ["read as alpaca, columns: {input: context, output: response}", "columns not used: 'category'"],
    ),
    "mlabonne/FineTome-100k": (
        {"conversations": SHAREGPT, "source": "x", "score": 4.5}, {}, TURNS, ["columns not used: 'source', 'score'"]
    ),
    "open-thoughts/OpenThoughts-114k": (
        {"system": "Be brief.", "conversations": [SHAREGPT[0] | {"from": "user"}, SHAREGPT[1] | {"from": "assistant"}]},
        {}, [BRIEF, *TURNS], [],
    ),
    "openai/gsm8k": (
        {"question": "Why?", "answer": "So."}, {"columns": {"instruction": "question", "output": "answer"}}, TURNS, []
    ),
    "b-mc2/sql-create-context": (
        {"answer": "So.", "question": "Why?", "context": "CREATE TABLE t"},
        {"columns": {"instruction": "question", "input": "context", "output": "answer"}},
        [{"role": "user", "content": "Why?\n\nCREATE TABLE t"}, ANSWERED], [],
    ),
    "beomi/KoAlpaca-v1.1a": (
        {"instruction": "Why?", "output": "So.", "url": "x"}, {}, TURNS, ["columns not used: 'url'"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA_SETS)
def test_the_columns_of_public_data_sets_are_read(name: str, tmp_path: Path) -> None:
    row, entry, messages, told = DATA_SETS[name]
    first, second = read(tmp_path, row, row, **entry)
    assert isinstance(first, Chat)
    assert first == second
    assert first.messages == messages
    assert first.supervised == [message["role"] == "assistant" for message in messages]
    assert checked(tmp_path, row, row, **entry) == told


def test_a_text_beside_turns_is_one_turn(tmp_path: Path) -> None:
    for row in ({"prompt": [ASKED], "completion": "So."}, {"prompt": "Why?", "completion": [ANSWERED]}):
        (chat,) = read(tmp_path, row)
        assert chat == Chat(TURNS, None, [False, True])


def test_texts_are_read_as_texts(tmp_path: Path) -> None:
    assert read(tmp_path, {"text": "Once upon a time"}) == [Passage("", "Once upon a time")]
    mapped = {"prompt": "question", "completion": "answer"}
    assert read(tmp_path, {"question": "Why? ", "answer": "So."}, columns=mapped) == [Passage("Why? ", "So.")]


# Rows -> what is answered, once for three of them.
ANSWERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "question and answer": (
        {"question": "Why?", "answer": "So."}, {},
        "the columns are 'question', 'answer'; add to this data set: columns: {instruction: question, output: answer}",
    ),
    "question, context and answer": (
        {"question": "Why?", "context": "It rains.", "answer": "So."},
        {}, "columns: {instruction: question, input: context, output: answer}",
    ),
    "a reasoning column": (
        {"Question": "Why?", "Reasoning": "Hm", "Response": "So."},
        {}, "columns: {instruction: Question, reasoning_content: Reasoning, output: Response}",
    ),
    "another answer": ({"prompt": "Why?", "response": "So."}, {}, "columns: {instruction: prompt, output: response}"),
    "Orca": (
        {"id": "1", "system_prompt": "Be brief.", "question": "Why?", "response": "So."},
        {}, "columns: {system: system_prompt, instruction: question, output: response}",
    ),
    "turns of another name": ({"conversation": TURNS, "model": "x"}, {}, "columns: {messages: conversation}"),
    "sharegpt of another name": ({"dialog": SHAREGPT}, {}, "columns: {conversations: dialog}"),
    "a text of another name": ({"title": "x", "content": "Once"}, {},
        "columns: {instruction: title, output: content} or {instruction: content, output: title}, or for plain text"),
    "a name to quote": ({"my question": "x", "no": SHAREGPT}, {}, 'columns: {conversations: "no"}'),
    "preference texts": (
        {"prompt": "Why?", "chosen": "So.", "rejected": "No."}, {},
        "preference rows ('prompt', 'chosen', 'rejected'); set training.objective: dpo and columns: {instruction: "
        "prompt}; for the better answers alone columns: {instruction: prompt, output: chosen}",
    ),
    "preference chats": ({"prompt": "Why?", "chosen": TURNS, "rejected": TURNS}, {}, "columns: {messages: chosen}"),
    "preference rows of other names": (
        {"question": "Why?", "r_win": "So.", "r_lose": "No.", "score_win": 1}, {},
        "set training.objective: dpo and columns: {instruction: question, chosen: r_win, rejected: r_lose}; ",
    ),
    "preference answers": ({"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [ANSWERED]}, {}, "completion: chosen"),
    "preference transcripts": ({"chosen": "Human: Why?", "rejected": "x"}, {}, "columns: {text: chosen}"),
    "unknown": ({"x": 1, "y": 2}, {}, "no column holds texts to train on; the columns are 'x', 'y'"),
    "unknown, with short columns before the texts": (
        {"nr": "1", "art": "Technik", "frage": "Wie schwer ist die Säge?", "antwort": "Drei Kilogramm."}, {},
        "add to this data set: columns: {instruction: frage, output: antwort}",
    ),
    "a column that is not there": (
        {"question": "Why?", "answer": "So."}, {"columns": {"prompt": "qestion", "completion": "answer"}},
        "columns: prompt: the data set has no column 'qestion', but 'question', 'answer'; did you mean columns: "
        "{prompt: question}?",
    ),
    "half of a layout": (
        {"question": "Why?", "x": "So."}, {"columns": {"instruction": "question"}},
        "'output' is missing, the columns are 'question', 'x'; write columns: {instruction: question, output: ...}",
    ),
    "not the format asked for": ({"text": "a"}, {"format": "messages"}, "the field 'messages' is missing; add it, or"),
    "an unknown role": (
        {"messages": [{"role": "Human", "content": "Why?"}, ANSWERED]},
        {}, "messages[0]: unknown role \"Human\"; did you mean 'user'? or add roles: {\"Human\": user}",
    ),
    "an unknown speaker": (
        {"conversations": [{"from": "Mensch", "value": "Why?"}, SHAREGPT[1]]},
        {}, "conversations[0]: unknown speaker 'Mensch'; known are human, gpt, system, function_call, observation; or "
        "add roles: {Mensch: user}",
    ),
    "variables for texts": ({"text": "a"}, {"chat_template_kwargs": {"x": 1}}, "no chat template renders; remove them"),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_a_data_set_is_answered_once(case: str, tmp_path: Path) -> None:
    row, entry, words = ANSWERS[case]
    (answer,) = answers(tmp_path, row, row, row, **entry)
    assert answer.startswith("1: ")
    assert words in answer
    assert len(answer) <= 240


RIGHT_LINES = ["question, context and answer", "Orca", "a reasoning column", "preference answers", "a name to quote"]


@pytest.mark.parametrize("case", RIGHT_LINES)
def test_the_line_of_the_answer_is_right(case: str, tmp_path: Path) -> None:

    row, _, _ = ANSWERS[case]
    (answer,) = answers(tmp_path, row)
    columns = yaml.safe_load(answer.partition("columns: ")[2])
    (chat,) = read(tmp_path, row, columns=columns)
    assert isinstance(chat, Chat)
    assert chat.messages[-1]["content"] == "So."


def test_columns_that_are_mapped_win_over_those_of_the_same_name(tmp_path: Path) -> None:
    row = {"prompt": "Which?", "q": "Why? ", "a": "So.", "messages": TURNS}
    columns = {"prompt": "q", "completion": "a"}
    assert read(tmp_path, row, columns=columns) == [Passage("Why? ", "So.")]
    assert checked(tmp_path, row, columns=columns) == ["columns not used: 'prompt', 'messages'"]
    swapped = {"prompt": "completion", "completion": "prompt"}
    assert read(tmp_path, {"prompt": "a", "completion": "b "}, columns=swapped) == [Passage("b ", "a")]
    # What is an instruction under its own name is not an input too.
    (chat,) = read(tmp_path, {"input": "Why?", "answer": "So."}, columns={"instruction": "input", "output": "answer"})
    assert isinstance(chat, Chat)
    assert chat.messages == TURNS


def test_roles_of_the_recipe(tmp_path: Path) -> None:
    (chat,) = read(tmp_path, {"messages": [ASKED | {"role": "Human"}, ANSWERED]}, roles={"Human": "user"})
    (turns,) = read(tmp_path, {"conversations": [{"from": "Q", "value": "Why?"}, SHAREGPT[1]]}, roles={"Q": "user"})
    assert isinstance(chat, Chat)
    assert isinstance(turns, Chat)
    assert chat.messages == turns.messages == TURNS


def test_roles_of_the_recipe_win_over_known_ones(tmp_path: Path) -> None:
    (chat,) = read(tmp_path, {"messages": TURNS[::-1]}, roles={"user": "assistant", "assistant": "user"})
    (turns,) = read(tmp_path, {"conversations": SHAREGPT[::-1]}, roles={"human": "assistant", "gpt": "user"})
    assert isinstance(chat, Chat)
    assert isinstance(turns, Chat)
    assert chat.messages == turns.messages
    assert [message["content"] for message in chat.messages] == ["So.", "Why?"]
    assert chat.supervised == turns.supervised == [False, True]


def test_each_unknown_role_is_told_once(tmp_path: Path) -> None:
    rows = [{"messages": [ASKED | {"role": role}, ANSWERED]} for role in ("Human", "user", "Human", "asker", "asker")]
    assert [answer.partition(":")[0] for answer in answers(tmp_path, *rows)] == ["1", "4"]


def test_the_layout_is_found_although_the_first_row_is_odd(tmp_path: Path) -> None:
    (answer,) = answers(tmp_path, {"id": 7}, {"messages": TURNS}, {"messages": TURNS})
    assert answer.startswith("1: the field 'messages' is missing")


# -- nothing of a row is dropped silently ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "entry"),
    [
        ({"messages": TURNS}, {}),
        ({"conversations": SHAREGPT}, {}),
        ({"instruction": "Why?", "output": "So."}, {}),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, {}),
    ],
)
def test_a_system_column_is_the_system_turn(row: dict[str, Any], entry: dict[str, Any], tmp_path: Path) -> None:
    plain, instructed = read(tmp_path, row | {"system": None}, row | {"system": "Be brief."}, **entry)
    assert isinstance(plain, Chat)
    assert isinstance(instructed, Chat)
    assert plain.messages == TURNS
    assert instructed.messages == [BRIEF, *TURNS]
    assert instructed.supervised == [False, False, True]
    assert checked(tmp_path, row | {"system": "Be brief."}) == []


def test_a_system_column_beside_a_system_turn(tmp_path: Path) -> None:
    (chat,) = read(tmp_path, {"system": "Be brief. ", "messages": [BRIEF, *TURNS]})
    assert isinstance(chat, Chat)
    assert chat.messages == [BRIEF, *TURNS]
    for role in ("system", "developer"):  # which templates write in the same place
        first = BRIEF | {"role": role}
        (chat,) = read(tmp_path, {"system": "Be brief.", "messages": [first, *TURNS]})
        assert isinstance(chat, Chat)
        assert chat.messages == [first, *TURNS]
        assert chat.supervised == [False, False, True]
        (answer,) = answers(tmp_path, {"system": "Be long.", "messages": [first, *TURNS]})
        assert "'system' and the system turn of the messages differ; keep one" in answer


def test_history_is_earlier_turns(tmp_path: Path) -> None:
    row = {"instruction": "Why?", "output": "So.", "history": [["Hello", "Hi"], ["Rain?", "Yes."]]}
    as_text = row | {"history": json.dumps(row["history"])}
    said = ["Hello", "Hi", "Rain?", "Yes.", "Why?", "So."]
    for chat in read(tmp_path, row, as_text, row | {"history": None}, row | {"history": []}):
        assert isinstance(chat, Chat)
        assert [message["content"] for message in chat.messages] in (said, said[-2:])
    (first, *_) = read(tmp_path, row)
    assert isinstance(first, Chat)
    assert first.supervised == [False, True] * 3


def test_tools_and_reasoning_of_alpaca_rows(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"instruction": "Why?", "output": "So.", "thinking": "Hm", "tools": tools}
    (chat,) = read(tmp_path, row)
    assert isinstance(chat, Chat)
    assert chat.tools == tools
    assert chat.messages == [ASKED, {"role": "assistant", "reasoning_content": "Hm", "content": "So."}]
    assert checked(tmp_path, row) == []


def test_other_keys_of_a_turn_are_kept(tmp_path: Path) -> None:
    (chat,) = read(tmp_path, {"conversations": [SHAREGPT[0], SHAREGPT[1] | {"thinking": "Hm", "weight": 1}]})
    assert isinstance(chat, Chat)
    assert chat.messages[1] == {"role": "assistant", "content": "So.", "thinking": "Hm"}


# Public names for what OpenAI calls `arguments`, and where they stand. Each call is weather({"city": "Oslo"}).
CITY = {"city": "Oslo"}
CALLS = {
    "openai": {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(CITY)}},
    "llama": {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    "langchain": {"name": "weather", "args": CITY, "id": "c1", "type": "tool_call"},
    "anthropic": {"type": "tool_use", "id": "c1", "name": "weather", "input": CITY},
    "beside": {"function": {"name": "weather"}, "params": json.dumps(CITY)},
    "arrow": {"function": {"name": "weather", "arguments": None, "kwargs": CITY}},
}


def calling(call: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize("form", CALLS)
def test_a_calls_arguments_by_any_public_name(form: str, tmp_path: Path) -> None:
    (chat,) = read(tmp_path, calling(CALLS[form]))
    assert isinstance(chat, Chat)
    (call,) = chat.messages[1]["tool_calls"]
    assert call == {"type": "function", "function": {"name": "weather", "arguments": CITY}} | (
        {"id": "c1"} if "id" in CALLS[form] else {}
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"function": {"name": "weather", "parms": CITY}}, "'arguments' is missing, and 'parms' is unknown; rename it"),
        ({"name": "weather", "where": "Oslo"}, "'arguments' is missing, and 'where' is unknown; rename it"),
        ({"name": "weather", "args": CITY, "parameters": {}}, "'parameters' and 'args' are both there"),
        ({"name": "weather", "args": ["Oslo"]}, "args must be an object, not a list"),
    ],
)
def test_a_call_whose_arguments_are_not_clear_is_refused(call: dict[str, Any], said: str, tmp_path: Path) -> None:
    """It would be trained as a call without arguments."""
    (answer,) = answers(tmp_path, calling(call))
    assert said in answer


ASKS, RESULT = calling(CALLS["openai"])["messages"][1], {"role": "tool", "content": "dry"}
OTHER = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.mark.parametrize(
    ("turns", "tools", "said"),
    [
        ([ASKED, ASKS, RESULT, ANSWERED], [CALLS["openai"]["function"]], []),
        ([ASKED, ASKS], None, ["rows with calls and no tools: 1"]),
        ([ASKED, ASKS, RESULT, ANSWERED], [OTHER], ["rows with a call of a tool that they do not declare: 1"]),
        ([ASKED, RESULT, ANSWERED], [OTHER], ["rows with a tool's result that answers no call: 1"]),
        ([ASKED, ASKS, ANSWERED], [CALLS["openai"]["function"]], ["rows with a call that gets no result: 1"]),
    ],
)
def test_calls_results_and_tools_that_do_not_belong_together_are_counted(
    turns: list[Any], tools: Any, said: list[str], tmp_path: Path
) -> None:
    assert checked(tmp_path, {"messages": turns, "tools": tools}) == said


def test_a_call_without_arguments(tmp_path: Path) -> None:
    (chat,) = read(tmp_path, calling({"id": "c1", "function": {"name": "now"}}))
    assert isinstance(chat, Chat)
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
IN_ENVELOPE = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}


@pytest.mark.parametrize(
    "tool",
    [
        IN_ENVELOPE,
        {"function": IN_ENVELOPE["function"]},
        IN_ENVELOPE["function"],
        {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA},
        {"name": "weather", "description": "d", "input_schema": SCHEMA},
        {"name": "weather", "description": "d", "inputSchema": SCHEMA},
    ],
)
def test_a_bare_tool_is_read_as_servers_send_it(tool: dict[str, Any], tmp_path: Path) -> None:
    (chat,) = read(tmp_path, {"messages": [ASKED, ANSWERED], "tools": [tool, {"type": "web_search"}]})
    assert isinstance(chat, Chat)
    assert json.dumps(chat.tools) == json.dumps([IN_ENVELOPE, {"type": "web_search"}])  # the order of keys, too


@pytest.mark.parametrize(
    "mark",
    [{"weight": 0}, {"loss": False}, {"loss_mask": 0}, {"trainable": False}, {"train": False}, {"training": False},
     {"mask": True}, {"masked": 1}, {"weight": 0, "loss": False}],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["messages", "conversations"])
def test_a_turn_marked_as_not_to_be_trained_is_read_only(layout: str, mark: dict[str, Any], tmp_path: Path) -> None:
    first, second = (ASKED, ANSWERED) if layout == "messages" else SHAREGPT[:2]
    (chat,) = read(tmp_path, {layout: [first, second | mark, first, second | {"loss": True, "mask": None}]})
    assert isinstance(chat, Chat)
    assert chat.supervised == [False, False, False, True]
    assert all({*message} == {"role", "content"} for message in chat.messages)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"loss": 0.5}, "loss is a number (0.5); write 0 (read only) or 1 (supervised)"),
        ({"mask": "user"}, "write 1 (read only) or 0 (supervised)"),
        ({"loss": True, "weight": 0}, "loss and weight contradict each other; keep one"),
        ({"role": "user", "trainable": True}, "trainable 1 on a user turn; only assistant turns are supervised"),
        ({"role": "user", "mask": False}, "mask 0 on a user turn; only assistant turns are supervised"),
    ],
)
def test_a_mark_that_cannot_be_followed_is_refused(turn: dict[str, Any], said: str, tmp_path: Path) -> None:
    (answer,) = answers(tmp_path, {"messages": [ASKED, ANSWERED, ANSWERED | turn, ANSWERED]})
    assert said in answer


@pytest.mark.parametrize("column", ["system", "tools", "chat_template_kwargs", "history", "reasoning_content"])
def test_what_plain_texts_have_no_place_for_is_refused(column: str, tmp_path: Path) -> None:
    row = {"question": "Why? ", "completion": "So.", column: {"a": 1}}
    (answer,) = answers(tmp_path, row, columns={"prompt": "question"})
    assert f"{column!r} has no place in texts" in answer
    assert answer.endswith("columns: {instruction: question, output: completion}")
    assert checked(tmp_path, row | {column: None}, columns={"prompt": "question"}) == []


def test_variables_of_the_template(tmp_path: Path) -> None:
    rows = [{"messages": TURNS, "chat_template_kwargs": own} for own in (None, {"effort": "high"}, '{"think": true}')]
    chats = read(tmp_path, *rows, chat_template_kwargs={"think": False})
    assert [chat.template_kwargs for chat in chats if isinstance(chat, Chat)] == [
        {"think": False}, {"think": False, "effort": "high"}, {"think": True},
    ]  # fmt: skip


def test_what_is_odd_is_told_with_its_count(tmp_path: Path) -> None:
    assert checked(tmp_path, {"messages": TURNS}, {"messages": [*TURNS, ASKED]}, {"messages": [*TURNS, ASKED]}) == [
        "dialogues that end without an answer: 2; nothing is supervised in their last turn"
    ]
    rows = [{"prompt": prompt, "completion": "So."} for prompt in ("Why?", "Why? ", "Why?\n", "", "なぜ")]
    (note,) = checked(tmp_path, *rows)
    assert note.startswith("prompts that run into their completion without a space or line break: 1; end them with one")


CHATML = "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
RENDERED: list[tuple[dict[str, Any], str]] = [
    ({"text": CHATML}, "<|im_start|>"),
    ({"prompt": CHATML[:61], "completion": "Hello!<|im_end|>"}, "<|im_start|>"),
    ({"text": "[INST] Hi [/INST] Hello"}, "[INST]"),
    ({"text": "<start_of_turn>user\nHi<end_of_turn>\n"}, "<start_of_turn>"),
    ({"text": "<|turn>user\nHi<turn|>\n<|turn>model\nHello<turn|>"}, "<|turn>"),
    ({"text": "<｜User｜>Hi<｜Assistant｜>Hello"}, "<｜User｜>"),
    ({"text": "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"}, "<|start_header_id|>"),
    ({"instruction": CHATML, "output": "Hello!"}, "<|im_start|>"),
    ({"messages": [{"role": "user", "content": CHATML}, ANSWERED]}, "<|im_start|>"),
]


@pytest.mark.parametrize(("row", "token"), RENDERED, ids=lambda value: value if isinstance(value, str) else "")
def test_chats_that_are_rendered_already_are_told(row: dict[str, Any], token: str, tmp_path: Path) -> None:
    notes = checked(tmp_path, row, row)
    assert f"rows that write control tokens themselves, the first {token}: 2; " in " ".join(notes)
    remedy = next(note for note in notes if token in note)
    assert 'give chats as {"messages": [{"role": "user", "content": "..."}, ...]}' in remedy
    assert checked(tmp_path, {"messages": TURNS}) == []  # the remedy, followed


@pytest.mark.parametrize("token", ["<s>", "<bos>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<BOS_TOKEN>"])
@pytest.mark.parametrize("column", ["text", "prompt"])
def test_a_begin_of_text_in_the_rows_is_told(column: str, token: str, tmp_path: Path) -> None:
    rest = {"completion": " b"} if column == "prompt" else {}
    (note,) = checked(tmp_path, {column: f"{token}a", **rest})
    assert note.startswith(f"rows that begin with {token}: 1; ")
    assert note.endswith("remove it from the rows")
    assert checked(tmp_path, {column: "a", **rest}) == []


@pytest.mark.parametrize(
    "text",
    [
        "a <b>bold</b> word <br/>",
        "x |> f <| y",
        "if a<|b and c|>d",
        "a[0] [INSTALL]",
        "The end.<|endoftext|>",
        "Map<a|b>",
    ],
)
def test_texts_with_other_brackets_are_not_told(text: str, tmp_path: Path) -> None:
    assert checked(tmp_path, {"text": text}) == []


CALLERS = ["tool_call", "tool_calls", "functioncall", "Function-Call", "tool-use", "toolUse", "action"]
TOOLS_ROLES = [
    "function", "ipython", "tool_response", "tool_result", "tool_call_result", "function_output", "api_response",
    "code_interpreter", "observations", "environment",
]  # fmt: skip
ASSISTANTS = ["bot", "ai", "model"]


@pytest.mark.parametrize("layout", ["messages", "conversations"])
@pytest.mark.parametrize("name", [*CALLERS, *TOOLS_ROLES, *ASSISTANTS])
def test_the_remedy_for_an_unknown_role_gives_it_the_right_one(name: str, layout: str, tmp_path: Path) -> None:
    """A call is the assistant's, what answers it the tool's; neither is ever a user's turn."""
    role, content = ("role", "content") if layout == "messages" else ("from", "value")
    call = json.dumps({"name": "look", "arguments": {"limit": 5}})
    turns = [("user", "go"), (name, call), ("assistant", "done")]
    row = {layout: [{role: who, content: text} for who, text in turns]}
    entry = write(tmp_path, row)
    given: dict[str, str] = {}
    if (name, layout) != ("model", "conversations"):  # which is known there
        with pytest.raises(DataError, match="add roles: ") as caught:
            check_rows(Data.model_validate({"train": [entry]}))
        given = yaml.safe_load(str(caught.value).partition("add roles: ")[2])
        assert list(given) == [name]
    (chat,) = read(tmp_path, row, roles=given)
    assert isinstance(chat, Chat)
    message = chat.messages[1]
    if name in CALLERS:
        function = {"name": "look", "arguments": {"limit": 5}}
        assert (message["role"], message["content"]) == ("assistant", "")
        assert [each["function"] for each in message["tool_calls"]] == [function]
    else:
        assert (message["role"], message["content"]) == ("tool" if name in TOOLS_ROLES else "assistant", call)
