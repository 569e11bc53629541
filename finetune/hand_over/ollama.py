"""An Ollama Modelfile beside a GGUF: the chat template in Go's syntax, stop tokens, context and sampling.

Ollama does not read the Jinja template in a GGUF. Without a TEMPLATE it guesses a known one by its text, or sends the
bare prompt. No parser turns Jinja into Go, so the template is found by probing: chats of sentinel words are rendered,
and the text between the sentinels is cut out.

    rendered   <s>SYSTEM<e><u>FIRST<e><a>SAID<e><u>LAST<e><a>
    joints     <s>    system before the first word        <e><u>  from the system's text to the first question
               <e><a> from a question to its answer       <e><u>  from an answer to the next question
               <e><a> the end, where the model goes on

Six other chats then show whether these joints give the tokenizer's own prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from finetune.data.cells import BadRow
from finetune.errors import FinetuneError
from finetune.files import write_text
from finetune.finished_run import FinishedRun
from finetune.generation.settings import ends_by_settings
from finetune.library_errors import library_errors
from finetune.recipe.schema import Data
from finetune.tokens.encoder import Encoder
from finetune.untrusted.json_files import read_object

USUAL_CONTEXT = 4096  # Ollama's own num_ctx, where Modelfile and environment say nothing
# Contents of the probes: no template has these words, or changes them.
SYSTEM, FIRST, SAID, LAST, THOUGHT = "xqsystemqx", "xqfirstqx", "xqsaidqx", "xqlastqx", "xqthoughtqx"
REASONED = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"


@dataclass(frozen=True)
class Joints:
    """The literal texts between a chat's contents. `system` and `after_system` are None if there is no system turn."""

    start: str  # before the first question, in a chat without a system turn
    system: str | None  # before the system's text
    after_system: str | None  # between the system's text and the first question
    answer: str  # between a question and its answer in the history
    question: str  # between an answer and the next question
    end: str  # after the last question: the model goes on from here

    def text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that the Go template prints for these messages; the same branches in Python."""
        system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        written = self.start
        if system and self.system is not None and self.after_system is not None:
            written = self.system + system + self.after_system
        previous = ""
        for message in messages:
            if message["role"] == "user":
                written += (self.question if previous == "assistant" else "") + message["content"]
                previous = "user"
            elif message["role"] == "assistant":
                written += self.answer + message["content"]
                previous = "assistant"
        return written if previous == "assistant" else written + self.end

    def go_template(self) -> str:
        """The template in Go's syntax, as Ollama runs it: with .System, and .Messages with .Role and .Content.

        All literal text is inside `{{ "..." }}`, so that line breaks of the file mean nothing.
        """
        begin = _print(self.start).replace("{{", "{{-", 1)
        if self.system is not None and self.after_system is not None:
            given = f"{_print(self.system)}{{{{ .System }}}}{_print(self.after_system)}"
            begin = f"{{{{- if .System }}}}{given}\n{{{{- else }}}}{_print(self.start)}\n{{{{- end }}}}"
        return "\n".join(
            [
                '{{- $previous := "" }}',
                begin,
                "{{- range .Messages }}",
                '{{- if eq .Role "user" }}',
                f'{{{{- if eq $previous "assistant" }}}}{_print(self.question)}{{{{ end }}}}{{{{ .Content }}}}',
                "{{- $previous = .Role }}",
                f'{{{{- else if eq .Role "assistant" }}}}{_print(self.answer)}{{{{ .Content }}}}',
                "{{- $previous = .Role }}",
                "{{- end }}",
                "{{- end }}",
                f'{{{{- if ne $previous "assistant" }}}}{_print(self.end)}{{{{ end }}}}',
            ]
        )


def _print(text: str) -> str:
    """A Go action that prints this text. JSON's escapes are Go's, and other characters stand for themselves."""
    if not text:
        return ""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}"


def dialogues() -> list[list[dict[str, str]]]:
    """The six chats that a template is tested with: one to three questions, with and without a system turn."""
    words = ["What is a river?", "Water that\nflows.", 'And "the sea"?', "Größer: 海 🌊", "Why {{ so }}?"]
    turns = [{"role": "user" if at % 2 == 0 else "assistant", "content": text} for at, text in enumerate(words)]
    system = {"role": "system", "content": "Answer in one sentence."}
    return [[*start, *turns[:length]] for start in ([], [system]) for length in (1, 3, 5)]


class PromptText:
    """A run's prompts as text: its tokenizer's template, with the recipe's variables and pinned date."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: Data) -> None:
        """Raises FinetuneError for a tokenizer without a chat template, or one that is not a fast one."""
        encoder = Encoder(tokenizer, data)
        self._tokenizer, self._template, self._variables = tokenizer, encoder.template, data.chat_template_kwargs
        self._form = encoder.template.forms(self._variables, tools=False)[0]
        self.bos = str(tokenizer.bos_token or "")
        # The engine adds BOS where the tokenizer does too. Not before a template without BOS: training had none there.
        adds_bos = bool(self.bos) and encoder.texts.start_ids == [tokenizer.bos_token_id]
        self.engine_adds_bos = adds_bos and self([{"role": "user", "content": FIRST}]).startswith(self.bos)

    def __call__(self, messages: Sequence[dict[str, str]]) -> str:
        """Raises BadRow if the template refuses the chat."""
        return self._template.render(messages, form=self._form, generation_prompt=True, variables=self._variables)

    def ids(self, text: str) -> list[int]:
        """The tokens, nothing added."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids


def find_joints(prompt: PromptText) -> tuple[Joints | None, list[str]]:
    """The chat template as joints without the engine's BOS, and notes in words.

    None if joints cannot express the template. Then the last note says why.
    """

    def around(*words: str) -> list[str] | None:
        """The texts before, between and after these contents. None unless each is there once, in this order."""
        roles = [*["system"] * (words[0] == SYSTEM), "user", "assistant", "user"]
        text = prompt([{"role": role, "content": word} for role, word in zip(roles, words, strict=False)])
        if re.findall("|".join(words), text) != [*words]:
            return None
        return re.split("|".join(words), text)

    def agrees(joints: Joints, chat: list[dict[str, str]]) -> bool:
        written = prompt.bos * prompt.engine_adds_bos + joints.text(chat)
        return prompt.ids(written) == prompt.ids(prompt(chat))

    without, within = dialogues()[:3], dialogues()[3:]
    notes: list[str] = []
    try:
        plain = around(FIRST, SAID, LAST)
        if plain is None:
            return None, ["it repeats, changes or leaves out what was said before"]
        start, answer, question, end = plain
        added = prompt.bos * prompt.engine_adds_bos
        joints = Joints(start.removeprefix(added), None, None, answer, question, end)
        if not all(agrees(joints, chat) for chat in without):
            return None, ["it writes other texts between the turns of a longer chat"]
        history = [{"role": "user", "content": FIRST}, {"role": "assistant", "content": REASONED}]
        if THOUGHT not in prompt([*history, {"role": "user", "content": LAST}]):
            notes.append("the template removes reasoning from earlier answers, which Ollama's templates cannot do")
    except BadRow as error:
        return None, [str(error)]
    with suppress(BadRow):  # templates may refuse a system message
        if begun := around(SYSTEM, FIRST):
            whole = replace(joints, system=begun[0].removeprefix(added), after_system=begun[1])
            if all(agrees(whole, chat) for chat in within):
                return whole, notes
    notes.append("the Modelfile takes no system message: the template has none, or none with a fixed place")
    return joints, notes


def go_template(run: FinishedRun) -> tuple[str, list[str]]:
    """The run's chat template in Go's syntax, and notes in words. A run without one sends the bare prompt.

    Raises FinetuneError if no Go template gives the tokenizer's prompts.
    """
    if not run.tokenizer.chat_template and not run.recipe.data.chat_template:
        return "{{ .Prompt }}", []
    joints, notes = find_joints(PromptText(run.tokenizer, run.recipe.data))
    if joints is None:
        raise FinetuneError(
            f"{run.folder}: Ollama cannot write the prompts of this chat template: {notes[-1]}; serve the GGUF with "
            "llama-server, which runs the chat template itself: finetune merge --gguf, then llama-server --jinja"
        )
    return joints.go_template(), notes


def end_tokens_of(run: FinishedRun, source: Path) -> list[int]:
    """The tokens that end an answer: the training's, then others that the converted folder names."""
    listed = ends_by_settings(generation_settings(source), run.tokenizer)
    return list(dict.fromkeys([*run.conversation.stops.values(), *listed]))


def write_modelfile(run: FinishedRun, source: Path, gguf: Path) -> tuple[Path | None, list[str]]:
    """Write the Modelfile beside a GGUF. Returns the file, or None if Ollama cannot write the run's prompts, and notes.

    Args:
        source: The folder that was converted.
    """
    file = gguf.with_name("Modelfile")
    try:
        template, notes = go_template(run)
    except FinetuneError as error:
        file.unlink(missing_ok=True)  # an earlier one names an earlier GGUF
        return None, [f"no Modelfile: {error}"]
    text, notes = modelfile(run, source, template, gguf.name), list(notes)
    write_text(file, text)
    if run.conversation.opening() and "\nSYSTEM " not in text:
        notes.append("the Modelfile cannot hold the training rows' system message: send it with each request")
    if run.conversation.tools:
        notes.append("the Modelfile passes no tools: serve rows with tools by llama-server --jinja or vLLM")
    return file, notes


def modelfile(run: FinishedRun, source: Path, template: str, gguf: str) -> str:
    """The Modelfile's text.

    Args:
        source: The folder that was converted, for its end tokens, context length and sampling.
        template: As `go_template` gives it.
        gguf: The name of the GGUF, in the Modelfile's own folder.
    """
    config, settings = _text_config(source), generation_settings(source)
    texts = [run.tokenizer.convert_ids_to_tokens(token) for token in sorted(end_tokens_of(run, source))]
    system = [
        message for message in run.conversation.opening() if '"""' not in message["content"] and ".System" in template
    ]
    positions = config.get("max_position_embeddings", USUAL_CONTEXT)
    lines = [
        f"FROM ./{gguf}",
        f'TEMPLATE """{template}"""',
        *(f'SYSTEM """{message["content"]}"""' for message in system),
        *(f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in texts if text),
        f"PARAMETER num_ctx {min(positions, max(run.recipe.data.max_length, USUAL_CONTEXT))}",
    ]
    # Ollama's own values (1.1 for repetitions) are not the ones with which the samples in the report were written.
    lines.append(f"PARAMETER repeat_penalty {settings.repetition_penalty or 1.0:g}")
    if settings.do_sample:
        # transformers' own values hold where the settings are silent, not Ollama's (0.8, 40, 0.9 and no min_p).
        for name, usual in (("temperature", 1.0), ("top_k", 50), ("top_p", 1.0), ("min_p", None)):
            value = usual if getattr(settings, name) is None else getattr(settings, name)
            if value is not None:
                lines.append(f"PARAMETER {name} {value:g}")
    else:
        lines.append("PARAMETER temperature 0")
    return "\n".join(lines) + "\n"


def generation_settings(folder: Path) -> GenerationConfig:
    """The folder's generation settings, or the end tokens that its config.json names. Raises FinetuneError."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return GenerationConfig(eos_token_id=_text_config(folder).get("eos_token_id"))
    with library_errors(f"{file}: cannot be read", "correct it"):
        return GenerationConfig.from_pretrained(folder)


def _text_config(folder: Path) -> Mapping[str, Any]:
    config = read_object(folder / "config.json")
    return config.get("text_config", config)  # type: ignore[no-any-return]
