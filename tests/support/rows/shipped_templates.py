"""The chat templates that TRL ships, and facts about the models that use them.

The facts are written by hand, from the models' own generation settings: on which token each stops, and in which form
its template wants arguments, contents and reasoning.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from tests.support.rows.rendered_reference import Family

_CONTROL = re.compile(
    r"<\|[A-Za-z_0-9.]+\|>|<｜[^｜<>]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|<(?:start|end)_of_(?:turn|utterance)>|</s>"
    r"|\[gMASK\]|<sop>|<image>"
)
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


@cache
def shipped() -> dict[str, Family]:
    """By name; empty where TRL is not installed, or ships none. A template for training is left out: it is another
    template's with marks."""
    found = importlib.util.find_spec("trl")
    folder = Path(found.origin).parent / "chat_templates" if found and found.origin else Path("none")
    files = sorted(file for file in folder.glob("*.jinja") if not file.stem.endswith("_training"))
    return {file.stem: _family(file.stem, _TODAY.sub("'2024-07-26'", file.read_text("utf-8"))) for file in files}


def _family(name: str, template: str) -> Family:
    words, calls = STOPS[max((known for known in STOPS if name.startswith(known)), key=len)]
    eos = "<|endoftext|>" if words is None or name.startswith("phi3") else words
    return Family(
        template,
        control=tuple(dict.fromkeys(["<s>", eos, *_CONTROL.findall(template)])),
        eos=eos,
        stops=(words, calls),
        parts=name in ("idefics3", "smolvlm", "llava_next"),
        text_arguments=name.startswith("deepseek"),
        null_content=name == "deepseek_r1_distill",
        thinking_key=name.startswith(("gptoss", "lfm2_2_5")),
        one_call=name.startswith(("gptoss", "llama3")),
    )
