"""Proofs of GPUs: which there are, what a proof notices, and all of one GPU on a stand-in."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import launch_command_parser

from benchmarks import gpu_proofs
from benchmarks.gpu_proofs import (
    PROOF_STEPS,
    Proof,
    ProofBench,
    ProofMachine,
    find_gpus,
    plan_proofs,
    write_proof_recipe,
)
from finetune.cli.main import main
from finetune.launch.watched_job import TrainingJob, started
from finetune.recipe.loader import load_recipe
from finetune.recipe.strategy import read_strategy
from finetune.run_folder.checkpoint import write_checkpoint

ONE = ["reference", "float32", "bf16", "fp16", "resume", "nf4 reference", "nf4", "int8 reference", "int8"]
ONE += ["offload", "offload resume"]
SEVERAL = ["ddp", "fsdp2", "hsdp", "zero2", "zero3"]
EXACT = ["deterministic", "deterministic resume"]  # where the recipe has the key


def gpus(count: int, *, bfloat16: bool = True) -> ProofMachine:
    return ProofMachine("cuda", "a GPU", count, bfloat16)


def stand_in(count: int = 1) -> ProofMachine:
    """The same launches with the GPUs hidden: each is a process on the CPU."""
    return ProofMachine("cpu", "a stand-in", count)


def reasons(machine: ProofMachine) -> dict[str, str]:
    return {proof.name: proof.missing for proof in plan_proofs(machine) if proof.missing}


def test_the_page_names_proofs_that_there_are() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text("utf-8")
    table = page.partition("| proof | compared with |")[2].partition("\n\n")[0]
    first = [re.findall(r"`([\w ]+)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    assert {name for names in first for name in names} - {"sdpa", "fsdp2_offload"} <= {
        proof.name for proof in plan_proofs(gpus(4))
    }
    assert len(first) == 9


@pytest.fixture(params=[True, False], ids=["installed", "not installed"])
def extras(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether bitsandbytes and DeepSpeed are installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if request.param else None)
    return bool(request.param)


def test_what_can_be_proved_on_which_machine(extras: bool) -> None:
    lacking = {name for name in (*ONE, *SEVERAL) if name.startswith(("nf4", "int8", "zero")) and not extras}
    engine = {name for name in lacking if name.startswith("zero")}
    assert [proof.name for proof in plan_proofs(gpus(1)) if proof.name not in EXACT] == [*ONE, *SEVERAL]
    assert set(reasons(gpus(1))) == set(SEVERAL) | lacking
    assert set(reasons(gpus(2))) == {"hsdp"} | lacking
    assert set(reasons(gpus(4))) == set(reasons(gpus(9))) == lacking
    assert set(reasons(gpus(4, bfloat16=False))) == lacking | {"bf16"}
    assert reasons(gpus(3))["hsdp"] == "needs 4 GPUs"
    assert all("pip install -e '.[deepspeed]'" in reasons(gpus(2))[name] for name in engine)


def test_ranks_share_the_rows_evenly() -> None:
    ranks = {count: {proof.name: proof.ranks for proof in plan_proofs(gpus(count))} for count in (1, 2, 3, 4, 7, 16)}
    assert [ranks[count]["ddp"] for count in ranks] == [2, 2, 2, 4, 4, 8]
    assert [ranks[count]["hsdp"] for count in ranks] == [4, 4, 4, 4, 4, 8]
    assert {ranks[16][name] for name in ONE} == {1}


def test_a_gpu_without_bfloat16_is_proved_in_float16() -> None:
    proofs = {proof.name: proof for proof in plan_proofs(gpus(1, bfloat16=False))}
    assert proofs["resume"].of == "fp16"
    assert "bf" not in json.dumps([dict(proofs[name].settings) for name in ("nf4", "int8", "offload", "fp16")])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_proof_recipe(tmp_path_factory.mktemp("proofs"))


@pytest.mark.parametrize("machine", [gpus(8), gpus(8, bfloat16=False), stand_in(4)], ids=["GPUs", "old GPUs", "CPU"])
def test_each_training_is_what_a_user_would_type(machine: ProofMachine, recipe: Path) -> None:
    """Its recipe is right, and its launch is the one at the top of the strategy's file."""
    proofs = plan_proofs(machine)
    bench = ProofBench(machine, recipe, {proof.name: proof for proof in proofs})
    for proof in proofs:
        job = bench.job(proof)
        words = launch_command_parser().parse_args(job.command()[3:])
        loaded = load_recipe(words.training_script_args[0], words.training_script_args[1:]).recipe
        strategy, launched = read_strategy(loaded.accelerate_config), read_strategy(words.config_file)
        assert strategy.name == proof.strategy
        assert loaded.training.global_batch_size % (proof.ranks * loaded.training.per_device_batch_size) == 0
        assert (words.num_processes or 1) == proof.ranks
        assert job.on_gpus == (machine.device == "cuda" and proof.kind != "reference")
        assert launched.path == strategy.path
        assert words.cpu == (proof.kind == "reference")
        assert words.main_process_port in (0, None)
        assert not strategy.replicates or strategy.can_replicate(proof.ranks, proof.ranks)


def test_gpus_are_hidden_from_references_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[str, str]] = []

    class Process:
        def poll(self) -> int:
            return 0

    def popen(_: Any, *, env: Mapping[str, str], **__: Any) -> Process:
        seen.append(env)
        return Process()

    monkeypatch.setattr("finetune.launch.watched_job.subprocess.Popen", popen)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for on_gpus in (True, False):
        with started(TrainingJob(tmp_path / "r.yaml", (), 1, tmp_path, on_gpus=on_gpus, shared_cache=tmp_path / "all")):
            pass
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in seen] == ["3", ""]
    assert {environment["FINETUNE_CACHE"] for environment in seen} == {str(tmp_path / "all")}


@dataclass
class Canned:
    """Trainings that take no time: each writes what a run leaves behind, as `change` has it for a proof's name."""

    change: dict[str, dict[str, Any]] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)

    @contextmanager
    def started(self, job: TrainingJob) -> Iterator[None]:
        name = job.folder.name.replace("_", " ")
        self.trained.append(name)
        self.write(job, name, self.change.get(name, {}))
        yield None

    def write(self, job: TrainingJob, name: str, change: Mapping[str, Any]) -> None:
        run_dir, done = job.run_dir, 0
        if (run_dir / "metrics.jsonl").is_file() and not change.get("started over"):
            done = int(json.loads((run_dir / "run_state.json").read_text())["step"])
            kept = (run_dir / "metrics.jsonl").read_text().splitlines()[:done]
        run_dir.mkdir(exist_ok=True)
        lines = [json.loads(line) for line in kept] if done else []
        for step in range(done + 1, PROOF_STEPS + 1):
            loss = 6.0 if change.get("flat") else (6 - step / 2) * (1 + change.get("loss", 0.0))
            norm = 1 + change.get("norm", 0.0)
            seconds = len(self.trained) + step / 100
            lines.append({"kind": "train", "step": step, "loss": loss, "grad_norm": norm, "step_seconds": seconds})
        (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        for step in (3, 6):
            write_checkpoint(run_dir, step, {"model": {"w": torch.full((2,), float(step))}}, {}, keep=2)
        device = change.get("device", "cuda" if job.on_gpus else "cpu")
        weights_on = change.get("weights_on", "cpu" if "offload" in name else device)
        receipt = {"device": device, "world_size": job.processes, "sharding": {"weights_on": [weights_on]}}
        (run_dir / "receipt.json").write_text(json.dumps(receipt))
        state = {"state": "finished", "step": PROOF_STEPS, "command": "", "identity": {}}
        (run_dir / "run_state.json").write_text(json.dumps(state))


Report = list[dict[str, Any]]
Proved = Callable[..., tuple[Report, Canned]]


def proved_in_turn(folder: Path, machine: ProofMachine, proofs: list[Proof]) -> Report:
    """The proofs' outcomes, each after those that it is compared with."""
    bench = ProofBench(machine, gpu_proofs.write_proof_recipe(folder), {proof.name: proof for proof in proofs})
    outcomes, ok = [], set[str]()
    for proof in proofs:
        outcomes.append(bench.outcome(proof, ok))
        ok |= {proof.name} if outcomes[-1]["state"] == "ok" else set()
    return outcomes


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Proved:
    """Prove machines with trainings that take no time; what differs is said by the proofs' names."""

    def proved(
        machine: ProofMachine, proofs: list[Proof] | None = None, **change: dict[str, Any]
    ) -> tuple[Report, Canned]:
        canned = Canned({name.replace("_", " "): values for name, values in change.items()})
        monkeypatch.setattr(gpu_proofs, "started", canned.started)
        monkeypatch.setattr(gpu_proofs, "wait_for_end", lambda job, process: None)
        monkeypatch.setattr(gpu_proofs, "write_proof_recipe", lambda folder: folder / "recipe.yaml")
        return proved_in_turn(tmp_path, machine, proofs or plan_proofs(machine)), canned

    return proved


def states(report: Report) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"ok": [], "failed": [], "not run": []}
    for outcome in report:
        if outcome["name"] not in EXACT:
            found[outcome["state"]].append(outcome["name"])
    return found


def outcome_of(report: Report, name: str) -> dict[str, Any]:
    return next(outcome for outcome in report if outcome["name"] == name)


def test_all_is_well(proved: Proved) -> None:
    report, canned = proved(gpus(1))
    assert states(report) == {"ok": ONE, "failed": [], "not run": SEVERAL}
    assert [name for name in canned.trained if name not in EXACT] == ONE
    assert outcome_of(report, "bf16")["figures"] == {"loss": 0.0, "loss_bound": 2e-3, "norm": 0.0, "norm_bound": 4e-2}
    assert outcome_of(report, "ddp")["seen"] == "needs 2 GPUs"


def test_all_gpus_are_taken(proved: Proved) -> None:
    report, _ = proved(gpus(4))
    assert states(report)["ok"] == [*ONE, *SEVERAL]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("float32", {"loss": 2e-4}, "step 1: loss 5.5011 and 5.5, gradient norm 1 and 1; losses 2.0e-04 apart"),
        ("float32", {"norm": 2e-3}, "norms 2.0e-03 (bound 1e-03)"),
        ("fp16", {"loss": float("nan")}, "losses inf apart"),
        ("int8", {"norm": -0.1}, "norms 1.0e-01 (bound 8e-02)"),
        ("float32", {"device": "cpu"}, "device: cuda was asked for, its receipt says cpu"),
        ("offload", {"weights_on": "cuda"}, "weights on: cpu was asked for, its receipt says cuda"),
        ("offload_resume", {"weights_on": "cuda"}, "weights on: cpu was asked for, its receipt says cuda"),
        ("resume", {"loss": 2e-3}, "step 4: "),
        ("resume", {"started over": True}, "it was to resume from step 3, and trained the steps before it again"),
    ],
)
def test_what_is_wrong_is_found(name: str, change: dict[str, Any], words: str, proved: Proved, tmp_path: Path) -> None:
    needed = proof = next(proof for proof in plan_proofs(gpus(1)) if proof.folder_name == name)
    names = [proof.name]
    while needed.of:  # the proofs that it is compared with
        needed = next(other for other in plan_proofs(gpus(1)) if other.name == needed.of)
        names.append(needed.name)
    report, _ = proved(gpus(1), [other for other in plan_proofs(gpus(1)) if other.name in names], **{name: change})
    failed = states(report)["failed"]
    assert failed == [proof.name]
    assert len(states(report)["ok"]) == len(names) - 1
    assert words in outcome_of(report, failed[0])["seen"]
    assert (tmp_path / name / "run" / "metrics.jsonl").is_file()


def test_a_reference_that_does_not_learn_proves_nothing(proved: Proved) -> None:
    report, _ = proved(gpus(1), reference={"flat": True})
    assert outcome_of(report, "reference")["seen"] == "loss 6.0000 to 6.0000: it did not learn"
    assert states(report)["failed"] == ["reference"]
    assert states(report)["ok"] == ["nf4 reference", "nf4", "int8 reference", "int8"]
    assert outcome_of(report, "float32")["seen"] == "there is no reference to compare with"
    assert outcome_of(report, "resume")["seen"] == "there is no bf16 to compare with"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "steps 4 to 6 bitwise"),
        ({"loss": 1e-12}, "where no bit may differ"),
    ],
    ids=["same", "another loss"],
)
def test_bitwise_is_to_the_bit(change: dict[str, Any], words: str, proved: Proved) -> None:
    """As it is asked for where kernels sum in one order."""
    proofs = [*plan_proofs(gpus(1))[:2], Proof("exact", "resume", "bitwise", of="float32")]
    report, _ = proved(gpus(1), proofs, exact=change)
    assert words in outcome_of(report, "exact")["seen"]
    assert (outcome_of(report, "exact")["state"] == "ok") == (not change)


def test_without_a_gpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_gpus().count == 0


def test_a_gpu_of_before_ampere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    for second, bfloat16 in (((7, 5), False), ((8, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, other=second: [(9, 0), other][index])
        assert find_gpus() == ProofMachine("cuda", "Tesla T4", 2, bfloat16=bfloat16)


@pytest.mark.slow
def test_the_whole_sequence_on_a_stand_in(tmp_path: Path) -> None:
    """Every proof of one GPU, as it would run there but for the device: twelve trainings by `accelerate launch`."""
    report = proved_in_turn(tmp_path, stand_in(), plan_proofs(stand_in()))
    assert states(report) == {"ok": ONE, "failed": [], "not run": SEVERAL}
    assert outcome_of(report, "resume")["figures"]["loss"] == 0.0, "bitwise on a CPU"
    assert outcome_of(report, "offload resume")["figures"]["loss"] == 0.0
    assert 0 < outcome_of(report, "bf16")["figures"]["loss"] < 1e-3


@pytest.mark.slow
def test_ranks_on_a_stand_in(tmp_path: Path) -> None:
    machine = stand_in(2)
    proofs = [proof for proof in plan_proofs(machine) if proof.name in ("reference", "ddp", "fsdp2")]
    report = proved_in_turn(tmp_path, machine, proofs)
    assert [outcome["state"] for outcome in report] == ["ok", "ok", "ok"], report


@pytest.mark.slow
def test_a_training_that_hangs_or_fails_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_proofs, "PROOF_TIMEOUT_SECONDS", 0.5)
    report = proved_in_turn(tmp_path, stand_in(), plan_proofs(stand_in())[:2])
    assert [outcome["state"] for outcome in report] == ["failed", "not run"]
    assert "not finished after 0.5 s" in report[0]["seen"]


def test_doctor_names_the_checkouts_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu"]) == 2
    assert capsys.readouterr().err.endswith("benchmarks/gpu.py proofs\n")
