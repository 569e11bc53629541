"""Documents as a test reads them: the settings that make them, and their text with what is learned in ⟦ ⟧."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from finetune.recipe.schema import Data
from finetune.tokens.encoder import IGNORE, Document


def data_section(**settings: Any) -> Data:
    return Data.model_validate({"train": [{"path": "json", "data_files": "x.jsonl"}], **settings})


def shown(document: Document, tokenizer: PreTrainedTokenizerFast) -> str:
    """The document's text; what is learned stands in ⟦ ⟧."""
    text, run, inside = "", [], False
    for token, label in zip(document.input_ids, document.labels, strict=True):
        assert label in (token, IGNORE)
        if (label != IGNORE) != inside:
            inside = not inside
            text += tokenizer.decode(run) + ("⟦" if inside else "⟧")
            run = []
        run.append(token)
    return text + tokenizer.decode(run) + ("⟧" if inside else "")
