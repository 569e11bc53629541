"""Two ranks on one card over gloo: which collectives take tensors on the GPU, then DDP and FSDP2 beside one rank. Last
FSDP2 as a single rank over NCCL, which refuses two ranks on one card.

A part of gpu.py, and the only way to run the sharded code on a single GPU.

    python benchmarks/gpu_two_ranks.py collectives DEVICE OUT.json       (a rank, under torchrun)
    python benchmarks/gpu_two_ranks.py gloo RECIPE [key=value ...]       (a rank of the kit's own training)
    python benchmarks/gpu_two_ranks.py alone RECIPE [key=value ...]      (its only rank)
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from benchmarks.gpu_recipes import OUT_OF_TIME, POLL_SECONDS, last_line, running
from finetune.files import read_lines
from finetune.launch.launcher import environment_for_child

if TYPE_CHECKING:
    from benchmarks.gpu_checks import Lines

SECONDS = 120.0  # of one training; 20 expected
SECONDS_ON_CPU = 600.0
LOSS_BOUND, NORM_BOUND = 1e-4, 1e-3  # relative, in float32: FLOAT32_BOUNDS of gpu_proofs.py


def two_ranks(lines: Lines, *, shrunken: bool) -> None:
    """The record of collectives, then a tiny Llama by one rank, by DDP and by FSDP2, as two ranks and as one: the same
    curve."""
    device, limit = ("cpu", SECONDS_ON_CPU) if shrunken else ("cuda", SECONDS)
    with tempfile.TemporaryDirectory(prefix="finetune-ranks-") as name:
        folder = Path(name)
        with lines.check("collectives of gloo") as found:
            out = folder / "collectives.json"
            _launch(2, ["collectives", device, str(out)], folder, limit, shrunken=shrunken)
            outcomes = json.loads(out.read_text("utf-8"))
            fails = {each: why for each, why in outcomes.items() if why}
            found["figures"] = outcomes
            found["seen"] = f"{len(outcomes) - len(fails)} of {len(outcomes)} work on {device}; " + (
                "; ".join(f"{each}: {why}" for each, why in fails.items()) or "none fails"
            )
        recipe = str(_proof_recipe(folder))
        curves: list[list[dict[str, Any]]] = []
        for kind, strategy, ranks in (
            ("alone", "single", 1),
            ("gloo", "ddp", 2),
            ("gloo", "fsdp2", 2),
            ("alone", "fsdp2", 1),
        ):
            with lines.check(f"{strategy}, {ranks} rank{'s' * (ranks > 1)}") as found:
                run = folder / f"{kind}-{strategy}"
                budget = f"budget={json.dumps({'gpus': 0 if shrunken else 1, 'gpu_memory_gb': 80})}"
                words = [kind, recipe, f"accelerate_config={strategy}", f"output_dir={run}", budget]
                _launch(ranks, words, folder, limit, shrunken=shrunken)
                curve = [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"]
                curves.append(curve)
                _judge(found, curve, curves[0])


def _proof_recipe(folder: Path) -> Path:
    from benchmarks.gpu_proofs import write_proof_recipe

    return write_proof_recipe(folder)


def _judge(found: dict[str, Any], ours: Sequence[Any], alone: Sequence[Any]) -> None:
    loss, norm = (
        max(abs(one[key] - other[key]) / abs(other[key]) for one, other in zip(ours, alone, strict=True))
        for key in ("loss", "grad_norm")
    )
    found["figures"] = {"losses": [line["loss"] for line in ours], "loss": loss, "grad_norm": norm}
    found["seen"] = f"{len(ours)} steps, loss {loss:.1e} and gradient norm {norm:.1e} from one rank's"
    if not (ours and loss <= LOSS_BOUND and norm <= NORM_BOUND):
        found["state"] = "failed"


def _launch(ranks: int, words: Sequence[str], folder: Path, limit: float, *, shrunken: bool) -> None:
    """Run this file on so many ranks. Raises RuntimeError with the last line that they printed."""
    log = folder / "ranks.log"
    cpu = {"ACCELERATE_USE_CPU": "true"} if shrunken else {}
    environment = environment_for_child(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", FINETUNE_CACHE=str(folder / "cache"))
    launcher = [sys.executable]
    if "accelerate_config=single" not in words:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with running([*launcher, str(Path(__file__)), *words], environment | cpu, log) as process:
        ends = time.monotonic() + limit
        while process.poll() is None and time.monotonic() < ends:
            time.sleep(POLL_SECONDS)
        code = process.poll()
    if code is None:
        raise RuntimeError(f"{OUT_OF_TIME}: {limit:.0f} s; {last_line(log)}")
    if code:
        raise RuntimeError(f"exit code {code}: {_reason(log)}")


def _reason(log: Path) -> str:
    """The line of an error, above torchrun's own report."""
    lines = log.read_text("utf-8", errors="replace").splitlines()
    of_ranks = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (of_ranks or [last_line(log)])[-1].strip()[:300]


# ---- a rank


def collectives(device_type: str, out: Path) -> None:
    """What each collective does with tensors on this device: "" where its result is right, else why not."""
    import torch
    from torch import distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)

    def own(*shape: int) -> Any:
        return torch.full(shape, rank + 1.0, device=device)  # 1 on rank 0, 2 on rank 1

    def reduced(op: Any) -> Any:
        tensor = own(4)
        dist.all_reduce(tensor, op=op)
        return tensor

    def broadcast() -> Any:
        tensor = own(4)
        dist.broadcast(tensor, 1)
        return tensor

    def reduce_to_both() -> Any:
        tensor = own(4)
        dist.reduce(tensor, 0)
        return tensor if rank == 0 else torch.full_like(tensor, 3.0)

    def all_gather() -> Any:
        parts = [torch.empty(2, device=device) for _ in range(2)]
        dist.all_gather(parts, own(2))
        return torch.cat(parts)

    def all_gather_into() -> Any:
        whole = torch.empty(4, device=device)
        dist.all_gather_into_tensor(whole, own(2))
        return whole

    def reduce_scatter(op: Any) -> Any:
        part = torch.empty(2, device=device)
        dist.reduce_scatter_tensor(part, own(4), op=op)
        return part

    def all_to_all() -> Any:
        result = torch.empty(4, device=device)
        dist.all_to_all_single(result, own(4))
        return result

    def scatter() -> Any:
        part = torch.empty(2, device=device)
        dist.scatter(part, [torch.ones(2, device=device), 2 * torch.ones(2, device=device)] if rank == 0 else None)
        return part - rank

    def sent() -> Any:
        tensor = own(4)
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        return tensor

    op, gathered = dist.ReduceOp, [1.0, 1.0, 2.0, 2.0]
    cases: dict[str, tuple[Callable[[], Any], list[float]]] = {
        "all_reduce": (partial(reduced, op.SUM), [3.0] * 4),
        "all_reduce, mean": (partial(reduced, op.AVG), [1.5] * 4),
        "broadcast": (broadcast, [2.0] * 4),
        "reduce": (reduce_to_both, [3.0] * 4),
        "all_gather": (all_gather, gathered),
        "all_gather_into_tensor": (all_gather_into, gathered),
        "reduce_scatter_tensor": (partial(reduce_scatter, op.SUM), [3.0] * 2),
        "reduce_scatter_tensor, mean": (partial(reduce_scatter, op.AVG), [1.5] * 2),
        "all_to_all_single": (all_to_all, gathered),
        "scatter": (scatter, [1.0] * 2),
        "send and recv": (sent, [1.0] * 4),
    }
    outcomes = {}
    for name, (call, expected) in cases.items():
        try:
            got = call().tolist()
            outcomes[name] = "" if got == expected else f"gives {got}, not {expected}"
        except Exception as error:  # of whatever class: gloo's own, and torch's
            outcomes[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        dist.barrier()
    if rank == 0:
        out.write_text(json.dumps(outcomes), "utf-8")
    dist.destroy_process_group()


def train(words: Sequence[str], *, alone: bool) -> int:
    """The kit's training as this rank. It would refuse FSDP2 with one rank. It would refuse two ranks on one GPU, and
    Accelerate would take NCCL."""
    import finetune.train as trainer

    if alone:
        from finetune.strategies import machine

        machine.ranks_problem = lambda *_: None
    elif os.environ.get("ACCELERATE_USE_CPU") != "true":
        from accelerate import InitProcessGroupKwargs

        from finetune.strategies import accelerator, machine

        check = machine.gpu_problems
        machine.gpu_problems = lambda recipe, launch: check(recipe, replace(launch, shares_gpus=False))
        accelerator.InitProcessGroupKwargs = partial(InitProcessGroupKwargs, backend="gloo")  # type: ignore[misc]
    return trainer.process_main(words)


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "collectives":
        collectives(rest[0], Path(rest[1]))
    else:
        sys.exit(train(rest, alone=kind == "alone"))
