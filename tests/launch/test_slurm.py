"""Ranks from Slurm's variables."""

from __future__ import annotations

import pytest

from finetune.errors import EnvironmentMismatch
from finetune.launch.slurm import expand_hosts, slurm_ranks

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NODELIST": "gpu[08-10],big",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("login", ["login"]),
        ("a[01-03,07]", ["a01", "a02", "a03", "a07"]),
        ("a[9-11],b-2,c[1]", ["a9", "a10", "a11", "b-2", "c1"]),
        ("r[1-2]n[08-09].site", ["r1n08.site", "r1n09.site", "r2n08.site", "r2n09.site"]),
        ("10.77.0.[1-2]", ["10.77.0.1", "10.77.0.2"]),
        ("a[098-101]", ["a098", "a099", "a100", "a101"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["a[1-2", "a[x-y]", "a1-2]", "a[]"])
def test_what_is_no_node_list(text: str) -> None:
    with pytest.raises(EnvironmentMismatch, match="MASTER_ADDR"):
        expand_hosts(text)


def test_a_task_of_srun() -> None:
    assert slurm_ranks(TASK) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu08",
        "MASTER_PORT": "22979",
    }
    alone_on_the_last_node = {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
    assert slurm_ranks(TASK | alone_on_the_last_node)["LOCAL_WORLD_SIZE"] == "1"


def test_the_step_wins_over_the_job() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu09", "SLURM_STEP_TASKS_PER_NODE": "2"}
    env = slurm_ranks(TASK | step | {"SLURM_PROCID": "1", "SLURM_NODEID": "0", "MASTER_PORT": "1234"})
    assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_WORLD_SIZE"]) == ("2", "2", "1")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "1234")


def test_the_four_variables_are_enough() -> None:
    four = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODELIST": "a[1-2]"}
    env = slurm_ranks(four)
    assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"], env["LOCAL_WORLD_SIZE"]) == (
        "1",
        "2",
        "a1",
        "1",
    )
    assert env["MASTER_PORT"] == slurm_ranks(four | {"SLURM_PROCID": "0"})["MASTER_PORT"]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},  # the shell of salloc
        TASK | {"SLURM_NTASKS": "1"},
        TASK | {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun below srun
    ],
)
def test_what_is_left_alone(environment: dict[str, str]) -> None:
    assert slurm_ranks(environment) == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_STEP_ID": None, "SLURM_PROCID": "0"}, ["7 tasks", "srun python finetune/train.py", "--ntasks=1"]),
        ({"SLURM_STEP_ID": None, "SLURM_PROCID": "3"}, ["7 tasks", "srun did not start"]),  # a job's shell, copied
        ({"SLURM_LOCALID": None}, ["SLURM_LOCALID", "torchrun"]),
        ({"SLURM_NODELIST": None, "SLURM_LOCALID": "0"}, ["SLURM_NODELIST", "MASTER_ADDR"]),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, ["by hand", "MASTER_ADDR"]),
        ({"SLURM_NODELIST": "a[1"}, ["a[1", "MASTER_ADDR"]),
    ],
)
def test_what_is_ambiguous_is_refused(changes: dict[str, str | None], words: list[str]) -> None:
    environment = {key: value for key, value in (TASK | changes).items() if value is not None}
    with pytest.raises(EnvironmentMismatch) as caught:
        slurm_ranks(environment)
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
