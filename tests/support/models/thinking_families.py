"""Short chat templates that treat reasoning and tools as the vendors' do, and a tiny tokenizer for each.

Written for these tests; the comment above each says which of its family's habits it has.
"""

from __future__ import annotations

from functools import cache

from transformers import PreTrainedTokenizerFast

from tests.support.models.chat_families import byte_level_tokenizer

# Which message asked last; tool answers, which Qwen writes into a user turn, do not count.
_LAST_QUESTION = """
{%- set asked = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}
"""
_CHATML_TOOLS = """
{%- if messages[0].role == 'system' or tools %}
  {{- '<|im_start|>system' }}
  {%- if messages[0].role == 'system' %}{{ '\n' + messages[0].content }}{% endif %}
  {%- for tool in tools or [] %}{{ '\n<tool>' + tool | tojson + '</tool>' }}{% endfor %}
  {{- '<|im_end|>\n' }}
{%- endif %}
"""
_CHATML_OTHERS = """
  {%- elif m.role == 'tool' %}
    {%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
  {%- elif m.role != 'system' or not loop.first %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- endif %}
"""
_CHATML_ANSWER = """
    {%- set thought = m.reasoning_content or '' %}{% set said = m.content %}
    {%- if not m.reasoning_content is string and '</think>' in said %}
      {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
      {%- set said = said.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > asked.last and BLOCK %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}
    {{- said }}
    {%- for call in m.tool_calls or [] %}
      {{- '\n' if said or not loop.first else '' }}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
      {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
"""
_EMPTY_IF_OFF = """
  {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
"""
# Qwen 3: reasoning before the last question is dropped; after it, an answer has a block if it has reasoning or is the
# last; the prompt holds the empty block with enable_thinking false, and nothing of it else.
QWEN3 = (
    _LAST_QUESTION
    + _CHATML_TOOLS
    + "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    + _CHATML_ANSWER.replace("BLOCK", "(loop.last or thought)")
    + _CHATML_OTHERS
    + "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    + _EMPTY_IF_OFF
    + "{%- endif %}"
)
# Qwen 3.5 and 3.6: each answer after the last question has a block; the prompt opens it, or holds it empty.
QWEN35 = (
    _LAST_QUESTION
    + _CHATML_TOOLS
    + "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    + _CHATML_ANSWER.replace("BLOCK", "true")
    + _CHATML_OTHERS
    + "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    + _EMPTY_IF_OFF.replace("{% endif %}", "{% else %}{{ '<think>\n' }}{% endif %}")
    + "{%- endif %}"
)
# SmolLM3: every chat begins with a system block that names the mode, which the variable or the system turn sets;
# reasoning is part of the content and stays in earlier turns; without it every answer follows an empty block.
SMOLLM3 = """
{%- set mode = '/no_think' if enable_thinking is defined and not enable_thinking else '/think' %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if '/no_think' in system %}{% set mode = '/no_think' %}
{%- elif '/think' in system %}{% set mode = '/think' %}{% endif %}
{{- '<|im_start|>system\n## Metadata\n\nToday Date: ' + strftime_now('%d %B %Y') }}
{{- '\nReasoning Mode: ' + mode + '\n\n' }}
{{- system.replace('/no_think', '').replace('/think', '').rstrip() + '\n\n<|im_end|>\n' }}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' + ('<think>\n\n</think>\n' if mode == '/no_think' else '') }}
    {%- generation %}{{ m.content.lstrip('\n') + '<|im_end|>\n' }}{%- endgeneration %}
  {%- elif m.role != 'system' %}
    {{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' + m.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' + ('<think>\n\n</think>\n' if mode == '/no_think' else '') }}
{%- endif %}
"""
# DeepSeek-R1's distillates: the prompt opens a block, and a finished answer has none: what stands before </think> goes.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
# gpt-oss: channels; only the last answer has its analysis and <|return|>, an earlier one ends in <|end|>; the analysis
# before a tool call is dropped once a final answer follows; the call's name comes again in the header of its answer.
GPT_OSS = """
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') }}
{{- '\n\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- set turns = messages %}{% set note = '' %}
{%- if messages[0].role in ('system', 'developer') %}
  {%- set note = messages[0].content %}{% set turns = messages[1:] %}
{%- endif %}
{%- if note or tools %}
  {{- '<|start|>developer<|message|>' + note }}
  {%- for tool in tools or [] %}{{ '\ntype ' + tool.function.name + ' = () => any;' }}{% endfor %}
  {{- '<|end|>' }}
{%- endif %}
{%- set called = namespace(name='') %}
{%- for m in turns %}
  {%- set answered = namespace(later=false) %}
  {%- for n in turns[loop.index:] %}
    {%- if n.role == 'assistant' and not n.tool_calls %}{% set answered.later = true %}{% endif %}
  {%- endfor %}
  {%- if m.role == 'assistant' and m.tool_calls %}
    {%- set aside = m.content or m.thinking %}
    {%- if aside and not answered.later %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + aside + '<|end|>' }}
    {%- endif %}
    {%- set call = m.tool_calls[0].function %}{% set called.name = call.name %}
    {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
    {{- call.arguments | tojson + '<|call|>' }}
  {%- elif m.role == 'assistant' %}
    {%- set is_last = loop.last and not add_generation_prompt %}
    {%- if is_last and 'thinking' in m %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
    {%- endif %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if is_last else '<|end|>') }}
  {%- elif m.role == 'tool' %}
    {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson }}
    {{- '<|end|>' }}
  {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_R1 = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_HARMONY = ("<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
# family -> template, control tokens, BOS, EOS
THINKING: dict[str, tuple[str, tuple[str, ...], str | None, str]] = {
    "qwen3": (QWEN3, _CHATML, None, "<|im_end|>"),
    "qwen35": (QWEN35, _CHATML, None, "<|im_end|>"),
    "smollm3": (SMOLLM3, _CHATML, None, "<|im_end|>"),
    "r1": (R1, _R1, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "gpt_oss": (GPT_OSS, _HARMONY, None, "<|return|>"),
}


@cache
def thinking_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the family's control tokens and template."""
    return byte_level_tokenizer(*THINKING[family])
