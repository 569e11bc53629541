"""The Hub's data sets that recipes name, small, on the loopback Hub: the same configurations, splits and columns.

Rows are drawn here from a few words, so that a tiny model learns something of them in a few steps. Files lie as those
of the Hub do, in Parquet, with the configurations in the page's metadata.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.support.hub.server import Hub
from tests.support.hub.state import Blob

# Of the words that a rehearsal's tokenizer learns from (finetune/rehearse/shrink.py): a token or two each.
WORDS = (
    "which river runs past the old mill the one that turns its wheel please write numbers from one to ten then say "
    "which of them are prime you are a patient assistant user asks answers briefly and says when it does not know"
).split()
HANGUL = "물레방아는 강물이 돌립니다 숫자를 하나부터 열까지 쓰고 소수를 고르세요 모르면 모른다고 답하세요".split()
DEFAULT = "default"
Row = dict[str, Any]
Draw = random.Random


def text(draw: Draw, least: int, most: int, words: list[str] = WORDS) -> str:
    """So many words."""
    return " ".join(draw.choices(words, k=draw.randint(least, most)))


def messages(draw: Draw, turns: int = 1, system: str | None = None) -> list[dict[str, str]]:
    """Turns of a user and an assistant, in OpenAI's layout."""
    found = [{"role": "system", "content": system}] if system else []
    for _ in range(turns):
        found += [
            {"role": "user", "content": text(draw, 5, 12)},
            {"role": "assistant", "content": text(draw, 40, 90)},
        ]
    return found


def shared(draw: Draw, names: tuple[str, str], turns: int = 1) -> list[dict[str, str]]:
    """The same in ShareGPT's layout, by the names that the data set has for the two."""
    by_role = dict(zip(("user", "assistant"), names, strict=True))
    return [{"from": by_role[turn["role"]], "value": turn["content"]} for turn in messages(draw, turns)]


def identity(draw: Draw) -> str:
    """Of a row."""
    return f"{draw.getrandbits(64):016x}"


def smoltalk(draw: Draw) -> Row:
    return {"messages": messages(draw, 2), "source": "smol-magpie-ultra"}


def apigen(draw: Draw) -> Row:
    tools = '[{"name": "turns", "description": "turns a wheel", "parameters": {"wheel": {"type": "str"}}}]'
    turns = messages(draw, 1, f"You are a patient assistant. You have access to the following tools:\n{tools}")
    call = f'<tool_call>[{{"name": "turns", "arguments": {{"wheel": "{text(draw, 30, 60)}"}}}}]</tool_call>'
    return {"messages": [*turns[:2], turns[2] | {"content": call}]}


def no_robots(draw: Draw) -> Row:
    turns = messages(draw)
    return {"prompt": turns[0]["content"], "prompt_id": identity(draw), "messages": turns, "category": "Open QA"}


def ultrachat(draw: Draw) -> Row:
    turns = messages(draw, 3)
    return {"prompt": turns[0]["content"], "prompt_id": identity(draw), "messages": turns}


def tulu(draw: Draw) -> Row:
    return {"id": identity(draw), "messages": messages(draw, 2), "source": "ai2-adapt-dev/oasst1_converted"}


def long_align(draw: Draw) -> Row:
    turns = messages(draw)
    return {"messages": turns, "length": sum(len(turn["content"]) for turn in turns)}


def alpaca(draw: Draw) -> Row:
    context = text(draw, 5, 12) if draw.random() < 0.4 else ""
    return {"output": text(draw, 40, 90), "input": context, "instruction": text(draw, 5, 12)}


def dolly(draw: Draw) -> Row:
    context = text(draw, 20, 40) if draw.random() < 0.3 else ""
    asked = {"instruction": text(draw, 5, 12), "context": context}
    return {**asked, "response": text(draw, 40, 90), "category": "closed_qa" if context else "open_qa"}


def finetome(draw: Draw) -> Row:
    score = round(draw.uniform(2, 5), 6)
    return {"conversations": shared(draw, ("human", "gpt")), "source": "infini-instruct-top-500k", "score": score}


def open_thoughts(draw: Draw) -> Row:
    asked, answered = shared(draw, ("user", "assistant"))
    thought = f"<|begin_of_thought|>\n\n{text(draw, 60, 120)}\n\n<|end_of_thought|>\n\n"
    answered |= {"value": f"{thought}<|begin_of_solution|>\n\n{answered['value']}\n\n<|end_of_solution|>"}
    return {"system": "Your role as an assistant says which steps it runs.", "conversations": [asked, answered]}


def open_r1(draw: Draw) -> Row:
    """Of its two generations one is in `messages`."""
    asked, answered = messages(draw)
    thought = f"<think>\n{text(draw, 60, 120)}\n</think>\n\n{answered['content']}"
    row: Row = {"problem": asked["content"], "solution": answered["content"], "answer": "ten"}
    row |= {"problem_type": "Algebra", "question_type": "math-word-problem", "source": "olympiads"}
    row |= {"uuid": identity(draw), "is_reasoning_complete": [True, True], "generations": [thought, thought]}
    row |= {"correctness_math_verify": [True, False], "correctness_llama": None, "finish_reasons": None}
    return row | {"correctness_count": 1, "messages": [asked, answered | {"content": thought}]}


def gsm8k(draw: Draw) -> Row:
    first, second = draw.randint(2, 30), draw.randint(2, 30)
    steps = f"{text(draw, 20, 40)} <<{first}+{second}={first + second}>>{text(draw, 20, 40)}\n#### {first + second}"
    return {"question": text(draw, 15, 30), "answer": steps}


def metamath(draw: Draw) -> Row:
    first, second = draw.randint(2, 30), draw.randint(2, 30)
    row = {"type": "GSM_Rephrased", "query": text(draw, 15, 30), "original_question": text(draw, 15, 30)}
    return row | {"response": f"{text(draw, 40, 80)}\n#### {first + second}\nThe answer is: {first + second}"}


def sql_context(draw: Draw) -> Row:
    table, column = draw.choice(WORDS), draw.choice(WORDS)
    query = f"SELECT {column} FROM {table} WHERE {draw.choice(WORDS)} = '{text(draw, 1, 2)}'"
    return {"answer": query, "question": text(draw, 6, 12), "context": f"CREATE TABLE {table} ({column} VARCHAR)"}


def ko_alpaca(draw: Draw) -> Row:
    url = f"https://kin.naver.com/qna/detail.naver?docId={draw.getrandbits(30)}"
    return {"instruction": text(draw, 3, 6, HANGUL), "output": text(draw, 10, 25, HANGUL), "url": url}


def tiny_stories(draw: Draw) -> Row:
    return {"text": f"One day {text(draw, 60, 120)}.\n\nThen {text(draw, 60, 120)}."}


def pg19(draw: Draw) -> Row:
    """A book. The real ones have about 90,000 tokens."""
    row: Row = {"short_book_title": text(draw, 2, 4), "publication_date": draw.randint(1600, 1918)}
    return row | {"url": "http://www.gutenberg.org/ebooks/1", "text": text(draw, 120, 240)}


def aya(draw: Draw) -> Row:
    words, language, code = draw.choice([(WORDS, "English", "eng"), (HANGUL, "Korean", "kor")])
    row: Row = {"inputs": text(draw, 3, 8, words), "targets": text(draw, 10, 25, words)}
    row |= {"language": language, "language_code": code}
    return row | {"annotation_type": "original-annotations", "user_id": identity(draw)}


def numina(draw: Draw) -> Row:
    asked, answered = messages(draw)
    row: Row = {"source": "synthetic_math", "problem": asked["content"], "solution": answered["content"]}
    return row | {"messages": [asked, answered]}


def multilingual_thinking(draw: Draw) -> Row:
    """Each of its messages has the key `thinking`, which is null but in the answer."""
    developer, thought = "You are a patient assistant.", text(draw, 60, 120)
    system, asked, answered = messages(draw, 1, f"reasoning language: German\n\n{developer}")
    row: Row = {"reasoning_language": "German", "developer": developer, "user": asked["content"]}
    row |= {"analysis": thought, "final": answered["content"]}
    turns = [system | {"thinking": None}, asked | {"thinking": None}, answered | {"thinking": thought}]
    return row | {"messages": turns}


def magicoder(draw: Draw) -> Row:
    solution = f"```python\ndef turns():\n    return {text(draw, 40, 90)!r}\n```"
    row: Row = {"lang": "python", "raw_index": draw.getrandbits(16), "index": draw.getrandbits(16)}
    row |= {"seed": text(draw, 10, 20), "openai_fingerprint": "fp_eeff13170a"}
    return row | {"problem": text(draw, 15, 30), "solution": solution}


def answers(draw: Draw) -> tuple[str, str]:
    """A better and a worse one. Their words differ, so that a tiny model can tell them apart after a few steps."""
    return text(draw, 20, 40, WORDS[:20]), text(draw, 20, 40, WORDS[20:])


def ultrafeedback(draw: Draw) -> Row:
    """Both answers are whole dialogues that begin with the prompt."""
    prompt, (better, worse) = text(draw, 5, 12), answers(draw)
    asked = {"content": prompt, "role": "user"}
    chosen, rejected = ([asked, {"content": answer, "role": "assistant"}] for answer in (better, worse))
    row: Row = {"prompt": prompt, "prompt_id": identity(draw), "chosen": chosen, "rejected": rejected}
    return row | {"messages": chosen, "score_chosen": 8.5, "score_rejected": 6.0}


def orca_pairs(draw: Draw) -> Row:
    chosen, rejected = answers(draw)
    system = "You are a patient assistant." if draw.random() < 0.8 else ""
    return {"system": system, "question": text(draw, 5, 12), "chosen": chosen, "rejected": rejected}


def kto_mix(draw: Draw) -> Row:
    wanted, chosen_and_rejected = draw.random() < 0.5, answers(draw)
    prompt = [{"content": text(draw, 5, 12), "role": "user"}]
    completion = [{"content": chosen_and_rejected[0 if wanted else 1], "role": "assistant"}]
    return {"prompt": prompt, "completion": completion, "label": wanted}


def smoltalk2_pairs(draw: Draw) -> Row:
    row = ultrafeedback(draw)
    variables = {"custom_instructions": "", "enable_thinking": False, "python_tools": [], "xml_tools": []}
    return {name: row[name] for name in ("chosen", "rejected", "prompt")} | {
        "chat_template_kwargs": variables,
        "source": "preference_mixture",
    }


def medical_o1(draw: Draw) -> Row:
    thought = ". ".join(text(draw, 20, 40) for _ in range(3))
    return {"Question": text(draw, 10, 20), "Complex_CoT": thought, "Response": text(draw, 20, 40)}


def ag_news(draw: Draw) -> Row:
    return {"text": text(draw, 30, 50), "label": draw.randrange(4)}


@dataclass(frozen=True)
class DataSetPage:
    """A data set of the Hub: how many rows its first split really has, its licence, and how it is laid out."""

    size: int
    licence: str
    rows: Mapping[str, Callable[[Draw], Row]]  # one of them, by configuration
    splits: tuple[str, ...] = ("train",)

    @property
    def columns(self) -> dict[str, list[str]]:
        """By configuration."""
        return {config: list(row(Draw(0))) for config, row in self.rows.items()}


DATA_SETS = {
    "HuggingFaceTB/smoltalk": DataSetPage(
        1_043_917, "Apache-2.0", {"all": smoltalk, "apigen-80k": apigen}, ("train", "test")
    ),
    "HuggingFaceH4/no_robots": DataSetPage(9_500, "CC-BY-NC-4.0", {DEFAULT: no_robots}, ("train", "test")),
    "HuggingFaceH4/ultrachat_200k": DataSetPage(207_865, "MIT", {DEFAULT: ultrachat}, ("train_sft", "test_sft")),
    "allenai/tulu-3-sft-mixture": DataSetPage(939_343, "ODC-BY", {DEFAULT: tulu}),
    "zai-org/LongAlign-10k": DataSetPage(9_888, "Apache-2.0", {DEFAULT: long_align}),
    "yahma/alpaca-cleaned": DataSetPage(51_760, "CC-BY-4.0", {DEFAULT: alpaca}),
    "databricks/databricks-dolly-15k": DataSetPage(15_011, "CC-BY-SA-3.0", {DEFAULT: dolly}),
    "mlabonne/FineTome-100k": DataSetPage(100_000, "see its page", {DEFAULT: finetome}),
    "open-thoughts/OpenThoughts-114k": DataSetPage(113_957, "Apache-2.0", {DEFAULT: open_thoughts}),
    "open-r1/OpenR1-Math-220k": DataSetPage(93_733, "Apache-2.0", {DEFAULT: open_r1}),
    "openai/gsm8k": DataSetPage(7_473, "MIT", {"main": gsm8k}, ("train", "test")),
    "meta-math/MetaMathQA": DataSetPage(395_000, "MIT", {DEFAULT: metamath}),
    "b-mc2/sql-create-context": DataSetPage(78_577, "CC-BY-4.0", {DEFAULT: sql_context}),
    "beomi/KoAlpaca-v1.1a": DataSetPage(21_155, "see its page", {DEFAULT: ko_alpaca}),
    "CohereLabs/aya_dataset": DataSetPage(202_362, "Apache-2.0", {DEFAULT: aya}, ("train", "test")),
    "AI-MO/NuminaMath-CoT": DataSetPage(859_494, "Apache-2.0", {DEFAULT: numina}, ("train", "test")),
    "HuggingFaceH4/Multilingual-Thinking": DataSetPage(1_000, "Apache-2.0", {DEFAULT: multilingual_thinking}),
    "ise-uiuc/Magicoder-OSS-Instruct-75K": DataSetPage(75_197, "MIT", {DEFAULT: magicoder}),
    "FreedomIntelligence/medical-o1-reasoning-SFT": DataSetPage(19_704, "Apache-2.0", {"en": medical_o1}),
    "fancyzhx/ag_news": DataSetPage(120_000, "see its page", {DEFAULT: ag_news}, ("train", "test")),
    "roneneldan/TinyStories": DataSetPage(
        2_119_719, "CDLA-Sharing-1.0", {DEFAULT: tiny_stories}, ("train", "validation")
    ),
    "emozilla/pg19": DataSetPage(28_602, "see its page", {DEFAULT: pg19}, ("train", "validation", "test")),
    "HuggingFaceH4/ultrafeedback_binarized": DataSetPage(
        61_135, "MIT", {DEFAULT: ultrafeedback}, ("train_prefs", "test_prefs")
    ),
    "Intel/orca_dpo_pairs": DataSetPage(12_859, "Apache-2.0", {DEFAULT: orca_pairs}),
    "trl-lib/kto-mix-14k": DataSetPage(13_500, "see its page", {DEFAULT: kto_mix}, ("train", "test")),
    "HuggingFaceTB/smoltalk2": DataSetPage(
        230_501,
        "see its page",
        {"Preference": smoltalk2_pairs},
        ("llama_3.1_tulu_3_8b_preference_mixture_no_think", "tulu_3_8b_pref_mix_Qwen3_32B_Qwen3_0.6B_think"),
    ),
}


def rows_of(name: str, config: str, split: str, count: int) -> list[Row]:
    """The first rows of a split, the same at each call."""
    draw = random.Random(f"{name} {config} {split}")
    return [DATA_SETS[name].rows[config](draw) for _ in range(count)]


def serve(hub: Hub, name: str, rows: int = 200, held_out: int = 20) -> None:
    """Put the data set on the Hub with so many rows in its first split, and in each other one."""
    page, configs = DATA_SETS[name], []
    files: dict[str, Blob] = {}
    for config in page.rows:
        listed = []
        for index, split in enumerate(page.splits):
            table = pa.Table.from_pylist(rows_of(name, config, split, held_out if index else rows))
            path = f"{config}/{split}-00000-of-00001.parquet"
            files[path] = _large(hub, table)
            listed.append({"split": split, "path": f"{config}/{split}-*"})
        configs.append({"config_name": config, "data_files": listed})
    head = yaml.safe_dump({"configs": configs}, sort_keys=False)
    files["README.md"] = Blob(f"---\n{head}---\n# {name}\n".encode())
    repository = hub.add(name, private=False, kind="dataset")
    repository.commit("main", {**repository.files(), **files}, "data", "")


def _large(hub: Hub, table: pa.Table) -> Blob:
    """A file of the large ones' store, and its pointer."""
    stream = io.BytesIO()
    pq.write_table(table, stream)
    sha256 = hashlib.sha256(stream.getvalue()).hexdigest()
    hub.large[sha256] = stream.getvalue()
    return Blob.pointer(sha256, len(stream.getvalue()))
