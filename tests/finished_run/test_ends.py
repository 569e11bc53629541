"""Where an answer ends and how its prompt is written belong to the run: every place gives eight answers and stops.

The answers are the rows' own texts. Prompts for the exports are transformers' own, without any argument.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from finetune.errors import DataError
from finetune.finished_run import evaluate
from finetune.finished_run.chat import GenerationSettings, answers_to, open_run
from finetune.training.samples import Questions, samples
from tests.support.models.chat_families import byte_level_tokenizer
from tests.support.rows.shipped_templates import STOPS, shipped
from tests.support.runs.by_heart import PAIRS, Learned, learned_by_heart, save_base

CPU = torch.device("cpu")
PLACES = ("samples", "eval", "chat", "generate")
EOS = ("the template's", "another")
NEW = 48
HEADERS = ["<|endoftext|>", "<|user|>", "<|observation|>"]  # GLM 4 MoE's own generation_config.json


def raw_template(name: str) -> str:
    """The template as TRL ships it, today's date and all."""
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")


def family_of(name: str) -> Any:
    return shipped()[name.removesuffix("_training")]


def learned(folder: Path, name: str, eos: str, **sections: Any) -> Learned:
    """A run on TRL's template: the tokenizer's own, or the recipe's, whose file is gone afterwards."""
    family, text = family_of(name), raw_template(name)
    stop = STOPS[max((known for known in STOPS if name.startswith(known)), key=len)][0]
    own = eos == "the template's"
    control = tuple(dict.fromkeys([*family.control, "<|endoftext|>"]))
    bos = "<s>" if "bos_token" in text else None
    tokenizer = byte_level_tokenizer(text, control, bos, (stop if own else None) or "<|endoftext|>")
    file = folder / "template.jinja"
    folder.mkdir(parents=True, exist_ok=True)
    if not own:
        tokenizer.chat_template = None
        file.write_text(text, "utf-8")
        sections["data"] = {**sections.get("data", {}), "chat_template": str(file)}
    base = save_base(folder / "base", tokenizer, HEADERS if name.startswith("glm4moe") else None)
    result = learned_by_heart(folder, base, **sections)
    file.unlink(missing_ok=True)
    return result


def expected(run: Learned) -> list[str]:
    """What a model says after its prompt: the row's answer, behind the words of a template's own block."""
    texts = []
    for index in range(len(PAIRS)):
        ids, labels = run.prepared.pool.document(index)
        text = run.tokenizer.decode(ids[labels != -100], skip_special_tokens=True).strip()
        assert text.endswith([*PAIRS.values()][index])
        texts.append(text)
    return texts


def in_samples(run: Learned) -> list[str]:
    asked = Questions(run.prepared.prompts, [range(8)], NEW)
    lines = samples(run.model, run.tokenizer, asked, CPU, lambda _: None, together=False)
    by_question = {question: line["answer"] for line in lines for question in PAIRS if question in line["prompt"]}
    return [by_question[question] for question in PAIRS]


def in_eval(run: Learned) -> list[str]:
    figures = evaluate(run.folder, None, (), lambda _: None, metrics=("exact",), file=run.file)
    rows = [json.loads(line) for line in (run.folder / "eval_answers.jsonl").read_text("utf-8").splitlines()]
    exact = figures["scores"]["metrics"]["exact"]
    assert exact["tuned"]["mean"] == 1.0, exact
    return [row["tuned"] for row in rows]


def in_chat(run: Learned) -> list[str]:
    settings = GenerationSettings(max_new_tokens=NEW, temperature=0)
    return [line["answer"] for line in answers_to(open_run(run.folder), [*PAIRS], "tuned", settings)]


def by_generate(folder: Path, as_wanted: Any) -> list[str]:
    """Plain transformers: neither arguments for the template nor for the end."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    answers = []
    for question in PAIRS:
        chat = as_wanted([{"role": "user", "content": question}])
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        tokens = model.generate(**prompt, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        assert tokens.shape[1] < prompt["input_ids"].shape[1] + NEW, "it runs on"
        answers.append(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return answers


def table_row(run: Learned, as_wanted: Any) -> dict[str, bool]:
    """Each place: whether all eight answers are right."""
    right = expected(run)
    said = {
        "samples": in_samples(run),
        "eval": in_eval(run),
        "chat": in_chat(run),
        "generate": by_generate(run.folder / "model", as_wanted),
    }
    assert tuple(said) == PLACES
    return {place: answers == right for place, answers in said.items()}


def check_template(folder: Path, name: str, eos: str) -> str:
    run = learned(folder, name, eos)
    stop = STOPS[max((known for known in STOPS if name.startswith(known)), key=len)][0]
    row = table_row(run, family_of(name).as_wanted)
    print(
        f"{name:28}{eos:16}{stop or '':24}" + "".join(f"{'8 of 8' if row[place] else 'WRONG':>10}" for place in PLACES)
    )
    assert all(row.values()), row
    return name


@pytest.mark.parametrize("eos", EOS)
@pytest.mark.parametrize("name", ["qwen3_5_nothink", "glm4moe"])
def test_each_place_gives_the_answers_and_stops(tmp_path: Path, name: str, eos: str) -> None:
    check_template(tmp_path, name, eos)


@pytest.mark.slow
@pytest.mark.parametrize("eos", EOS)
@pytest.mark.parametrize("name", shipped())
def test_every_shipped_template(tmp_path: Path, name: str, eos: str) -> None:
    check_template(tmp_path, name, eos)
