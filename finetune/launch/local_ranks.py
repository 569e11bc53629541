"""The launcher of `finetune train`: the ranks of one machine, as torchrun would start them, without its report.

torchrun and `accelerate launch` turn each exit code into 1 and a traceback, kill ranks that save for longer than 30 s,
and do not pass a second Ctrl-C on (docs/log.md). On one machine a launcher does little besides: it sets torchrun's
variables, ends the other ranks when one fails, and passes signals on. No torch here: the ranks import it.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from finetune.errors import STOPPED, EnvironmentMismatch, FinetuneError, RankLost, Stopped
from finetune.launch.launcher import BY_TRAIN_VERB, under_launcher
from finetune.launch.plan import LaunchPlan
from finetune.launch.script import line_of_machine
from finetune.launch.signals import BROKEN_OFF, FIRST_SIGNAL, on_signals
from finetune.launch.slurm import slurm_ranks
from finetune.wording import counted

PATIENCE_SECONDS = 10.0  # for rank 0 to say what happened, after another rank failed
KILL_AFTER_SECONDS = 30.0  # from the SIGTERM that follows to SIGKILL; torchrun's
_POLL_SECONDS = 0.05
MOST_CPU_RANKS = 64  # gloo connects every pair of ranks
RANK_BYTES = 500 * 10**6  # after the import of torch, transformers and accelerate
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


def is_rank_already(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether srun or another launcher started this process as a rank. Raises EnvironmentMismatch as slurm_ranks.

    Call it after `take_out_left_over`.
    """
    return under_launcher(environment) or "RANK" in environment or bool(slurm_ranks(environment))


def ranks_here(plan: LaunchPlan) -> int:
    """The number of training processes: one per GPU in the budget; two on a CPU for a strategy that needs several.

    1 if the trainer itself will report that the machine has no GPU.

    Raises:
        EnvironmentMismatch: the recipe is made for several machines, or for more GPUs than are here.
    """
    if plan.nodes > 1:
        raise EnvironmentMismatch(
            f"budget: the recipe is made for {plan.nodes} machines, and `finetune train` starts the ranks of one; type "
            f"on all of them, each with its own number R = 0 to {plan.nodes - 1}: {line_of_machine(plan)}"
        )
    if plan.ranks == 1 or not plan.gpus:
        return plan.ranks
    gpus = count_gpus()
    if gpus == 0:
        return 1
    if gpus < plan.gpus:
        fewer = f"budget.gpus={gpus}"
        if gpus == 1:
            fewer += " accelerate_config=single"
        raise EnvironmentMismatch(
            f"budget: the recipe is made for {plan.gpus} GPUs, this machine has {gpus}; run it where there are "
            f"{plan.gpus}, or set {fewer}"
        )
    if gpus > plan.gpus:
        note = f"launch: {plan.gpus} of this machine's {gpus} GPUs, as the budget says; for all set budget.gpus={gpus}"
        print(note, file=sys.stderr)
    return plan.ranks


def count_gpus() -> int:
    """Count the GPUs that torch sees, in another process: this one imports no torch and holds no GPU."""
    child = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True)
    if child.returncode == 0 and child.stdout.strip().isdigit():
        return int(child.stdout)
    return 0


def check_rank_count(count: int, *, gpus: int) -> None:
    """Refuse more ranks than this machine can run. `gpus`: its GPUs; 0 runs on the CPU. Raises FinetuneError."""
    if gpus:
        most, reason = gpus, f"this machine has {counted(gpus, 'GPU', 'GPUs')}"
    else:
        # At least two, so that a strategy for several ranks is never refused here.
        most = max(2, min(MOST_CPU_RANKS, psutil.virtual_memory().available // RANK_BYTES))
        reason = "each needs 0.5 GB of host memory before it has a model"
    if count > most:
        raise FinetuneError(
            f"--processes: {count} is more than the {most} that can run here: {reason}; name at most {most}"
        )


def run_ranks(command: Sequence[str], count: int, *, on_cpu: bool) -> int:
    """Run the command as `count` ranks until all have ended.

    The first signal in STOPPING reaches every rank once, as SIGTERM. Before training begins it ends a rank without a
    traceback. Later the ranks finish the step and save, however long that takes. A second SIGINT kills all ranks.

    When a rank fails, the others get SIGTERM. If rank 0 failed, they get it at once, because it has printed the reason.
    Otherwise rank 0 has 10 s to print it. SIGKILL follows 30 s after the SIGTERM.

    Returns:
        The run's exit code: 0, or the first failed rank's code (1 if it was killed), or 130 after a signal.
    """
    group = _Ranks(command, _environments(count, on_cpu=on_cpu))
    received: list[int] = []
    with on_signals(lambda number, frame: received.append(number)):
        try:
            group.start()
            while group.running():
                group.obey(received)
                time.sleep(_POLL_SECONDS)
        finally:
            group.kill()
    return group.exit_code()


class _Ranks:
    """A run's processes. Each has its own session, so a terminal's signal reaches this process alone."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self._command, self._environments = list(command), environments
        self._first_signal = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # its name: ranks hear of a SIGTERM alone
        self._processes: list[subprocess.Popen[bytes]] = []
        self._first_failed: int | None = None  # the rank
        self._terminated = False  # the ranks have got SIGTERM
        self._stopped = False  # they got it because this process got a signal
        self._terminate_at = self._kill_at = math.inf  # seconds on the monotonic clock

    def start(self) -> None:
        for environment in self._environments:
            fd = self._first_signal.fileno()
            env = {**environment, FIRST_SIGNAL: str(fd)}
            self._processes.append(subprocess.Popen(self._command, env=env, pass_fds=(fd,), start_new_session=True))

    def running(self) -> bool:
        """Whether a rank still runs. The first failure is noted here, and ends the others."""
        codes = [process.poll() for process in self._processes]
        # A rank that a signal stopped leaves while rank 0 writes the run's pages.
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, Stopped.exit_code)]
        if failed and self._first_failed is None:
            # Several may have failed since the last look. One that ended itself knows the reason better than one that
            # a signal killed, so codes above 0 come first.
            self._first_failed = min(failed, key=lambda rank: (codes[rank] < 0, rank))  # type: ignore[operator]
            self._terminate_at = time.monotonic()
            if codes[0] is None:
                self._terminate_at += PATIENCE_SECONDS
            self._kill_at = self._terminate_at + KILL_AFTER_SECONDS
        return None in codes

    def obey(self, received: list[int]) -> None:
        """Pass on this process's signals, and end ranks whose time is up."""
        now = time.monotonic()
        if not self._terminated and any(process.poll() == -signal.SIGTERM for process in self._processes):
            # Somebody sent SIGTERM to a rank that was not training yet: its default action ended the rank. Stop the
            # others as if this process had got the signal.
            received.append(signal.SIGTERM)
        if (received or now > self._terminate_at) and not self._terminated:
            self._terminated, self._stopped = True, bool(received)
            with suppress(OSError):
                self._first_signal.write("".join(signal.Signals(number).name for number in received[:1]).encode())
            self._send(signal.SIGTERM)
        if received.count(signal.SIGINT) > 1:
            self.kill()
            print(f"\n{BROKEN_OFF}", file=sys.stderr)
        elif now > self._kill_at:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to every rank that is left, with the processes of its group."""
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def exit_code(self) -> int:
        """The run's exit code, after all ranks have ended. Prints the reason if no rank can have printed it."""
        codes = [process.returncode for process in self._processes]
        if self._first_failed is not None and codes[self._first_failed] > 0:
            return int(codes[self._first_failed])
        if self._stopped:
            if codes[0] == -signal.SIGTERM:
                print(f"\n{STOPPED}", file=sys.stderr)
            if any(codes):
                return Stopped.exit_code
            return 0
        if self._first_failed is None:
            return max(codes)
        # A signal killed this rank. Other ranks that were training have reported it and ended with RankLost's code.
        if RankLost.exit_code not in codes:
            rank, number = self._first_failed, -codes[self._first_failed]
            name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
            print(
                f"rank {rank} (process {self._processes[rank].pid}) was ended by {name}, perhaps for memory (see dmesg)"
                "; start the same command again, with more memory free",
                file=sys.stderr,
            )
        return RankLost.exit_code

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


def _environments(count: int, *, on_cpu: bool) -> list[dict[str, str]]:
    """torchrun's variables for each rank. OMP_NUM_THREADS is 1, and the trainer raises it if ranks use the CPU."""
    with socket.socket() as probe:
        # A port on which nobody listens now. Rank 0 takes it seconds later.
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        BY_TRAIN_VERB: str(count),
    }
    if on_cpu:
        shared["CUDA_VISIBLE_DEVICES"] = ""
    inherited = {"OMP_NUM_THREADS": "1", **os.environ}
    return [{**inherited, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
