"""Talk to the base model, the tuned one, or both, from a finished run's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TextStreamer

from finetune.answers import answer, answering
from finetune.conversations import Encoder
from finetune.embedded import resolve_model_path
from finetune.errors import FinetuneError
from finetune.recipe import Recipe
from finetune.recipe_file import recipe_from_resolved
from finetune.row_reading import BadRow

Who = Literal["base", "tuned", "both"]
HELP = "/base /tuned /both choose who answers, /reset forgets the conversation, /quit or Ctrl-D ends"


@dataclass
class Speaker:
    """One side of the talk with its own memory of it."""

    name: str
    model: nn.Module
    turn_off_adapter: Callable[[], AbstractContextManager[Any]]
    history: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Parlour:
    """The loaded models of a run and how to prompt them."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    base: Speaker
    tuned: Speaker

    def speakers(self, who: Who) -> list[Speaker]:
        return {"base": [self.base], "tuned": [self.tuned], "both": [self.base, self.tuned]}[who]

    def reply(
        self, speaker: Speaker, text: str, *, max_new_tokens: int, temperature: float, streamer: Any = None
    ) -> str:
        """The speaker's answer to `text` after what was said before; both are remembered."""
        speaker.history.append({"role": "user", "content": text})
        try:
            prompt = self.encoder.prompt_ids(speaker.history)
        except BadRow as error:
            speaker.history.pop()
            raise FinetuneError(f"the chat template refuses this conversation: {error}") from error
        with answering(speaker.model), speaker.turn_off_adapter():
            said = answer(
                speaker.model,
                self.tokenizer,
                prompt,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                streamer=streamer,
            )
        speaker.history.append({"role": "assistant", "content": said})
        return said


def open_run(run_dir: Path) -> Parlour:
    """Load a finished run. Raises FinetuneError when the folder holds none."""
    resolved = run_dir / "recipe.yaml"
    if not resolved.is_file():
        raise FinetuneError(f"{run_dir}: no run is here (recipe.yaml is missing); name a run's output_dir")
    adapter, whole = run_dir / "adapter", run_dir / "model"
    if not adapter.is_dir() and not whole.is_dir():
        raise FinetuneError(
            f"{run_dir}: this run has not finished: neither adapter/ nor model/ is there; resume it first"
        )
    recipe = recipe_from_resolved(resolved)
    tokenizer = AutoTokenizer.from_pretrained(adapter if adapter.is_dir() else whole)
    loaded = _load(recipe, resolve_model_path(recipe.model.name_or_path))
    if adapter.is_dir():
        adapted = PeftModel.from_pretrained(loaded, str(adapter)).eval()
        base, tuned = Speaker("base", adapted, adapted.disable_adapter), Speaker("tuned", adapted, nullcontext)
    else:
        base, tuned = Speaker("base", loaded, nullcontext), Speaker("tuned", _load(recipe, str(whole)), nullcontext)
    return Parlour(recipe, tokenizer, Encoder(tokenizer, recipe.data), base, tuned)


def _load(recipe: Recipe, path: str) -> nn.Module:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path,
        revision=recipe.model.revision,
        dtype=getattr(torch, recipe.model.dtype),
        trust_remote_code=recipe.model.trust_remote_code,
        use_safetensors=True,
    )
    return model.to(device).eval()


def converse(
    parlour: Parlour,
    lines: Iterable[str],
    *,
    who: Who,
    max_new_tokens: int,
    temperature: float,
    say: Callable[[str], None],
) -> None:
    """Answer each line; `/base`, `/tuned`, `/both`, `/reset` and `/quit` are commands."""
    for text in map(str.strip, lines):
        command = text.removeprefix("/")
        if text == "/quit":
            return
        if text.startswith("/") and command in ("base", "tuned", "both"):
            who = command  # type: ignore[assignment]  # one of the three, by the line above
        elif text == "/reset":
            parlour.base.history.clear()
            parlour.tuned.history.clear()
        elif text.startswith("/"):
            say(HELP)
        elif text:
            for speaker in parlour.speakers(who):
                say(f"\n{speaker.name}:")
                streamer = TextStreamer(parlour.tokenizer, skip_prompt=True, skip_special_tokens=True)
                parlour.reply(speaker, text, max_new_tokens=max_new_tokens, temperature=temperature, streamer=streamer)


def answers_to(
    parlour: Parlour, prompts: Iterable[str], *, who: Who, max_new_tokens: int, temperature: float
) -> list[dict[str, str]]:
    """The answers of each speaker to each prompt, each a conversation of its own."""
    said = []
    for prompt in prompts:
        for speaker in parlour.speakers(who):
            speaker.history.clear()
            text = parlour.reply(speaker, prompt, max_new_tokens=max_new_tokens, temperature=temperature)
            said.append({"prompt": prompt, "who": speaker.name, "answer": text})
    return said


def typed_lines(prompt: str = "\nyou: ") -> Iterator[str]:
    """What the user types, until Ctrl-D."""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
