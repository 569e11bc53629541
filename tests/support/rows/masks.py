"""Documents as a test reads them: the settings that make them, and their text with what is learned in ⟦ ⟧."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from finetune.data.chat import read_row
from finetune.data.layout import layout_of
from finetune.recipe.schema import Data, DataSet, RowFormat
from finetune.tokens.encoder import IGNORE, Document, Encoder


def data_section(**settings: Any) -> Data:
    return Data.model_validate({"train": [{"path": "json", "data_files": "x.jsonl"}], **settings})


def encoded(encoder: Encoder, row: dict[str, Any], format: RowFormat = "auto") -> Document:
    """The document of one row of a data set. Raises RowError."""
    return encoder.document(read_row(row, layout_of(DataSet(path="json", format=format), [row])))


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
