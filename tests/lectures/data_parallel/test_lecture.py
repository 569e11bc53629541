"""`python -m lectures data-parallel`: the played steps compute what one process does, and count bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finetune.errors import FinetuneError
from finetune.measure.live_tensors import LiveTensors
from lectures.__main__ import main
from lectures.data_parallel import four_steps, lecture
from lectures.data_parallel.four_steps import on_gpus, played
from lectures.data_parallel.lecture import data_parallel_lecture, master_bytes, ring_bytes
from lectures.data_parallel.training import (
    Clock,
    Job,
    Logits,
    Trained,
    next_token_loss,
    train_data_parallel,
)
from lectures.output import LectureRequest
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import tiny, write_recipe

VOCABULARY = 512


@pytest.fixture
def job(tiny_llama: Path) -> Job:
    return Job(tiny_llama, replicas=2, rows=4, tokens=8, steps=3)


def one_process(job: Job) -> list[float]:
    """The same steps by the plain model on the whole batch."""
    module = Logits(job.model)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    losses = []
    for step in range(job.steps):
        ids = job.ids(step, module.vocabulary)
        loss = next_token_loss(module(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("replicas", [2, 4])
def test_it_learns_what_one_process_learns(job: Job, replicas: int) -> None:
    threads = torch.get_num_threads()
    found = train_data_parallel(Job(job.model, replicas, job.rows, job.tokens, job.steps), gpus=False)
    assert found.losses == pytest.approx(one_process(job), rel=1e-6)
    assert len(set(found.losses)) == job.steps
    assert torch.get_num_threads() == threads


def test_what_is_sent_by_hand(job: Job) -> None:
    """Of four rows of 8 ids two go to the other replica, whose logits come back; and all weights, and gradients."""
    found = train_data_parallel(job, gpus=False)
    weights = sum(parameter.numel() for parameter in Logits(job.model).parameters()) * 4
    assert found.parameter_bytes == weights
    assert found.sent == {
        "scatter": 2 * 8 * 8,  # int64
        "replicate": weights,
        "gather": 2 * 8 * VOCABULARY * 4,
        "reduce": weights,
    }
    assert set(found.seconds) == {"scatter", "replicate", "forward", "gather", "loss", "backward", "step"}
    assert min(found.seconds.values()) > 0


def test_what_the_master_holds_by_hand() -> None:
    """A linear layer, whose activations can be counted: its inputs, its output, and all outputs when gathered."""
    module = nn.Linear(16, 32, bias=False)
    ledgers = [LiveTensors(module.parameters()), LiveTensors()]
    steps = played(module, 2, ledgers)
    rows = torch.ones(4, 16)
    replicas, parts = steps.replicate(), steps.scatter(rows)
    outputs = steps.forward(replicas, parts)
    weight, part, output = 4 * 16 * 32, 4 * 2 * 16, 4 * 2 * 32
    assert [ledger.live("cpu") for ledger in ledgers] == [weight + part + output] * 2
    gathered = steps.gather(outputs)
    del outputs
    assert [ledger.live("cpu") for ledger in ledgers] == [weight + part + 2 * output, weight + part]
    with steps.on_master():
        gathered.sum().backward()
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, rows.sum(0).expand(32, 16)), "summed over the replicas"


def test_the_master_holds_more(job: Job) -> None:
    found = train_data_parallel(job, gpus=False)
    assert found.memory["gather"][0] > 1.5 * found.memory["gather"][1]
    states = 3 * found.parameter_bytes  # weights and two moments; gradients are gone
    assert found.memory["step"][0] == pytest.approx(states, rel=0.05)
    assert found.memory["step"][1] == 0, "a replica lives for one step"


def test_on_gpus_torch_s_own_functions_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is here: that each of them is given what it takes, in their order, is all that can be seen."""
    module, calls = nn.Linear(3, 2), []

    def scatter(inputs: Any, devices: Any) -> Any:
        calls.append("scatter")
        return [(part,) for part in inputs[0].chunk(len(devices))]

    def replicate(network: nn.Module, devices: Any) -> list[nn.Module]:
        calls.append("replicate")
        return [network for _ in devices]

    def parallel_apply(modules: Any, inputs: Any, devices: Any = None) -> list[Tensor]:
        calls.append("apply")
        return [each(*given) for each, given in zip(modules, inputs, strict=True)]

    def gather(outputs: Any, target: int) -> Tensor:
        calls.append(f"gather to {target}")
        return torch.cat(outputs)

    for function in (scatter, replicate, parallel_apply, gather):
        monkeypatch.setattr(torch.nn.parallel, function.__name__, function)
    steps, rows = on_gpus(module, range(2)), torch.ones(4, 3)
    replicas = steps.replicate()
    outputs = steps.forward(replicas, steps.scatter(rows))
    assert torch.equal(steps.gather(outputs), module(rows))
    assert calls == ["replicate", "scatter", "apply", "gather to 0"]
    assert set(replicas[1].weights) == {"weight", "bias"}
    assert four_steps.bytes_of(list(replicas[1].weights.values())) == 4 * 8


def test_on_a_gpu_each_part_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in ("cuda", "cpu"):
        with Clock(torch.device(device))("forward"):
            pass
    assert waited == [torch.device("cuda")] * 2


def test_bytes_at_full_size() -> None:
    assert master_bytes(100, 8) == 2 * 7 * 100
    assert ring_bytes(100, 8) == 2 * 2 * 7 / 8 * 100
    assert master_bytes(100, 8) / ring_bytes(100, 8) == 4


def figures(scale: float) -> Trained:
    parts = ("scatter", "replicate", "forward", "gather", "loss", "backward", "step")
    seconds = {part: scale * (number + 1) / 1000 for number, part in enumerate(parts)}
    memory = {part: [int(4 * scale * 2**20), int(scale * 2**20)] for part in ("forward", "gather", "loss", "step")}
    sent = {"scatter": 1, "replicate": 2**20, "gather": 2**19, "reduce": 2**20}
    return Trained([2.0, 1.0], seconds, sent, memory, 2**20)


@pytest.fixture
def recipe(tiny_llama: Path, tmp_path: Path) -> Path:
    return write_recipe(tmp_path, tiny(tiny_llama, write_chats(tmp_path / "chats.jsonl", [20, 30]), lora=None))


def asked(recipe: Path, folder: Path, **settings: str) -> LectureRequest:
    given = {"replicas": "2", "rows": "4", "tokens": "8", "steps": "3"} | settings
    return LectureRequest(recipe, (), given, folder, lambda _: None)


def test_tables_and_sentences(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = figures(0.5)
    ranks.sent = {"all_reduce": 2**21}
    ranks.losses = [2.0, 1.01]
    monkeypatch.setattr(lecture, "train_data_parallel", lambda *_, **__: figures(1.0))
    monkeypatch.setattr(lecture, "train_ddp", lambda *_, **__: ranks)
    result = data_parallel_lecture(asked(recipe, tmp_path))
    text = " ".join(result.text().split())
    assert "DataParallel 1.00 2.00 3.00 4.00 5.00 6.00 7.00 28.00" in text
    assert "DataParallel's master 0.000 1.000 0.500 1.000 - 2.500 2.50" in text
    assert "DDP, each rank - - - - 2.000 2.000 2.00" in text
    assert "Scatter, replicate and gather take 25.0% of DataParallel's step" in text
    assert "the other GPUs are 75% emptier" in text
    assert "losses of 3 steps differ by 9.9e-03 at most" in text
    assert max(map(len, result.text().splitlines())) <= 120
    result.draw(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rows": "5"}, "rows: 5: do not divide among 2 replicas; write rows=8"),
        ({"replicas": "1"}, "replicas: 1: is not a whole number from 2 on"),
        ({"steps": "many"}, "steps: many: is not a whole number"),
    ],
)
def test_a_wrong_setting_is_a_line(settings: dict[str, str], words: str, recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(FinetuneError) as caught:
        data_parallel_lecture(asked(recipe, tmp_path, **settings))
    assert words in str(caught.value)


@pytest.mark.slow
def test_the_whole_lecture(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, words = tmp_path / "held", ["rows=4", "tokens=16", "steps=4"]
    assert main(["data-parallel", str(recipe), *words, "-o", str(folder), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["worst_loss_difference"] < 1e-5, "DDP learns from the same rows"
    weights = facts["ddp"]["parameter_bytes"]
    assert facts["data_parallel"]["parameter_bytes"] == weights
    assert facts["ddp"]["sent"]["all_reduce"] == pytest.approx(ring_bytes(weights, 2), rel=1e-3)
    assert facts["data_parallel"]["memory"]["gather"][0] > facts["ddp"]["memory"]["forward"][0]
    assert (folder / "data-parallel.png").is_file()
