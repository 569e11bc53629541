"""`finetune launch`: writes the file that starts a recipe on its machines, to be read, submitted or run. No torch here.

launcher.py, slurm.py and rendezvous.py read the same options again in every rank.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.files import write_text
from finetune.launch.hf_jobs import hub_job
from finetune.launch.kubeflow import train_job
from finetune.launch.plan import LaunchPlan
from finetune.launch.ray_train import trainer_file
from finetune.launch.slurm import job_script
from finetune.output_stream import printable
from finetune.wording import counted

_PORT = 29500  # torch's own default
_MARK = "# Made by: finetune "


def script(plan: LaunchPlan, timeout: str = "") -> str:
    """The file's text: a bash script to run on every machine, or an engine's job.

    Args:
        timeout: Of a job on hf-jobs, as `hf jobs run --timeout` takes it.
    """
    match plan.launcher:
        case "kubeflow":
            return train_job(plan, _head(plan))
        case "hf-jobs":
            return hub_job(plan, _head(plan), timeout)
        case "ray":
            return trainer_file(plan, _head(plan))
    if plan.launcher == "slurm":
        starter = _starter(plan, machine='"$SLURM_NODEID"', first='"$MASTER_ADDR"', port='"$MASTER_PORT"')
        return job_script(plan, _head(plan), starter)
    lines, trainer = ["#!/usr/bin/env bash", *_head(plan)], shlex.join(plan.words)
    if plan.nodes == 1:
        lines += ["# Start: bash THIS_FILE", "", *plan.exports, f"exec {_starter(plan)} \\", f"  {trainer}"]
        return "\n".join(lines) + "\n"
    starter = _starter(plan, machine='"$machine"', first='"$first"', port=str(_PORT))
    last = plan.nodes - 1
    lines += [
        f"# Start on every machine, R = 0 to {last}, with the address of machine 0: bash THIS_FILE R ADDRESS",
        "# All of them see the run's folder under the same path. To stop and save: Ctrl-C on one.",
        f'machine="${{1:?the number of this machine, 0 to {last}}}"',
        'first="${2:?the address of machine 0, as the others reach it}"',
        "",
        *plan.exports,
        f"exec {starter} \\",
        f"  {trainer}",
    ]
    return "\n".join(lines) + "\n"


def write_script(path: Path, text: str) -> None:
    """Write the file. An existing file is replaced only if this program made it.

    Raises FinetuneError, EnvironmentMismatch.
    """
    if path.exists() and not (path.is_file() and _MARK.encode() in path.read_bytes()[:1000]):
        raise FinetuneError(f"-o: {path}: exists and was not made by finetune; name another file")
    write_text(path, text)


def _head(plan: LaunchPlan) -> list[str]:
    """The comments that both kinds of file begin with."""
    devices = counted(plan.gpus, "GPU") if plan.gpus else "its CPU"
    machines = f"one machine with {devices}"
    if plan.nodes > 1:
        machines = f"{plan.nodes} machines with {devices} each"
    line = f"# {plan.strategy.name} on {machines}, {counted(plan.world, 'rank')}."
    if plan.launcher in ("slurm", "torchrun", "ray"):
        line += " Paths are as seen from the folder where it is started."
    return [f"{_MARK}launch {printable(plan.verb_arguments)}", line]


def line_of_machine(plan: LaunchPlan) -> str:
    """The line that starts machine R of several by hand. ADDRESS_OF_0 is machine 0's address."""
    return f"{_starter(plan, machine='R', first='ADDRESS_OF_0', port=str(_PORT))} {shlex.join(plan.words)}"


def _starter(plan: LaunchPlan, *, machine: str = "", first: str = "", port: str = "") -> str:
    """The command that starts one machine's ranks, up to the trainer.

    `machine` (this machine's number), `first` (machine 0's address) and `port` are bash words.
    """
    if plan.alone:
        return "python"
    if plan.nodes == 1:
        return f"torchrun --standalone --nproc-per-node {plan.ranks}"
    place = f"--node-rank {machine} --master-addr {first} --master-port {port}"
    return f"torchrun --nnodes {plan.nodes} {place} --nproc-per-node {plan.ranks}"
