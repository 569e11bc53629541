"""FlashAttention 3 and 4 on a machine without a GPU: packages that are found, and what torch's switch turns on.

The switch has no effect on a CPU. So what it turns on here changes what the stand-in for torch's own kernel computes,
by a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.nn.attention import _registry, register_flash_attention_impl

from tests.support.stand_ins.varlen_stand_in import COMPUTED_BY, FACTORS

FILES = {"FA3": "flash_attn_interface.py", "FA4": "flash_attn/cute/interface.py"}


@dataclass
class Installed:
    """An implementation that torch's switch knows, which calls it, and calls `remove` of what that returns."""

    output: float = 1.005  # factors of its results, to be rounded to 16 bits
    gradients: float = 1.0
    raises: str = ""

    def __call__(self) -> Installed:
        if self.raises:
            raise ImportError(self.raises)
        FACTORS.update(output=self.output, gradients=self.gradients)
        return self

    def remove(self) -> None:
        FACTORS.update(output=1.0, gradients=1.0)


def install(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Put the implementation `name` of torch's switch on the import path, and make it known to torch."""
    file = folder / FILES[name]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("raise AssertionError('imported before torch asks for it')\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(_registry._FLASH_ATTENTION_IMPLS))
    register_flash_attention_impl(name, register_fn=Installed(**options))
    COMPUTED_BY.clear()
