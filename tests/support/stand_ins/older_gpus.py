"""GPUs that this machine seems to have, by their compute capability, and a launch of one process on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.runs import launching

ALONE = replace(launching.ALONE, words=("python",))


def seeming_gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The compute capability of each GPU that this machine seems to have; to be filled."""
    result: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(result))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: result[torch.device(device).index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Card {torch.device(device).index}")
    return result
