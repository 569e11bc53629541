"""Whether a base model's tokenizer has a chat template, before the tokenizer is loaded."""

from __future__ import annotations

import re
from itertools import islice

from finetune.base.location import in_hub_cache, tokenizer_file
from finetune.data.chat import Chat, documents_in
from finetune.data.rows import RowReader
from finetune.data.sources import resolve
from finetune.errors import DataError, FinetuneError
from finetune.recipe.schema import Data, DataSet, Recipe
from finetune.untrusted.json_files import read_object

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
ROWS_LOOKED_AT = 20
# Names of models that were tuned for chats, as their makers write them. A base model's name has none of these words.
TUNED = re.compile(r"instruct|chat|think|-it\b|gpt-oss|phi-4|smollm3-3b$|/glm-4-|/qwen3(\.5)?-[^/]*b$", re.IGNORECASE)
# Roles in words, and the tokenizer's own end. It needs no new tokens, so it fits every base model.
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}"
    "{{ eos_token if message.role == 'assistant' }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
NAME_A_TEMPLATE = "name one (Jinja text or a file), or take the model's tuned variant (often -Instruct or -it)"


def has_template(name: str, revision: str = "main") -> bool | None:
    """Whether the tokenizer on this machine has a chat template; None if it is not on this machine."""
    tokenizer = tokenizer_file(name, revision)
    if tokenizer is None:
        return None
    settings = tokenizer.parent / "tokenizer_config.json"
    if any((tokenizer.parent / file).exists() or in_hub_cache(name, file, revision) for file in TEMPLATE_FILES):
        return True
    try:
        return settings.is_file() and bool(read_object(settings).get("chat_template"))
    except FinetuneError:  # loading it says what is wrong
        return None


def is_tuned_for_chats(name: str) -> bool:
    """Whether the model has a chat template: by its tokenizer where it is on this machine, else by its name."""
    has_own = has_template(name)
    return bool(TUNED.search(name)) if has_own is None else has_own


def template_note(recipe: Recipe) -> str:
    """A line if rows are chats and nobody here knows whether the tokenizer has a template for them; else empty.

    Raises DataError if it has none: training would refuse these rows.
    """
    model, data = recipe.model, recipe.data
    if data.chat_template or not any(map(_may_be_chats, data.sets)):
        return ""
    has_own = has_template(model.name_or_path, model.revision)
    if has_own is False:
        raise DataError(
            [f"data.chat_template: the tokenizer of {model.name_or_path} has no chat template; {NAME_A_TEMPLATE}"]
        )
    if has_own or TUNED.search(model.name_or_path):
        return ""
    return (
        f"data.chat_template: the tokenizer of {model.name_or_path} is not on this machine, and this name is not that "
        "of a model for chats: without a template of its own, training refuses rows of chats. Look at its page, or "
        f"{NAME_A_TEMPLATE}"
    )


def _may_be_chats(entry: DataSet) -> bool:
    """Whether rows are rendered by a template. Rows on the Hub count as chats unless the recipe says otherwise."""
    source = resolve(entry)
    if entry.format in ("text", "prompt_completion"):
        return False
    if source.kind == "hub":
        return True
    read = [row.read for row in islice(RowReader(source).rows(), ROWS_LOOKED_AT) if row.read is not None]
    return any(isinstance(document, Chat) for content in read for document in documents_in(content))


def with_template(data: Data, model: str) -> Data:
    """The data with a plain template, if the model has none of its own."""
    return data if is_tuned_for_chats(model) else data.model_copy(update={"chat_template": PLAIN_TEMPLATE})
