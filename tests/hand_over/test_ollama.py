"""The Modelfile: its Go template gives the tokenizer's own prompts, or the run is refused in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerFast

from finetune.errors import FinetuneError
from finetune.finished_run import finished_run as open_finished
from finetune.hand_over.ollama import Joints, PromptText, dialogues, find_joints, go_template, modelfile
from finetune.recipe.schema import Data
from tests.support.models.chat_families import CHATML_TOKENS, FAMILIES, QWEN3, byte_level_tokenizer, tokenizer_of
from tests.support.models.tiny import save_tiny
from tests.support.runs.finished import finished_run

DATA = Data.model_validate({"train": [{"path": "json", "data_files": "chats.jsonl"}]})
NO_SYSTEM = ("mistral", "gemma")
# Qwen 3 as it is published: without thinking, the prompt's end is not an answer's beginning in the history.
ASKS_NOT_TO_THINK = QWEN3.replace(
    "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
)
NUMBERED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + loop.index|string + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
FORGETS = "{{ '<|im_start|>user\n' + messages[-1].content + '<|im_end|>\n<|im_start|>assistant\n' }}"


def chatml_tokenizer(template: str) -> PreTrainedTokenizerFast:
    return byte_level_tokenizer(template, CHATML_TOKENS, None, "<|im_end|>")


def own_ids(tokenizer: PreTrainedTokenizerFast, chat: list[dict[str, str]], **variables: Any) -> list[int]:
    """transformers' own prompt. The date is the recipe's."""
    ids: list[int] = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, date_string=DATA.date_string, **variables
    )["input_ids"]
    return ids


def chats_of(joints: Joints) -> list[list[dict[str, str]]]:
    return [chat for chat in dialogues() if joints.system is not None or chat[0]["role"] != "system"]


@pytest.mark.parametrize("family", FAMILIES)
def test_six_chats_get_the_tokenizers_prompts(family: str) -> None:
    tokenizer = tokenizer_of(family)
    prompt = PromptText(tokenizer, DATA)
    joints, notes = find_joints(prompt)
    assert joints is not None
    assert (joints.system is None) == (family in NO_SYSTEM) == any("no system message" in note for note in notes)
    assert any("removes reasoning" in note for note in notes) == (family in ("qwen3", "deepseek"))
    # These tokenizers add BOS themselves, and so does an engine.
    assert prompt.engine_adds_bos == (tokenizer.bos_token is not None)
    chats = chats_of(joints)
    assert len(chats) == (3 if family in NO_SYSTEM else 6)
    for chat in chats:
        text = (tokenizer.bos_token or "") + joints.text(chat)
        assert tokenizer(text, add_special_tokens=False).input_ids == own_ids(tokenizer, chat)


def test_the_recipes_variables_reach_the_template() -> None:
    tokenizer = chatml_tokenizer(ASKS_NOT_TO_THINK)
    variables = {"enable_thinking": False}
    train = [{"path": "json", "data_files": "chats.jsonl", "chat_template_kwargs": variables}]
    joints, _ = find_joints(PromptText(tokenizer, Data.model_validate({"train": train})))
    assert joints is not None
    assert joints.end == joints.answer + "<think>\n\n</think>\n\n"
    for chat in dialogues():
        assert tokenizer(joints.text(chat)).input_ids == own_ids(tokenizer, chat, **variables)


def test_bos_is_the_engines_only_if_tokenizer_and_template_have_it() -> None:
    llama, chatml = FAMILIES["llama3"], FAMILIES["smollm"][0]
    without = byte_level_tokenizer(chatml, (*llama[1], *CHATML_TOKENS), llama[2], "<|im_end|>")
    assert not PromptText(without, DATA).engine_adds_bos  # a ChatML recipe over a Llama tokenizer was trained without
    written = byte_level_tokenizer(llama[0], llama[1], None, "<|eot_id|>")
    written.bos_token = llama[2]  # the tokenizer adds none, the template does
    prompt = PromptText(written, DATA)
    joints, _ = find_joints(prompt)
    assert joints is not None
    assert not prompt.engine_adds_bos
    assert joints.start.startswith("<|begin_of_text|>")


@pytest.mark.parametrize("template", [NUMBERED, FORGETS])
def test_a_template_that_joints_cannot_express(template: str) -> None:
    joints, notes = find_joints(PromptText(chatml_tokenizer(template), DATA))
    assert joints is None
    assert len(notes) == 1


GO = """
package main

import (
	"encoding/json"
	"os"
	"strings"
	"text/template"
)

type Message struct{ Role, Content string }
type Case struct {
	Template, System string
	Messages         []*Message
}

func main() {
	var cases []Case
	if err := json.NewDecoder(os.Stdin).Decode(&cases); err != nil {
		panic(err)
	}
	texts := []string{}
	for _, each := range cases {
		// As Ollama's template.Execute: system messages joined, all messages in their order.
		parsed := template.Must(template.New("").Option("missingkey=zero").Parse(each.Template))
		var text strings.Builder
		values := map[string]any{"System": each.System, "Messages": each.Messages, "Tools": nil, "Response": ""}
		if err := parsed.Execute(&text, values); err != nil {
			panic(err)
		}
		texts = append(texts, text.String())
	}
	json.NewEncoder(os.Stdout).Encode(texts)
}
"""


def printed_by_go(cases: Sequence[tuple[Joints, list[dict[str, str]]]], folder: Path) -> list[str]:
    (folder / "main.go").write_text(GO, "utf-8")
    asked = [
        {
            "Template": joints.go_template(),
            "System": "\n\n".join(message["content"] for message in chat if message["role"] == "system"),
            "Messages": [{"Role": message["role"], "Content": message["content"]} for message in chat],
        }
        for joints, chat in cases
    ]
    process = subprocess.run(
        ["go", "run", "main.go"], cwd=folder, input=json.dumps(asked), capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr[-2000:]
    texts: list[str] = json.loads(process.stdout)
    return texts


@pytest.mark.slow
def test_go_prints_what_the_joints_say(tmp_path: Path) -> None:
    """text/template itself, with every family's template, on chats that no training has, too."""
    if shutil.which("go") is None:
        pytest.skip("needs go (Debian: golang-go)")
    odd = [
        [{"role": "assistant", "content": "I begin."}, {"role": "user", "content": "So?"}],
        [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": "Once upon"}],
        [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Two"},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Three"},
        ],
    ]
    awkward = Joints('"""\n{{ x }}\\', "\t<ü🌊>\x00\x7f", "`'", " ", "", "{{- end }}")
    found = [joints for family in FAMILIES if (joints := find_joints(PromptText(tokenizer_of(family), DATA))[0])]
    cases = [(joints, chat) for joints in (*found, awkward) for chat in (*dialogues(), *odd)]
    assert len(cases) == (len(FAMILIES) + 1) * 9
    assert printed_by_go(cases, tmp_path) == [joints.text(chat) for joints, chat in cases]


def test_the_modelfile(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    run = open_finished(finished_run(tmp_path / "made", base, data={"max_length": 1024}))
    settings: dict[str, Any] = {"eos_token_id": [0, 2]}
    (base / "generation_config.json").unlink()
    template, notes = go_template(run)
    assert notes == []
    alone = modelfile(run, base, template, "x.gguf")  # config.json names the end token
    assert [line for line in alone.splitlines() if "stop" in line] == ['PARAMETER stop "<|im_end|>"']
    (base / "generation_config.json").write_text(json.dumps(settings), "utf-8")
    text = modelfile(run, base, template, "tuned-q8_0.gguf")
    head, _, parameters = text.partition(f'TEMPLATE """{template}"""\n')
    assert head == "FROM ./tuned-q8_0.gguf\n"
    assert parameters.splitlines() == [
        'PARAMETER stop "<|endoftext|>"',
        'PARAMETER stop "<|im_end|>"',
        "PARAMETER num_ctx 2048",  # all positions that the model has; Ollama's own 4096 are more
        "PARAMETER repeat_penalty 1",
        "PARAMETER temperature 0",
    ]
    settings |= {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    (base / "generation_config.json").write_text(json.dumps(settings), "utf-8")
    assert modelfile(run, base, template, "x.gguf").splitlines()[-4:] == [
        "PARAMETER repeat_penalty 1.05",
        "PARAMETER temperature 0.6",
        "PARAMETER top_k 20",
        "PARAMETER top_p 0.95",
    ]
    # Settings that sample and leave the rest to the library: its values, which are not Ollama's.
    (base / "generation_config.json").write_text('{"eos_token_id": 2, "do_sample": true, "min_p": 0.1}', "utf-8")
    written = dict(line.split()[1:] for line in modelfile(run, base, template, "x.gguf").splitlines()[-4:])
    library = GenerationConfig()._get_default_generation_params()  # no public name has them; they are pinned here
    assert {name: float(written[name]) for name in ("temperature", "top_k", "top_p")} == {
        name: library[name] for name in ("temperature", "top_k", "top_p")
    }
    assert written["min_p"] == "0.1"


def test_a_run_without_a_chat_template_gets_the_bare_prompt(tmp_path: Path) -> None:
    run = open_finished(finished_run(tmp_path / "made", save_tiny(tmp_path / "base")))
    run.tokenizer.chat_template = None
    assert go_template(run) == ("{{ .Prompt }}", [])


def test_a_template_beyond_go_is_refused_with_the_engine_that_runs_it(tmp_path: Path) -> None:
    run = open_finished(finished_run(tmp_path / "made", save_tiny(tmp_path / "base")))
    run.tokenizer.chat_template = NUMBERED
    with pytest.raises(FinetuneError, match=r"longer chat; serve the GGUF with llama-server") as refused:
        go_template(run)
    assert "\n" not in str(refused.value)


def test_generation_settings_that_cannot_be_read(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    run = open_finished(finished_run(tmp_path / "made", base))
    (base / "generation_config.json").write_text("{", "utf-8")
    with pytest.raises(FinetuneError, match=r"generation_config.json: cannot be read: .*; correct it$"):
        modelfile(run, base, "{{ .Prompt }}", "x.gguf")
