"""The launcher of `finetune train`: ranks that know each other, one signal each, the exit code, nobody left behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from finetune.errors import EnvironmentMismatch
from finetune.launch import launcher, local_ranks
from finetune.launch.launcher import take_out_left_over
from finetune.launch.local_ranks import is_rank_already, ranks_here
from finetune.launch.plan import plan_launch
from tests.support.runs.launching import REPOSITORY

RECIPE = REPOSITORY / "recipes" / "llama3_fsdp.yaml"  # 4 GPUs of one machine
LAUNCHER = """
import os, sys
from finetune.launch import local_ranks
local_ranks.KILL_AFTER_SECONDS, local_ranks.PATIENCE_SECONDS = float(sys.argv[1]), 0.5
sys.exit(local_ranks.run_ranks([sys.executable, *sys.argv[3:]], int(sys.argv[2]), on_cpu="GPUS" not in os.environ))
"""
# Writes what it was started with, and each signal that it hears; ends as it is told: RANK:WHAT ...
RANK = """
import json, os, signal, sys, time
from pathlib import Path
folder, rank, told = Path(sys.argv[1]), os.environ["RANK"], dict(word.split(":") for word in sys.argv[2:])
what, heard = told.get(rank, told.get("all", "")), []
def hear(number, frame):
    heard.append(signal.Signals(number).name)
    (folder / f"heard-{rank}").write_text(" ".join(heard))
if what != "starting":  # as a trainer before its training, which a SIGTERM ends
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, hear)
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS CUDA_VISIBLE_DEVICES"
seen = {name: os.environ.get(name) for name in names.split()} | {"pid": os.getpid(), "session": os.getsid(0)}
(folder / f"aside-{rank}").write_text(json.dumps(seen))
(folder / f"aside-{rank}").rename(folder / f"rank-{rank}")
while len(list(folder.glob("rank-*"))) < int(os.environ["WORLD_SIZE"]):  # a rank that is up hears signals
    time.sleep(0.01)
if what.startswith("code"):
    sys.exit(int(what[4:]))
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
for _ in range(600):
    time.sleep(0.05)
    if heard and what != "deaf":
        time.sleep(0.3)  # its step, and a checkpoint
        (folder / f"saved-{rank}").write_text("")
        sys.exit(130)
"""


@contextmanager
def launched(
    folder: Path, *told: str, ranks: int = 2, grace: float = 30.0, program: str = RANK
) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a session of its own, as a terminal's foreground job is; its ranks are up."""
    (folder / "rank.py").write_text(program)
    words = ["-c", LAUNCHER, str(grace), str(ranks), str(folder / "rank.py"), str(folder), *told]
    process = subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ranks_of(folder: Path, count: int = 2) -> list[Mapping[str, str]]:
    """What the ranks were started with, once all are up."""
    files, end = [folder / f"rank-{rank}" for rank in range(count)], time.monotonic() + 30
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, "a rank did not start"
        time.sleep(0.02)
    return [json.loads(file.read_text()) for file in files]


def ended(process: subprocess.Popen[str], folder: Path, seconds: float = 20) -> tuple[int, str]:
    """The launcher's exit code and what it printed; all its ranks have ended with it."""
    out, err = process.communicate(timeout=seconds)
    for file in folder.glob("rank-*"):
        assert not psutil.pid_exists(json.loads(file.read_text())["pid"]), "an orphan"
    assert "Traceback" not in err
    return process.returncode, out + err


def heard(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("heard-*"))]


STOPPED = """
import sys, time
from pathlib import Path
from finetune.launch.signals import StopRequest, stop_on_signals
request = StopRequest()
with stop_on_signals(request), request.finishes_step():
    name = Path(sys.argv[1]) / f"up-{time.monotonic_ns()}"
    name.write_text("")
    while not request:
        time.sleep(0.02)
(name.with_name(name.name.replace("up", "reason"))).write_text(request.reason)
sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.sample(1, thorough=3)
def test_a_rank_names_the_signal_that_came(tmp_path: Path, number: signal.Signals) -> None:
    """Not the SIGTERM by which the launcher passes it on."""
    with launched(tmp_path, program=STOPPED) as process:
        end = time.monotonic() + 30
        while len(list(tmp_path.glob("up-*"))) < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(number)
        assert ended(process, tmp_path)[0] == 130
    assert [file.read_text() for file in tmp_path.glob("reason-*")] == [number.name] * 2


def test_ranks_have_torchruns_variables(tmp_path: Path) -> None:
    with launched(tmp_path, "all:code0", ranks=3) as process:
        seen = ranks_of(tmp_path, 3)
        assert ended(process, tmp_path) == (0, "")
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in seen] == [("0", "0"), ("1", "1"), ("2", "2")]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["MASTER_ADDR"]) for each in seen} == {
        ("3", "3", "127.0.0.1")
    }
    assert len({each["MASTER_PORT"] for each in seen}) == 1
    assert {each["CUDA_VISIBLE_DEVICES"] for each in seen} == {""}, "ranks on the CPU"
    assert all(each["session"] == each["pid"] for each in seen), "Ctrl-C reaches the launcher alone"


@pytest.mark.thorough
def test_ranks_on_gpus_see_those_that_the_user_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUS", "yes")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    with launched(tmp_path, "all:code0") as process:
        seen = ranks_of(tmp_path)
        assert ended(process, tmp_path) == (0, "")
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["2,5", "2,5"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_reaches_every_rank_once(tmp_path: Path, name: str) -> None:
    with launched(tmp_path) as process:
        ranks_of(tmp_path)
        os.killpg(process.pid, getattr(signal, name))  # what a terminal does
        assert ended(process, tmp_path) == (130, "")
    assert heard(tmp_path) == ["SIGTERM", "SIGTERM"]
    assert len([*tmp_path.glob("saved-*")]) == 2


@pytest.mark.thorough
def test_ranks_may_save_for_long(tmp_path: Path) -> None:
    """Neither the launcher's grace for failures nor a second SIGTERM ends a rank that saves."""
    with launched(tmp_path, grace=0.0) as process:
        ranks_of(tmp_path)
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert ended(process, tmp_path) == (130, "")
    assert heard(tmp_path) == ["SIGTERM", "SIGTERM"]
    assert len([*tmp_path.glob("saved-*")]) == 2


@pytest.mark.thorough
def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    with launched(tmp_path, "all:deaf") as process:
        ranks_of(tmp_path)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        code, printed = ended(process, tmp_path)
    assert time.monotonic() - began < 3
    assert (code, printed) == (130, "\nbroken off without saving\n")
    assert heard(tmp_path) == ["SIGTERM", "SIGTERM"]


@pytest.mark.thorough
def test_a_stop_while_ranks_start_is_one_word(tmp_path: Path) -> None:
    with launched(tmp_path, "all:starting") as process:
        ranks_of(tmp_path)
        process.send_signal(signal.SIGINT)
        assert ended(process, tmp_path) == (130, "\nstopped\n")


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize(
    ("told", "code"),
    [
        (["0:code2", "1:code2"], 2),
        (["0:code4"], 4),  # the other one is told to end
        (["1:code3"], 3),
        (["all:code130"], 130),
        (["0:code0", "1:code1"], 1),
    ],
)
def test_the_exit_code_is_the_ranks(tmp_path: Path, told: list[str], code: int) -> None:
    with launched(tmp_path, *told) as process:
        assert ended(process, tmp_path) == (code, "")


@pytest.mark.slow
def test_a_rank_that_leaves_after_a_signal_of_its_own_is_no_failure(tmp_path: Path) -> None:
    """`kill RANK`: all stop at the same step, and rank 0 leaves last, after it has written the run's pages."""
    with launched(tmp_path) as process:
        os.kill(int(ranks_of(tmp_path)[1]["pid"]), signal.SIGTERM)
        while not (tmp_path / "saved-1").exists():
            time.sleep(0.02)
        time.sleep(0.5)
        assert heard(tmp_path) == ["SIGTERM"]
        process.send_signal(signal.SIGTERM)
        assert ended(process, tmp_path) == (130, "")


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_of_one_rank_that_starts_is_the_run_s(rank: int, tmp_path: Path) -> None:
    """Before the ranks have met, SIGTERM ends a rank by its default action; the other would wait for it for ever."""
    with launched(tmp_path, "all:starting") as process:
        began = time.monotonic()
        os.kill(int(ranks_of(tmp_path)[rank]["pid"]), signal.SIGTERM)
        assert ended(process, tmp_path) == (130, "\nstopped\n")
        assert time.monotonic() - began < 10


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    with launched(tmp_path, "0:deaf", "1:killed", grace=0.5) as process:
        code, printed = ended(process, tmp_path)
    assert code == 1
    assert printed.startswith("rank 1 (process ")
    assert "was ended by SIGKILL" in printed
    assert "; " in printed
    assert len(printed.splitlines()) == 1
    assert heard(tmp_path) == ["SIGTERM"]


@pytest.mark.slow
def test_rank_0_has_time_to_say_what_happened(tmp_path: Path) -> None:
    """The others have none: rank 0 fails last, and it prints the reason."""
    with launched(tmp_path, "0:code2", "1:deaf", grace=2) as process:
        began = time.monotonic()
        assert ended(process, tmp_path)[0] == 2
        assert time.monotonic() - began < 9
    assert heard(tmp_path) == ["SIGTERM"]


@pytest.mark.thorough
def test_no_rank_outlives_a_launcher_that_breaks(tmp_path: Path) -> None:
    """An exception in the launcher itself: here, one rank too many to start."""
    code = """
import subprocess, sys
from finetune.launch import local_ranks
started, popen = [], subprocess.Popen
def start(*words, **options):
    if started:
        raise OSError("no more processes")
    started.append(popen(*words, **options))
    return started[0]
local_ranks.subprocess.Popen = start
try:
    local_ranks.run_ranks([sys.executable, "-c", "import time; time.sleep(60)"], 2, on_cpu=True)
except OSError:
    print(started[0].returncode)
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert process.stdout == f"{-signal.SIGKILL}\n"


@pytest.mark.parametrize(
    ("words", "gpus_here", "count"),
    [
        ([], 4, 4),
        ([], 0, 1),  # the trainer says what is missing
        (["budget.gpus=2"], 8, 2),
        (["budget.gpus=0"], 8, 2),  # gloo ranks, where the recipe asks for a CPU
        (["budget.gpus=1", "accelerate_config=single"], 0, 1),
        (["budget.gpus=0", "accelerate_config=single"], 0, 1),
        (["budget.gpus=0", "accelerate_config=cpu_2proc"], 0, 2),
        (["budget.gpus=1", "accelerate_config=fsdp2_offload"], 1, 1),
    ],
)
def test_how_many_ranks(words: list[str], gpus_here: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "count_gpus", lambda: gpus_here)
    assert ranks_here(plan_launch(RECIPE, words, launcher="torchrun")) == count


def test_more_gpus_than_the_budget_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_ranks, "count_gpus", lambda: 8)
    assert ranks_here(plan_launch(RECIPE, [], launcher="torchrun")) == 4
    assert capsys.readouterr().err.count("4 of this machine's 8 GPUs") == 1


@pytest.mark.parametrize(
    ("gpus_here", "remedy"), [(2, "set budget.gpus=2"), (1, "set budget.gpus=1 accelerate_config=single")]
)
def test_fewer_gpus_than_the_budget(gpus_here: int, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "count_gpus", lambda: gpus_here)
    with pytest.raises(EnvironmentMismatch, match=f"made for 4 GPUs, this machine has {gpus_here}; .*{remedy}$"):
        ranks_here(plan_launch(RECIPE, [], launcher="torchrun"))
    fitting = plan_launch(RECIPE, remedy.removeprefix("set ").split(), launcher="torchrun")
    assert ranks_here(fitting) == gpus_here, "the remedy mends it"


def test_several_machines_get_the_line_of_each() -> None:
    from torch.distributed.run import get_args_parser

    with pytest.raises(EnvironmentMismatch) as caught:
        ranks_here(plan_launch(RECIPE, ["budget.nodes=2"], launcher="torchrun"))
    line = str(caught.value).rpartition(": torchrun ")[2]
    read = get_args_parser().parse_args(["1" if word == "R" else word for word in shlex.split(line)])
    assert (read.nnodes, read.node_rank, read.nproc_per_node, read.master_addr) == ("2", 1, "4", "ADDRESS_OF_0")
    assert [read.module, read.training_script, *read.training_script_args] == [
        True,
        "finetune.train",
        str(RECIPE),
        "budget.nodes=2",
    ]


@pytest.mark.slow
def test_gpus_are_counted_in_another_process() -> None:
    code = "import sys; from finetune.launch.local_ranks import count_gpus; print(count_gpus(), 'torch' in sys.modules)"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=hidden, capture_output=True, text=True, timeout=120
    )
    assert process.stdout == "0 False\n"


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, False),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_NODELIST": "a"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),  # by hand, or a cluster's operator
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "TORCHELASTIC_RUN_ID": "x"}, True),
        ({"TORCHELASTIC_RUN_ID": "x"}, False),  # left in a shell
        ({"ACCELERATE_MIXED_PRECISION": "no"}, False),  # an image's
        ({"FINETUNE_RANKS": "2"}, False),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "PET_NNODES": "1"}, False),  # a job of one pod
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PMI_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, False),
    ],
)
def test_a_rank_starts_no_ranks(environment: dict[str, str], rank: bool) -> None:
    before, line = dict(environment), ""
    if environment.get("WORLD_SIZE") != "2" or "MASTER_ADDR" in environment:
        line = take_out_left_over(environment)
    assert is_rank_already(environment) is rank
    gone = before.keys() - environment.keys()
    assert not gone or not rank
    assert all(name in line for name in gone)
    assert bool(gone) == bool(line)


def test_a_launchers_own_rank_keeps_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "arguments_of", lambda process: ["python", "/env/bin/torchrun", "x.py"])
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    before = dict(environment)
    assert take_out_left_over(environment) == ""
    assert environment == before
    assert is_rank_already(environment)


def test_what_a_user_sets_for_accelerate_stays() -> None:
    environment = {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_OFFLOAD_PARAMS": "true",
        "HOME": "/",
    }
    assert "ACCELERATE_USE_FSDP, FSDP_OFFLOAD_PARAMS (unset them)" in take_out_left_over(environment)
    assert environment == {"ACCELERATE_USE_CPU": "true", "HOME": "/"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE=4: mpirun's ranks"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "unset PMI_SIZE"),
        ({"RANK": "3"}, "RANK=3 is not one of 1 ranks .*unset RANK"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a count"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR does not say"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is not one of"),
    ],
)
def test_contradictory_variables_are_refused_by_name(environment: dict[str, str], words: str) -> None:
    with pytest.raises(EnvironmentMismatch, match=words):
        take_out_left_over(environment)
