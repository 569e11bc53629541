"""Ranks that see other files than rank 0, or none: they build what rank 0 builds, or all of them refuse."""

from __future__ import annotations

import multiprocessing
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from finetune.errors import FinetuneError
from finetune.model.build import structure_alone
from finetune.strategies.assemble import agree_on_structure
from tests.support.models.ties import Change, changed_base, equal_ones
from tests.support.runs.recipes import least_recipe


def rank_of_two(rank: int, port: int, bases: list[Path], said: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found: list[bool | str] = []
    for base in bases:
        recipe = least_recipe(base)
        try:
            agree_on_structure(recipe)
            found.append(bool(structure_alone(recipe).config.tie_word_embeddings))
        except FinetuneError as error:
            found.append(str(error))
    said.put((rank, found))
    dist.destroy_process_group()


def two_ranks(pairs: list[tuple[Path, Path]]) -> list[tuple[Any, Any]]:
    """What ranks 0 and 1, each with a base of a pair, built, or their refusals."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    said: Any = context.Queue()
    ranks = [
        context.Process(target=rank_of_two, args=(rank, port, list(bases), said))
        for rank, bases in enumerate(zip(*pairs, strict=True))
    ]
    for each in ranks:
        each.start()
    found = dict(said.get(timeout=300) for _ in ranks)
    for each in ranks:
        each.join(60)
        assert each.exitcode == 0
    return list(zip(found[0], found[1], strict=True))


def cut(base: Path) -> Path:
    """The weights without their end."""
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return base


def one_more(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.bias"] = torch.ones(64)


@pytest.mark.slow
def test_rank_0_decides(tmp_path: Path) -> None:
    def base(name: str, change: Change = bool) -> Path:
        return changed_base(tmp_path / name, tied=True, change=change)

    without = base("without")
    (without / "model.safetensors").unlink()  # as on a machine that has not fetched them
    cases = {
        "no files": ((base("a"), without), False),
        "one more": ((base("b"), base("c", one_more)), "1 unexpected keys, first model.norm.bias; .* (on rank 1)"),
        "other ties": ((base("d"), base("e", equal_ones)), "other tensors than those that rank 0 sees; .* (on rank 1)"),
        "cut": ((base("f"), cut(base("g"))), "it is not a whole safetensors file.* (on rank 1)"),
        "cut on rank 0": ((cut(base("h")), base("i")), "it is not a whole safetensors file"),
    }
    found = two_ranks([pair for pair, _ in cases.values()])
    for (name, (_, expected)), (first, second) in zip(cases.items(), found, strict=True):
        assert first == second, name
        if isinstance(expected, str):
            assert re.search(expected.replace("(", r"\(").replace(")", r"\)"), first), (name, first)
            assert ("on rank" in first) == ("on rank" in expected)
        else:
            assert first is expected, name
