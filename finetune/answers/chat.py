"""Talk to the base model, the tuned one, or both, from a finished run's folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from finetune.answers.endpoint import Endpoint, NoAnswer, reply_of
from finetune.data.cells import BadRow
from finetune.data.chat import Chat
from finetune.errors import FinetuneError
from finetune.files import json_lines
from finetune.finished_run import best_device, finished_run, load_adapted, load_whole
from finetune.generation.generate import Sampling, answer
from finetune.generation.settings import answering
from finetune.model.build import decoder_parts
from finetune.output_stream import one_line, without_controls
from finetune.tokens.encoder import Encoder

Who = Literal["base", "tuned", "both"]
WHO: dict[str, Who] = {"/base": "base", "/tuned": "tuned", "/both": "both"}
HELP = """\
/base /tuned /both   who answers
/seed N              the same answers again, where the temperature is above 0; /seed alone: others each time
/history             the conversation, as each model remembers it
/save FILE           that, as rows which a recipe can train on (JSONL)
/reset               forget it
/quit, Ctrl-D        end; Ctrl-C stops an answer"""


@dataclass
class GenerationSettings:
    """How answers are sampled."""

    max_new_tokens: int
    temperature: float  # 0 is greedy
    seed: int | None = None  # set before every answer; None: each answer draws anew


@dataclass
class Participant:
    """A model in the conversation, with its own history."""

    name: str
    model: Any  # an nn.Module, or a model's name on a server
    turn_off_adapter: Callable[[], AbstractContextManager[Any]]
    history: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class ChatSession:
    """A run's loaded models, and its prompt format."""

    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    base: Participant | None  # None: a server has the tuned model alone
    tuned: Participant
    endpoint: Endpoint | None = None
    opening: Sequence[dict[str, str]] = ()  # the system message before each conversation
    notes: Sequence[str] = ()

    def speakers(self, who: Who) -> list[Participant]:
        """Raises FinetuneError for the base where there is none."""
        participants = [
            participant
            for participant in (self.base, self.tuned)
            if participant is not None and who in (participant.name, "both")
        ]
        if not participants:
            raise FinetuneError("base: is not asked; name it with --base-model")
        return participants

    def reply(self, speaker: Participant, text: str, settings: GenerationSettings, streamer: Any = None) -> str:
        """The speaker's answer to `text` after its history. Both are remembered, or after an error neither."""
        turns = [*speaker.history, {"role": "user", "content": text}]
        messages = [*self.opening, *turns]
        if self.endpoint is not None:
            new, sampling = settings.max_new_tokens, Sampling(settings.temperature, seed=settings.seed)
            chat = Chat(messages, None, [False] * len(messages), self.encoder.variables_for_server())
            reply = reply_of(self.endpoint, speaker.model, chat, max_new_tokens=new, sampling=sampling).text
            if streamer is not None:
                streamer.on_finalized_text(reply, stream_end=True)
        else:
            try:
                prompt = self.encoder.prompt_ids(messages)
            except BadRow as error:
                raise FinetuneError(f"the chat template refuses this conversation: {error}") from error
            if settings.seed is not None:  # for each answer, so that base and tuned draw the same numbers
                torch.manual_seed(settings.seed)
            options: Any = {"max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature}
            with answering(speaker.model), speaker.turn_off_adapter():
                reply = answer(decoder_parts(speaker.model), self.tokenizer, prompt, streamer=streamer, **options)
        speaker.history[:] = [*turns, {"role": "assistant", "content": reply}]
        return reply


def open_run(run_dir: Path, endpoint: Endpoint | None = None, *, system: str | None = None) -> ChatSession:
    """Load a finished run, with its base as in training, or talk to the server that has it.

    Args:
        system: The system message, "" for none; None: the one with which all training rows began, if there is one.

    Raises FinetuneError if the folder holds none.
    """
    run, device = finished_run(run_dir), best_device()
    encoder, opening = run.encoder, run.conversation.opening(system)
    notes: list[str] = []
    if system is None and run.conversation.system is None:
        notes.append("system: none is sent, and the training rows have several; send one: --system TEXT")
    elif opening:
        notes.append(f"system: {one_line(opening[0]['content'], 200)}")
    base_without: Callable[[], AbstractContextManager[Any]] = nullcontext
    if endpoint is not None:
        models: dict[str, Any] = dict(endpoint.models())
    elif run.recipe.lora is None:
        models = {name: load_whole(run, device, tuned=name == "tuned") for name in ("tuned", "base")}
    else:
        adapted: Any = load_adapted(run, device)
        models, base_without = {"tuned": adapted, "base": adapted}, adapted.disable_adapter
    base = Participant("base", models["base"], base_without) if "base" in models else None
    tuned = Participant("tuned", models["tuned"], nullcontext)
    return ChatSession(run.tokenizer, encoder, base, tuned, endpoint, opening, notes)


def chat_loop(
    session: ChatSession,
    lines: Iterable[str],
    who: Who,
    settings: GenerationSettings,
    say: Callable[[str], None],
    *,
    typed: bool = False,
) -> None:
    """Answer each line as it comes, word by word. Lines that begin with a slash are commands: see HELP.

    Args:
        typed: A server's missing answer does not end the talk.
    """
    for text in map(str.strip, lines):
        command, _, argument = text.partition(" ")
        if command == "/quit":
            return
        if command in WHO:
            try:
                session.speakers(WHO[command])
                who = WHO[command]
            except FinetuneError as error:
                say(str(error))
        elif text.startswith("/"):
            say(_run_command(session, settings, command, argument.strip()))
        elif text:
            for speaker in session.speakers(who):
                say(f"\n{speaker.name}:")
                streamer = PlainStreamer(session.tokenizer, skip_prompt=True, skip_special_tokens=True)
                try:
                    session.reply(speaker, text, settings, streamer)
                except KeyboardInterrupt:
                    say("\n(stopped; not remembered)")
                    break  # the next speaker does not answer either
                except NoAnswer as error:
                    if not typed:
                        raise
                    say(f"({error}; not remembered)")
                    break


class PlainStreamer(TextStreamer):
    """Prints an answer word by word. A terminal obeys nothing in a model's text."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(without_controls(text), stream_end)


def _run_command(session: ChatSession, settings: GenerationSettings, command: str, argument: str) -> str:
    """Run a slash command. Returns the text to print."""
    match command:
        case "/reset":
            for speaker in session.speakers("both"):
                speaker.history.clear()
            return "forgotten"
        case "/seed" if not argument or argument.isdecimal():
            settings.seed = int(argument) if argument else None
            text = f"seed: {argument or 'none'}"
            if settings.temperature <= 0:
                text += "; answers are greedy, so it changes nothing: start with --temperature 0.8"
            return text
        case "/history":
            lines = []
            for speaker in session.speakers("both"):
                for turn in speaker.history:
                    name = speaker.name if turn["role"] == "assistant" else "you"
                    lines.append(f"{name}: {without_controls(turn['content'])}")
            return "\n".join(lines) or "nothing to show yet"
        case "/save" if argument:
            path, speakers = Path(os.path.expanduser(argument)), session.speakers("both")
            rows = [{"who": one.name, "messages": [*session.opening, *one.history]} for one in speakers if one.history]
            try:
                if rows:
                    with path.open("x", encoding="utf-8") as file:  # x: never overwrite a file
                        file.write(json_lines(rows))
            except FileExistsError:
                return f"{path}: is there already; choose another name"
            except OSError as error:
                return f"{path}: could not be written: {error.strerror}"
            return f"saved: {path} ({len(rows)} conversations)" if rows else "nothing to show yet"
    return HELP


def converse(
    session: ChatSession, prompts: Sequence[str], who: Who, settings: GenerationSettings, say: Callable[[str], None]
) -> None:
    """Answer the prompts, or typed lines if there are none, through `say`. Raises FinetuneError."""
    session.speakers(who)
    for note in session.notes:
        say(note)
    if not prompts:
        say(HELP)
    chat_loop(session, prompts or typed_lines(), who, settings, say, typed=not prompts)


def answers_to(
    session: ChatSession, prompts: Iterable[str], who: Who, settings: GenerationSettings
) -> list[dict[str, str]]:
    """Each speaker's answer to each prompt, each in a new conversation."""
    answers = []
    for prompt in prompts:
        for speaker in session.speakers(who):
            speaker.history.clear()
            text = session.reply(speaker, prompt, settings)
            answers.append({"prompt": prompt, "who": speaker.name, "answer": text})
    return answers


def typed_lines() -> Iterator[str]:
    """The user's lines, until Ctrl-D. Arrow keys go back to earlier lines, and Ctrl-C starts a line anew."""
    with suppress(ImportError):  # not every Python is built with it
        import readline  # noqa: F401  # the import teaches `input` the keys
    while True:
        try:
            yield input("\nyou: ")
        except EOFError:
            return
        except KeyboardInterrupt:
            yield ""
