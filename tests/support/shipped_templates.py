"""The chat templates that TRL ships, each with a tokenizer made of its control tokens, and facts about each model.

The facts are written by hand, from the models' own generation settings: on which token each stops, and in which form its
template wants arguments, contents and reasoning.
"""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.support.chat_families import byte_level_tokenizer

_CONTROL = re.compile(
    r"<\|[A-Za-z_0-9.]+\|>|<｜[^｜<>]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|<(?:start|end)_of_(?:turn|utterance)>|</s>"
    r"|\[gMASK\]|<sop>|<image>"
)
WORDS_THAT_SOME_MAKE_CONTROL_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_TODAY = re.compile(r"""strftime_now\(["']%Y-%m-%d["']\)""")
# template (by the beginning of its name) -> the token that ends an answer in words, and one with calls
STOPS: dict[str, tuple[str | None, str | None]] = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",) * 2,
    "deepseek": ("<｜end▁of▁sentence｜>",) * 2,
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma4_v2": ("<turn|>",) * 2,
    "gemma": ("<end_of_turn>",) * 2,
    "glm4moe": (None, None),  # the model ends its turn with the next one's header, which a chat's end does not have
    "gptoss": ("<|return|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>",) * 2,
    "smolvlm": ("<end_of_utterance>",) * 2,
    "lfm2": ("<|im_end|>",) * 2,
    "llama3": ("<|eot_id|>",) * 2,
    "llava_next": ("</s>",) * 2,
    "muse_glimmer": ("<|eot|>",) * 2,
    "nemotron": ("<|im_end|>",) * 2,
    "phi3": ("<|end|>",) * 2,
    "qwen": ("<|im_end|>",) * 2,
}
PARTS = ("idefics3", "smolvlm", "llava_next")  # contents are lists of parts
TEXT_ARGUMENTS = ("deepseekv3", "deepseek_r1_distill")
NULL_CONTENT = ("deepseek_r1_distill",)  # beside calls
THINKING_KEY = ("gptoss", "lfm2_2_5")  # "thinking"; the others read "reasoning_content"


@cache
def shipped() -> dict[str, str]:
    """Name -> text of each template; empty where TRL is not installed, or ships none."""
    found = importlib.util.find_spec("trl")
    folder = Path(found.origin).parent / "chat_templates" if found and found.origin else Path("none")
    files = sorted(file for file in folder.glob("*.jinja") if not file.stem.endswith("_training"))
    return {file.stem: _TODAY.sub("'2024-07-26'", file.read_text("utf-8")) for file in files}


def stops(name: str) -> tuple[str | None, str | None]:
    return STOPS[max((known for known in STOPS if name.startswith(known)), key=len)]


@cache
def shipped_tokenizer(name: str, *, more_control_tokens: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer; with `more_control_tokens` the words around thoughts and calls are control tokens too."""
    template = shipped()[name]
    eos = stops(name)[0] or "<|endoftext|>"
    if name.startswith("phi3"):
        eos = "<|endoftext|>"
    control = dict.fromkeys(["<s>", eos, *_CONTROL.findall(template)])
    if more_control_tokens:
        control |= dict.fromkeys(word for word in WORDS_THAT_SOME_MAKE_CONTROL_TOKENS if word in template)
    bos = "<s>" if "bos_token" in template else None
    return byte_level_tokenizer(template, tuple(control), bos, eos)


def as_wanted(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row's messages as somebody who knows the template gives them to the library."""
    result = []
    for message in messages:
        message = dict(message)
        if "reasoning_content" in message and name.startswith(THINKING_KEY):
            message["thinking"] = message.pop("reasoning_content")
        calls = message.get("tool_calls")
        if calls:
            message["tool_calls"] = [
                call | {"function": call["function"] | {
                    "arguments": call["function"]["arguments"]
                    if name in TEXT_ARGUMENTS else json.loads(call["function"]["arguments"])
                }}
                for call in calls
            ]  # fmt: skip
        if calls and not message["content"]:
            message["content"] = None if name in NULL_CONTENT else ""
        elif name in PARTS:
            message["content"] = [{"type": "text", "text": message["content"]}]
        result.append(message)
    return result
