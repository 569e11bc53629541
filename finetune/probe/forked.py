"""The probe in a forked child, while this process goes on.

A plan forks too. It could not, once a probe in this process had started autograd's threads.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import torch

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.launch.forking import can_fork, start_forked
from finetune.probe.probe import ProbeResult, probe
from finetune.recipe.schema import Recipe


@contextmanager
def probed_in_child(recipe: Recipe) -> Iterator[Callable[[], ProbeResult]]:
    """Probe the recipe's model, and yield a function that waits for the result; the child ends with the context.

    The function raises what `probe` raises. If no child can compute, this process probes when the function is called.
    """
    child, pipe = start_forked(_send_result, recipe) if can_fork() else (None, None)

    def result() -> ProbeResult:
        with suppress(EOFError):
            if pipe is not None:
                found: ProbeResult | FinetuneError = pipe.recv()
                if isinstance(found, FinetuneError):
                    raise found
                return found
        return probe(recipe, offline=True)

    try:
        yield result
    finally:
        if child is not None and pipe is not None:
            pipe.close()
            child.kill()
            child.join()


def _send_result(recipe: Recipe, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback in addition to the parent's
    torch.set_num_threads(1)  # OpenMP's threads were not forked, and it would wait for them
    try:
        pipe.send(probe(recipe, offline=True))
    except FinetuneError as refusal:
        kind = EnvironmentMismatch if isinstance(refusal, EnvironmentMismatch) else FinetuneError
        pipe.send(kind(str(refusal)))
    except Exception:  # the parent probes again, and raises it
        os._exit(1)
