"""Exports of a base that was published with transformers 4, read by transformers 4: settings, tokens and logits.

It needs an environment of its own, whose interpreter FINETUNE_TRANSFORMERS4_PYTHON names:

    python3 -m venv tf4 && tf4/bin/pip install transformers==4.57.6 'torch<2.14'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.hand_over.engines import hand_over
from finetune.hand_over.merge import merge_run
from tests.support.models.earlier_release import BASES, save_published
from tests.support.runs.finished import finished_run

pytestmark = pytest.mark.slow
PYTHON = os.environ.get("FINETUNE_TRANSFORMERS4_PYTHON", "")
needs_transformers_4 = pytest.mark.skipif(
    not PYTHON, reason="FINETUNE_TRANSFORMERS4_PYTHON names no interpreter that has transformers 4.57"
)
TEXTS = [
    "a river carries 1234 boats",
    "<|im_start|>user\nit's (what)?<|im_end|>\n",
    "Über  zwei\n\n\tZeilen!",
    "<date> x",
]
READ = """
import json, sys, torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
torch.manual_seed(0)
job, said = json.loads(sys.argv[1]), {}
for name, folder in job["folders"].items():
    tokenizer = AutoTokenizer.from_pretrained(folder)
    facts = said[name] = {
        "ids": [tokenizer(text).input_ids for text in job["texts"]],
        "special": sorted(tokenizer.all_special_tokens),
        "more": getattr(tokenizer, "additional_special_tokens", None),
        "decoded": tokenizer.decode([2, 40, 41, 1], skip_special_tokens=True),
        "template": tokenizer.chat_template,
        "length": tokenizer.model_max_length,
    }
    if "adapter" not in name:
        config = AutoConfig.from_pretrained(folder)
        facts["config"] = config.to_dict()
        facts["generation"] = GenerationConfig.from_pretrained(folder).to_dict()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").float().eval()
        with torch.no_grad():
            logits = model(torch.arange(3, 123)[None]).logits
        save_file({"logits": logits.contiguous()}, job["out"] + "/" + name + ".safetensors")
print("SAID" + json.dumps(said))
"""


def read_by(python: str, folders: dict[str, Path], out: Path) -> dict[str, Any]:
    """Settings, tokens and logits of each folder, by that interpreter's transformers."""
    out.mkdir()
    job = {"folders": {name: str(folder) for name, folder in folders.items()}, "texts": TEXTS, "out": str(out)}
    process = subprocess.run([python, "-c", READ, json.dumps(job)], capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr[-3000:]
    said: dict[str, Any] = json.loads(process.stdout.rpartition("SAID")[2])
    for file in out.iterdir():
        said[file.stem]["logits"] = load_file(file)["logits"]
    return said


def runs_of(folder: Path, base: Path, **sections: Any) -> dict[str, Path]:
    """Every product over this base: adapter, merged, all weights, and what is handed over."""
    lora = finished_run(folder / "lora", base, **{"lora": {"r": 4}, **sections})
    full = finished_run(folder / "full", base, **{**sections, "lora": None})
    merge_run(lora, dtype=None, base=None, prompts=0, say=print)
    served = hand_over(full, "transformers", None, print)["folder"]
    adapter = hand_over(lora, "peft", None, print)["folder"]
    return {
        "base": base,
        "adapter": lora / "adapter",
        "served adapter": Path(adapter),
        "merged": lora / "merged",
        "full": full / "model",
        "served": Path(served),
    }


@needs_transformers_4
@pytest.mark.parametrize("name", BASES)
def test_both_releases_read_an_export_as_they_read_its_base(name: str, tmp_path: Path) -> None:
    """Logits: the two releases agree on the base, and as closely on each export."""
    base = save_published(tmp_path / "base", name)
    folders = runs_of(tmp_path, base, model={"attention": "eager"}, data={"packing": False})
    by_4 = read_by(PYTHON, folders, tmp_path / "by4")
    by_5 = read_by(sys.executable, folders, tmp_path / "by5")
    for said in (by_4, by_5):
        for product in folders:
            for key in ("ids", "special", "more", "decoded", "template", "length"):
                assert said[product][key] == said["base"][key], (product, key)
            for key in ("config", "generation"):
                read, expected = said[product].get(key, {}), said["base"][key]
                wrong = {each for each in read if read[each] != expected.get(each)} - {"_name_or_path"}
                assert not wrong, (product, {each: (read[each], expected.get(each)) for each in wrong})
    for product in ("base", "merged", "full", "served"):
        torch.testing.assert_close(by_4[product]["logits"], by_5[product]["logits"], rtol=1e-3, atol=2e-4)
    assert (by_4["full"]["logits"] - by_4["base"]["logits"]).abs().max() > 0.1
