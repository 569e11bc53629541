"""Chat templates that other tools call by a name, and bring along, where the tokenizer has another one or none."""

from __future__ import annotations

_LLAMA3_TURN = "<|start_header_id|>{role}<|end_header_id|>\n\n"
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)


def _each(turn: str, after: str, before: str = "{{ bos_token }}") -> str:
    turns = "{% for message in messages %}" + turn + "{% endfor %}"
    return before + turns + "{% if add_generation_prompt %}" + after + "{% endif %}"


def _llama3(user: str) -> str:
    """Llama 3's turns; `user` is the content of a user's."""
    head = _LLAMA3_TURN.replace("{role}", "{{ message['role'] }}")
    words = f"{{% if message['role'] == 'user' %}}{user}{{% else %}}{{{{ message['content'] | trim }}}}{{% endif %}}"
    plain = "{{ message['content'] | trim }}"
    return _each(head + (plain if user == plain else words) + "<|eot_id|>", _LLAMA3_TURN.replace("{role}", "assistant"))


def _alpaca(opening: str, end: str) -> str:
    return _each(
        "{% if message['role'] == 'user' %}" + opening + "### Instruction:\n{{ message['content'] }}\n\n### Response:\n"
        "{% elif message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}" + end + "{% else %}"
        "{{ message['content'] }}\n\n{% endif %}",
        "",
    )


TEMPLATES = {
    "llama3": _llama3("{{ message['content'] | trim }}"),
    # torchtune's: Alpaca's words inside of Llama 3's turns.
    "llama3_alpaca": _llama3(_ALPACA + "### Instruction:\n{{ message['content'] }}\n\n### Response:"),
    "chatml": _each(
        "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n", "<|im_start|>assistant\n", before=""
    ),
    "alpaca": _alpaca(_ALPACA, ""),
    # LLaMA-Factory says the opening once, as a system prompt.
    "alpaca_turns": _alpaca("{% if loop.first %}" + _ALPACA + "{% endif %}", "\n\n"),
}
