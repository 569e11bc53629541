"""`finetune WORDS` as a rank. FULL="1 3": rank 1 has no memory for attention over more than 3 rows."""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import torch

from finetune.cli.main import main
from finetune.generation import generate

FULL = "FULL"


def run(words: list[str]) -> int:
    genuine, (rank, rows) = torch.nn.functional.scaled_dot_product_attention, os.environ[FULL].split()

    def attend(query: Any, *arguments: Any, **options: Any) -> Any:
        if os.environ["RANK"] == rank and query.shape[0] > int(rows):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return genuine(query, *arguments, **options)

    with (
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend),
        mock.patch.object(generate, "FIRST_ROUND", 3),
    ):
        return main(words)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
