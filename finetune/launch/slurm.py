"""Slurm: ranks that `srun` started without a launcher.

Under `srun python finetune/train.py RECIPE` no torchrun sets RANK, WORLD_SIZE, MASTER_ADDR, ...; they follow from the
step's variables (srun(1), "OUTPUT ENVIRONMENT VARIABLES"). `scontrol show hostnames` is not used: it may be missing
inside a container.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from finetune.errors import EnvironmentMismatch

# Only srun sets these. A batch script has SLURM_PROCID=0 as well, without being one of the step's tasks.
_STEP_VARIABLES = (
    "SLURM_STEP_ID",
    "SLURM_STEPID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_SRUN_COMM_PORT",
)
_MOST_HOSTS = 100_000  # in one range: no cluster has more
_FIRST_PORT, _PORTS = 20_000, 10_000  # below Linux's ephemeral ports, which begin at 32,768


def slurm_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set for this task; empty if srun did not start it, or for a single task.

    A MASTER_ADDR or MASTER_PORT that is set already stays.

    Raises:
        EnvironmentMismatch: the variables do not determine the ranks, or rank 0's host.
    """
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") or 1
    rank = _number(environment, "SLURM_PROCID")
    if "RANK" in environment or rank is None or tasks == 1:
        return {}
    if "SLURM_JOB_ID" in environment and not any(name in environment for name in _STEP_VARIABLES):
        raise EnvironmentMismatch(
            f"launch: Slurm gave this job {tasks} tasks, but srun did not start this process, which would train alone; "
            "write `srun python finetune/train.py RECIPE` in the job's script, or give the job one task (--ntasks=1)"
        )
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", ""))
    node = _number(environment, "SLURM_NODEID") or 0

    local_rank = _number(environment, "SLURM_LOCALID")
    if local_rank is None:
        if len(hosts) > 1:
            raise EnvironmentMismatch(
                "launch: SLURM_LOCALID is not set, so this task cannot know its GPU; start it with srun itself, or use "
                "torchrun on every node"
            )
        local_rank = rank  # one node runs all tasks

    tasks_here = _tasks_of_node(environment, tasks, node, len(hosts))

    # Slurm places tasks from the first host on, unless they are placed by hand.
    address = environment.get("MASTER_ADDR")
    if not address and len(hosts) == 1:
        address = "127.0.0.1"  # needs no name service
    if not address:
        problem = ""
        if environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
            problem = "the tasks are placed by hand"
        elif not hosts:
            problem = "SLURM_NODELIST is not set"
        if problem:
            raise EnvironmentMismatch(
                f"launch: {problem}, so the host of task 0 is not known; export MASTER_ADDR=HOST before srun"
            )
        address = hosts[0]

    # All tasks compute the same port. Jobs and steps that may share the host get different ones:
    # step 2 of job 1,234,567 gets 20,000 + (8,641,969 + 2) % 10,000 = 21,971.
    job, step = _number(environment, "SLURM_JOB_ID", "SLURM_JOBID") or 0, _number(environment, "SLURM_STEP_ID") or 0
    port = environment.get("MASTER_PORT") or str(_FIRST_PORT + (7 * job + step) % _PORTS)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(tasks_here),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(max(1, len(hosts))),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


def expand_hosts(text: str) -> list[str]:
    """The hosts in a Slurm node list, in its order: `a[01-03,07],b` is a01, a02, a03, a07, b.

    Raises:
        EnvironmentMismatch: it is not a node list.
    """
    # Split at commas outside brackets. Then no bracket may be left without its partner.
    names = [name for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text) for name in _expand(part, text)]
    if "".join(re.findall(r"[\[\]]", text)).replace("[]", ""):
        raise _unreadable(text)
    return names


def _expand(part: str, text: str) -> Iterator[str]:
    """The hosts in one list entry; several brackets give every combination."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    for piece in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if match is None:
            raise _unreadable(text)
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) > _MOST_HOSTS:
            raise _unreadable(text)
        for number in range(int(first), int(last) + 1):
            for ending in _expand(after, text):
                yield f"{before}{number:0{len(first)}d}{ending}"  # as many digits as the range's first number: 01, 02


def _unreadable(text: str) -> EnvironmentMismatch:
    return EnvironmentMismatch(
        f"launch: SLURM_NODELIST={text} is not a list of hosts; export MASTER_ADDR=HOST with the host of task 0"
    )


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    values = (environment.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdigit()), None)


def _tasks_of_node(environment: Mapping[str, str], tasks: int, node: int, nodes: int) -> int:
    """The number of tasks on this node: its entry in Slurm's list, else an even share.

    `2(x3),1` is 2, 2, 2, 1: three nodes with two tasks each, and one with a single task.
    """
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    if node < len(counts):
        return counts[node]
    return -(-tasks // max(1, nodes))
