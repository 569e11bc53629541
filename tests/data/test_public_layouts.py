"""The rows of data sets that people train on, as the Hub shows them: read surely, asked about, or refused with a line.

A row is made from its number. Expected: `columns` and the format of the one sure reading; or ASKED, with the best
reading's columns; or words of what is in the way. Worked out from each data set's page, not from this program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from finetune.data.readings import readings

Row = Callable[[int], dict[str, Any]]


def q(n: int) -> str:
    return f"What does machine number {n} cost a day?"


def a(n: int) -> str:
    return f"Machine number {n} costs {n + 5} euros a day, and a deposit is due."


def order(n: int) -> str:
    return f"Describe machine {n} in a sentence or two, please, as for a catalogue"


def pick(n: int, *values: Any) -> Any:
    return values[n % len(values)]


def chat(n: int, answer: str = "") -> list[dict[str, str]]:
    return [{"role": "user", "content": q(n)}, {"role": "assistant", "content": answer or a(n)}]


def gpt(n: int) -> list[dict[str, str]]:
    return [{"from": "human", "value": q(n)}, {"from": "gpt", "value": a(n)}]


# Name -> (row, format, columns): one sure reading.
READ: dict[str, tuple[Row, str, dict[str, str]]] = {
    "tatsu-lab/alpaca": (
        lambda n: {
            "instruction": order(n),
            "input": pick(n, "", "M1"),
            "output": a(n),
            "text": f"Below is {order(n)} {a(n)}",
        },
        "alpaca",
        {},
    ),
    "vicgalle/alpaca-gpt4": (lambda n: {"instruction": order(n), "input": "", "output": a(n)}, "alpaca", {}),
    "databricks-dolly-15k": (
        lambda n: {
            "instruction": q(n),
            "context": pick(n, "", "Prices."),
            "response": a(n),
            "category": pick(n, "open_qa", "qa"),
        },
        "alpaca",
        {"input": "context", "output": "response"},
    ),
    "HuggingFaceTB/smoltalk": (lambda n: {"messages": chat(n), "source": pick(n, "a", "b")}, "messages", {}),
    "HuggingFaceTB/smoltalk2": (
        lambda n: {"messages": chat(n), "chat_template_kwargs": {"enable_thinking": False}, "source": "x"},
        "messages",
        {},
    ),
    "HuggingFaceH4/no_robots": (
        lambda n: {"prompt": q(n), "prompt_id": f"{n:08x}", "messages": chat(n), "category": pick(n, "QA", "Chat")},
        "messages",
        {},
    ),
    "HuggingFaceH4/ultrachat_200k": (
        lambda n: {"prompt": q(n), "prompt_id": f"{n:08x}", "messages": chat(n)},
        "messages",
        {},
    ),
    "allenai/tulu-3-sft-mixture": (lambda n: {"id": f"t{n}", "messages": chat(n), "source": "x"}, "messages", {}),
    "teknium/OpenHermes-2.5": (
        lambda n: {
            "conversations": gpt(n),
            "source": "x",
            "category": pick(n, None, "coding"),
            "system_prompt": None,
            "idx": n,
        },
        "sharegpt",
        {},
    ),
    "mlabonne/FineTome-100k": (
        lambda n: {"conversations": gpt(n), "source": "x", "score": 4.0 + n / 29},
        "sharegpt",
        {},
    ),
    "Open-Orca/OpenOrca": (
        lambda n: {"id": f"cot.{n}", "system_prompt": "Be brief.", "question": q(n), "response": a(n)},
        "alpaca",
        {"system": "system_prompt", "instruction": "question", "output": "response"},
    ),
    "openai/gsm8k": (
        lambda n: {"question": q(n), "answer": f"{a(n)} #### {n + 5}"},
        "alpaca",
        {"instruction": "question", "output": "answer"},
    ),
    "truthfulqa/truthful_qa, generation": (
        lambda n: {
            "type": pick(n, "Adversarial", "Non"),
            "category": pick(n, "Law", "Health"),
            "question": q(n),
            "best_answer": a(n),
            "correct_answers": [a(n)],
            "incorrect_answers": ["No."],
            "source": "https://x.org/a",
        },
        "alpaca",
        {"instruction": "question", "output": "best_answer"},
    ),
    "glaiveai/glaive-code-assistant": (
        lambda n: {"question": q(n), "answer": a(n)},
        "alpaca",
        {"instruction": "question", "output": "answer"},
    ),
    "b-mc2/sql-create-context": (
        lambda n: {
            "question": q(n),
            "context": f"CREATE TABLE t{n} (a INT)",
            "answer": f"SELECT a FROM t{n} WHERE a > {n}",
        },
        "alpaca",
        {"instruction": "question", "input": "context", "output": "answer"},
    ),
    "Salesforce/xlam-function-calling-60k": (
        lambda n: {
            "id": n,
            "query": q(n),
            "answers": f'[{{"name": "cost", "arguments": {{"n": {n}}}}}]',
            "tools": '[{"name": "cost"}]',
        },
        "alpaca",
        {"instruction": "query", "output": "answers"},
    ),
    "google/boolq": (
        lambda n: {"question": f"is machine {n} for hire", "answer": n % 2 == 0, "passage": a(n)},
        "alpaca",
        {"instruction": "question", "input": "passage", "output": "answer"},
    ),
    "HuggingFaceH4/ultrafeedback_binarized": (
        lambda n: {
            "prompt": q(n),
            "prompt_id": f"{n:08x}",
            "chosen": chat(n),
            "rejected": chat(n, "No."),
            "messages": chat(n),
            "score_chosen": 8.0 + n / 29,
            "score_rejected": 2.0 + n / 29,
        },
        "preference",
        {},
    ),
    "Intel/orca_dpo_pairs": (
        lambda n: {"system": "Be brief.", "question": q(n), "chosen": a(n), "rejected": "No idea."},
        "preference",
        {"instruction": "question"},
    ),
    "argilla/distilabel-capybara-dpo-7k-binarized": (
        lambda n: {
            "source": "x",
            "conversation": [{"input": q(n), "output": a(n)}],
            "chosen": chat(n),
            "rejected": chat(n, "No."),
            "rating_chosen": 5,
            "rating_rejected": 4,
        },
        "preference",
        {},
    ),
    "jondurbin/truthy-dpo-v0.1": (
        lambda n: {
            "id": f"{n:08x}",
            "source": "x",
            "system": "Be true.",
            "prompt": q(n),
            "chosen": a(n),
            "rejected": "No idea.",
        },
        "preference",
        {"instruction": "prompt"},
    ),
    "trl-lib/kto-mix-14k": (
        lambda n: {"prompt": chat(n)[:1], "completion": chat(n)[1:], "label": n % 2 == 0},
        "kto",
        {},
    ),
    "argilla/kto-mix-14k": (
        lambda n: {
            "dataset": "x",
            "prompt": chat(n)[:1],
            "completion": chat(n)[1:],
            "label": n % 2 == 0,
            "rating": 4.0,
        },
        "kto",
        {},
    ),
    "THUDM/webglm-qa": (
        lambda n: {"question": q(n), "answer": a(n), "references": [a(n + 1), a(n + 2)]},
        "alpaca",
        {"instruction": "question", "output": "answer"},
    ),
    "stanfordnlp/SHP as text cells": (lambda n: {"messages": str(chat(n))}, "messages", {}),
    "a table of chats by pandas": (lambda n: {"conversations": str(gpt(n)).replace("}, {", "}\n {")}, "sharegpt", {}),
    "medical-o1-reasoning-SFT": (
        lambda n: {"Question": q(n), "Complex_CoT": f"Let us think. {a(n)}", "Response": a(n)},
        "alpaca",
        {"instruction": "Question", "output": "Response"},
    ),
}

# Name -> (row, words of the first reading's columns or of the other reading): a question with these readings.
ASKED: dict[str, tuple[Row, list[dict[str, str]]]] = {
    "wmt14": (
        lambda n: {"translation": {"de": f"Maschine {n} ist neu.", "en": f"Machine {n} is new."}},
        [
            {"instruction": "translation.de", "output": "translation.en"},
            {"instruction": "translation.en", "output": "translation.de"},
        ],
    ),
    "nvidia/HelpSteer2": (
        lambda n: {"prompt": q(n), "response": a(n), "helpfulness": n % 5, "correctness": n % 4, "verbosity": n % 3},
        [
            {"instruction": "prompt", "output": "response"},
            {"instruction": "prompt", "completion": "response", "label": "helpfulness"},
        ],
    ),
    "meta-math/MetaMathQA": (
        lambda n: {"type": pick(n, "MATH", "GSM"), "original_question": q(n), "query": q(n + 50), "response": a(n)},
        [{"instruction": "original_question", "output": "response"}, {"instruction": "query", "output": "response"}],
    ),
    "allenai/WildChat": (
        lambda n: {"conversation": chat(n), "model": "x", "turn": 1, "toxic": n % 5 == 0},
        [{"messages": "conversation"}, {"completion": "conversation", "label": "toxic"}],
    ),
    "thumbs in a log": (
        lambda n: {"prompt": order(n), "reply": a(n), "thumb": pick(n, "up", "down")},
        [
            {"instruction": "prompt", "output": "reply"},
            {"instruction": "prompt", "completion": "reply", "label": "thumb"},
        ],
    ),
    "stanfordnlp/imdb": (
        lambda n: {"text": f"A film about machine {n} that I saw with joy.", "label": n % 2},
        [{}, {"instruction": "text", "output": "label"}],
    ),
    "cnn_dailymail": (
        lambda n: {"article": a(n) * 9, "highlights": a(n), "id": f"{n:08x}"},
        [{"instruction": "article", "output": "highlights"}, {"instruction": "highlights", "output": "article"}],
    ),
}

# Name -> (row, words of what is in the way).
REFUSED: dict[str, tuple[Row, str]] = {
    "openbmb/UltraFeedback": (
        lambda n: {
            "source": "evol",
            "instruction": q(n),
            "models": ["a", "b"],
            "completions": [{"model": "a", "response": a(n)}],
            "correct_answers": ["None"],
            "incorrect_answers": ["None"],
        },
        "'completions' holds lists of objects with 'model', 'response', and a row has one answer; write it as one text",
    ),
    "nvidia/HelpSteer3": (
        lambda n: {
            "domain": "g",
            "language": "en",
            "context": chat(n)[:1],
            "response1": a(n),
            "response2": "No.",
            "overall_preference": -3,
        },
        "'response1', 'response2' answer 'context', and a row has one answer, or two",
    ),
    "lmsys/chatbot_arena_conversations": (
        lambda n: {
            "question_id": f"{n:08x}",
            "model_a": "x",
            "model_b": "y",
            "winner": pick(n, "model_a", "tie"),
            "judge": "j",
            "conversation_a": chat(n),
            "conversation_b": chat(n, "No."),
            "turn": 1,
            "language": "English",
        },
        "'conversation_a', 'conversation_b' are dialogues, and a row has one, or two answers; write them as chosen",
    ),
    "PKU-Alignment/PKU-SafeRLHF": (
        lambda n: {
            "prompt": q(n),
            "response_0": a(n),
            "response_1": a(n + 50),
            "is_response_0_safe": True,
            "is_response_1_safe": n % 2 == 0,
            "better_response_id": n % 2,
            "safer_response_id": 0,
        },
        "('better_response_id' may say which is better)",
    ),
    "allenai/ai2_arc": (
        lambda n: {
            "id": f"M_{n}",
            "question": q(n),
            "choices": {"text": ["one", "two"], "label": ["A", "B"]},
            "answerKey": pick(n, "A", "B"),
        },
        "'choices' holds choices, which the question would lack; write them into 'question'",
    ),
    "mmlu as CSV": (
        lambda n: {
            "question": q(n),
            "A": f"one {n}",
            "B": f"two {n}",
            "C": f"three {n}",
            "D": f"four {n}",
            "answer": pick(n, *"ABCD"),
        },
        'template: {instruction: "{question}\\nA. {A}\\nB. {B}\\nC. {C}\\nD. {D}", output: "{answer}"}',
    ),
    "openlifescienceai/medmcqa": (
        lambda n: {
            "id": f"{n:08x}",
            "question": q(n),
            "opa": f"one {n}",
            "opb": f"two {n}",
            "opc": f"three {n}",
            "opd": f"four {n}",
            "cop": n % 4,
            "choice_type": "single",
            "exp": a(n),
            "subject_name": "Art",
        },
        "'opa', 'opb', 'opc', 'opd' look like choices",
    ),
    "rajpurkar/squad": (
        lambda n: {
            "id": f"{n:08x}",
            "title": pick(n, "Shop", "Town"),
            "context": a(n) * 5,
            "question": q(n),
            "answers": {"text": [str(n + 5)], "answer_start": [3]},
        },
        "'answers' holds objects with 'text', 'answer_start', and a row has one answer",
    ),
    "GAIR/lima": (
        lambda n: {"conversations": [q(n), a(n)], "source": "x"},
        "'conversations' looks like a dialogue, and its turns cannot be read (lists of texts)",
    ),
    "stingning/ultrachat": (lambda n: {"id": str(n), "data": [q(n), a(n)]}, "'data' holds lists of texts"),
    "OpenAssistant/oasst1": (
        lambda n: {
            "message_id": f"{n:08x}",
            "parent_id": f"{n:08x}",
            "text": pick(n, q, a)(n),
            "role": pick(n, "prompter", "assistant"),
            "lang": "en",
        },
        "each row is one turn ('role': 'assistant', 'prompter')",
    ),
    "prompts alone, for GRPO": (lambda n: {"prompt": q(n), "data_source": "math"}, "only 'prompt' holds texts"),
    "an answer that nobody filled in": (
        lambda n: {"question": q(n), "answer": None},
        "'answer' has a value in 0% of the rows",
    ),
    "old LLaMA-Factory pairs": (
        lambda n: {"instruction": q(n), "input": "", "output": [a(n), "No."]},
        "'output' holds several answers a row; write the best as chosen",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_one_sure_reading(name: str) -> None:
    row, format, columns = READ[name]
    found = readings("auto", [row(n) for n in range(30)])
    assert (found.obstacle, [(one.format, dict(one.columns)) for one in found.plausible]) == (
        "",
        [(format, columns)],
    )


@pytest.mark.parametrize("name", ASKED)
def test_a_question(name: str) -> None:
    row, plausible = ASKED[name]
    found = readings("auto", [row(n) for n in range(30)])
    assert not found.obstacle
    assert [dict(each.columns) for each in found.plausible] == plausible


@pytest.mark.parametrize("name", REFUSED)
def test_no_reading_without_a_word(name: str) -> None:
    row, words = REFUSED[name]
    assert words in readings("auto", [row(n) for n in range(30)]).obstacle
