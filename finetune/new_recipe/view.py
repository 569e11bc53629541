"""Terminal output for `finetune init`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from finetune.data.chat import Judged, Pair, Passage, documents_in
from finetune.new_recipe.hardware import EMBEDDED, ONLINE_SMOLLM
from finetune.new_recipe.proposal import Proposal
from finetune.output_stream import without_controls
from finetune.wording import as_word, counted

LONGEST_SHOWN = 300  # of one text
ROLE_COLOURS = {"user": "cyan", "system": "magenta", "tool": "yellow", "assistant": "green"}


def print_proposal(proposal: Proposal, console: Console) -> None:
    """Print the findings, some rows as the model will see them, and the next commands."""
    for line in proposal.lines:
        console.print(line, markup=False, highlight=False)
    colours = "green: preferred; red: not"
    if proposal.reading.objective == "supervised":
        colours = "green: learned"
    console.print(f"\n{len(proposal.examples)} rows as the model will see them ({colours})", style="bold")
    for example in proposal.examples:
        # A pair shows its prompt once, then both answers.
        for number, document in enumerate(documents_in(example)):
            if isinstance(document, Passage):
                turns = [("text", document.completion, True)]
                if document.prompt:
                    turns.insert(0, ("prompt", document.prompt, False))
            else:
                turns = [
                    (message["role"], _words(message), supervised)
                    for message, supervised in zip(document.messages, document.supervised, strict=True)
                ]
            if number:
                # The rejected answer: its prompt is on the screen already.
                first_supervised = next(index for index, (_, _, supervised) in enumerate(turns) if supervised)
                turns = turns[first_supervised:]
            name, colour = "", "green"  # of the answer
            match example:
                case Pair():
                    name, colour = (("chosen", "green"), ("rejected", "red"))[number]
                case Judged(desirable=True):
                    name = "wanted"
                case Judged():
                    name, colour = "unwanted", "red"
            for role, content, supervised in turns:
                text = without_controls(content)
                if len(text) > LONGEST_SHOWN:
                    text = text[:LONGEST_SHOWN] + " ..."
                style = ROLE_COLOURS.get(role, "")
                if supervised:
                    role, style = name or role, colour
                turn = Text(f"  {role:<10} ", style="dim")
                turn.append(text.replace("\n", "\n" + " " * 13), style=style)
                console.print(turn, soft_wrap=False)
        console.print()
    choice, settings = proposal.choice, proposal.settings
    needs = f", {choice.memory}" * bool(choice.memory)
    steps = f"about {counted(settings.steps, 'step')}, " * bool(settings.steps)
    method = "QLoRA" if choice.method == "qlora" else "LoRA"
    console.print(
        f"{choice.model} by {method} on {choice.place}{needs}; {steps}"
        f"{counted(round(settings.held_out * proposal.counts.rows), 'row')} held out",
        markup=False,
        highlight=False,
    )
    if choice.gpus is None and choice.model in (EMBEDDED, ONLINE_SMOLLM):
        note = "this model is small and mostly English: a first look. With --gpus 1x24GB, init chooses Qwen3-8B"
        console.print(note, style="dim", highlight=False)
    run, file = as_word(f"runs/{proposal.file.stem}"), as_word(proposal.file)
    console.print(f"\nwrote {proposal.file}; next:", style="bold", markup=False, highlight=False)
    commands = {
        f"finetune preview {file}": "every supervised token in colour",
        f"finetune train {file}": "curves and answers come with it",
        f"finetune chat {run}": "base and tuned, side by side",
    }
    width = max(map(len, commands))
    for command, why in commands.items():
        console.print(f"  {command:<{width}}  # {why}", markup=False, highlight=False, soft_wrap=True)


def _words(message: Mapping[str, Any]) -> str:
    """A message's thought, text and tool calls, as far as it has them."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    said = [f"calls {call.get('name')}({call.get('arguments', '')})" for call in calls]
    texts = [message.get("reasoning_content"), message.get("content"), *said]
    return "  ".join(str(text) for text in texts if text)
