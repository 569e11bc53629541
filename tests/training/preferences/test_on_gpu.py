"""Six steps on a GPU beside the same six on its host, in float32."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs.preferences import lines_of, preference_recipe, write_base

ROOT = Path(__file__).resolve().parents[3]
ADAPTERS = {"lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {"dpo": {"sft_weight": 0.3}}),
    "dpo, lora": ("dpo", ADAPTERS),
    "simpo": ("dpo", {"dpo": {"loss_type": "simpo", "beta": 2.0}}),
    "kto": ("kto", {}),
    "kto, lora": ("kto", ADAPTERS),
}
# One H100, torch 2.11: losses 7e-7 apart, norms 2e-6.
BOUND = 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", KINDS)
def test_six_steps(name: str, tmp_path: Path) -> None:
    kind, settings = KINDS[name]
    base = write_base(tmp_path / "base")
    curves = []
    for device, hidden in (("cpu", {"CUDA_VISIBLE_DEVICES": ""}), ("gpu", {})):
        recipe = preference_recipe(tmp_path / device, base, kind, settings)
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | hidden
        subprocess.run([sys.executable, str(ROOT / "finetune" / "train.py"), str(recipe)], env=environment, check=True)
        curves.append(lines_of(tmp_path / device / "run"))
    for on_cpu, on_gpu in zip(*curves, strict=True):
        for figure in ("loss", "grad_norm", "logps_chosen"):
            assert on_gpu[figure] == pytest.approx(on_cpu[figure], rel=BOUND), figure
