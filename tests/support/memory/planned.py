"""The same training twice: tracked on real CPU tensors, and planned on tensors that hold no data.

As a program, one gloo rank that tracks many:  python tests/support/memory/planned.py FOLDER STRATEGY LINE [LINE ...]
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import peft  # noqa: F401  # as a run has it (receipt.py) before it is measured; it makes tensors of its own
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from finetune.launch.launcher import Launch
from finetune.measure.phases import Phases
from finetune.planner.trace.stand_ins import SHARED_MEMORY
from finetune.planner.trace.trace import STEPS, trace
from finetune.recipe.schema import Data, DataSet, Lora, ModelSection, Quantization, Recipe, Training
from finetune.recipe.strategy import read_strategy
from finetune.run_folder.save_restore import save
from finetune.run_folder.train_state import TrainState
from finetune.strategies.accelerator import build_accelerator
from finetune.strategies.assemble import assemble
from finetune.strategies.zero import release_engine
from finetune.tokens.batches import MicroBatch, prefetch, without_learning
from finetune.training.cast_weights import cast_weights
from finetune.training.objectives.supervised import Supervised
from finetune.training.run import StepParts
from finetune.training.step import optimizer_step
from finetune.wording import PHASES
from tests.support.models.tiny import flat_batch, save_tiny
from tests.support.rows.mixtures import save_mixture
from tests.support.runs.cells import free_ports
from tests.support.runs.saving import in_the_foreground
from tests.support.stand_ins.gloo_buffers import let_go_at_once

ROOT = Path(__file__).resolve().parents[3]
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"mixed_precision": "no"},
    "bf16": {"mixed_precision": "bf16"},
    "pure_bf16": {"mixed_precision": "bf16", "pure_bf16": True},
}

ADAPTERS: dict[str, dict[str, Any]] = {
    "patterns": {"rank_pattern": {"q_proj": 9, "layers.2.mlp.up_proj": 17}, "exclude_modules": ["k_proj"]},
    "parameters": {"target_modules": ["q_proj"], "target_parameters": ["mlp.down_proj.weight", "1.mlp.up_proj.weight"]},
    "experts": {
        "rank_pattern": {"experts.down_proj": 2},
        "loraplus_lr_ratio": 4.0,
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}
ADAPTERS["packed experts"] = ADAPTERS["experts"]
MIXED = {"experts": "qwen3_moe", "packed experts": "qwen3_moe"}  # methods over a mixture of experts
FAMILIES = ("glm4_moe", "gpt_oss", "mixtral", "llama4_text", "olmoe", "granitemoe")  # in 4 bits, without adapters
MIXED |= {family: family for family in FAMILIES}
FOUR_BITS = Quantization(load_in_4bit=True)
QUANTIZATIONS = {"qlora": FOUR_BITS, "int8": Quantization(load_in_8bit=True), "packed experts": FOUR_BITS}
QUANTIZATIONS |= dict.fromkeys(FAMILIES, FOUR_BITS)


@dataclass(frozen=True)
class Case:
    """One configuration."""

    method: str  # full | lora | qlora | int8, with adapters; a key of ADAPTERS: with other adapters
    precision: str
    checkpointing: int | str  # 0 none, 1 full, n every n-th layer, selective
    packed: bool
    tied: bool
    micro_steps: int
    optim: str = "adamw"
    one_width: bool = False  # of all micro-batches, as the stages of a pipeline have them
    offloads: bool = False  # hidden states to host memory, of longer rows
    tile: int | None = None  # tokens of an MLP's tile

    def __str__(self) -> str:
        rest = "packed" * self.packed or "padded", "tied" * self.tied or "untied", self.micro_steps
        words = (self.method, self.precision, self.checkpointing, *rest)
        others = (self.optim,) * (self.optim != "adamw") + (f"tiles of {self.tile}",) * (self.tile is not None)
        return "-".join(map(str, (*words, *others, *("offloads",) * self.offloads)))

    def recipe(self, folder: Path) -> Recipe:
        return Recipe(
            model=ModelSection(
                name_or_path=str(folder / MIXED.get(self.method, "tied" if self.tied else "untied")),
                attention="auto" if self.packed else "sdpa",
            ),
            quantization=QUANTIZATIONS.get(self.method),
            lora=None if self.method == "full" else Lora(r=4, **ADAPTERS.get(self.method, {})),
            data=Data(train=[DataSet(path="json", data_files="unused.jsonl")]),
            training=Training(
                optim=self.optim,  # type: ignore[arg-type]
                activation_checkpointing=self.checkpointing or False,
                activation_offloading=self.offloads,
                mlp_tile_tokens=self.tile,
                **PRECISIONS[self.precision],
            ),
            output_dir=str(folder / "runs" / f"{self}-{os.environ.get('WORLD_SIZE', 1)}"),
        )

    def batches(self) -> list[MicroBatch]:
        lengths: Sequence[tuple[int, ...]] = ((7, 12), (30, 9))[: self.micro_steps]
        if self.one_width:
            lengths = [(39,), (7, 12, 20), (30, 9)] * self.micro_steps
            lengths = lengths[: self.micro_steps]
        if self.offloads:
            lengths = ((300, 724), (90, 5, 410))[: self.micro_steps]
        return [flat_batch(some) if self.packed else padded_batch(some) for some in lengths]  # type: ignore[misc]


def cases(methods: Sequence[str] = ("full", "lora", "qlora")) -> list[Case]:
    """The grid; the number of micro-batches has a period of 5, so that it goes with no axis."""
    grid = product(methods, PRECISIONS, (0, 1, 2), (True, False), (True, False))
    return [Case(*axes, micro_steps=1 + index % 5 % 2) for index, axes in enumerate(grid)]


def padded_batch(lengths: Sequence[int]) -> dict[str, Any]:
    """A row a document, padded to the longest; all is learned."""
    width = max(lengths)
    ids = torch.full((len(lengths), width), 5)
    return {
        "input_ids": ids,
        "position_ids": torch.arange(width).expand(ids.shape).clone(),
        "shift_labels": ids.clone(),
        "supervised": torch.arange(ids.numel()),
    }


def models(folder: Path, layers: int = 3) -> Path:
    """The two models of the grid, and one of experts."""
    for name in ("tied", "untied"):
        save_tiny(folder / name, tie_word_embeddings=name == "tied", num_hidden_layers=layers)
    for family in {*MIXED.values()}:
        save_mixture(folder / family, family)
    return folder


def planned(
    case: Case, folder: Path, strategy: str = "single", ranks: int = 1, node: int = 0, rank: int = 0
) -> dict[str, tuple[int, int]]:
    """Peak and final bytes by phase, as the timeline has them; it agrees with the ledger that wrote it."""
    where: dict[str, int] = {"ranks": ranks, "rank": rank, "node": node}
    done = trace(case.recipe(folder), read_strategy(strategy), case.batches(), **where)  # type: ignore[arg-type]
    found = {name: (phase.peak.nbytes, phase.end_bytes) for name, phase in done.timeline.phases("cpu").items()}
    assert found == {name: (phase.peak_bytes, phase.allocated_bytes) for name, phase in done.measured.items()}
    return found


def tracked(case: Case, folder: Path, strategy: str = "single") -> dict[str, tuple[int, int]]:
    """The same of a real training, by the trainer's own measurement."""
    recipe, ways = case.recipe(folder), read_strategy(strategy)
    AcceleratorState._reset_state(reset_partial_state=True)  # as accelerate's own tests do
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    launch = Launch((), None, None, True, ranks, rank, on_cpu=True, local_rank=rank % node, local_world_size=node)
    accelerator: Accelerator = build_accelerator(recipe, ways, launch)
    phases = Phases(accelerator.device, enabled=True)
    with phases("load"):
        parts = assemble(recipe, ways, accelerator, launch=None)
        gc.collect()  # a head that ZeRO-3 cut before it was tied waits for it
    parts.model.train()
    rows = ways.data_rank_count(ranks)
    supervised = rows * sum(int((batch["shift_labels"] != -100).sum()) for batch in case.batches())
    step = StepParts(
        accelerator=accelerator,
        model=parts.model,
        optimizer=parts.optimizer,
        objective=Supervised(),
        phases=phases,
        max_grad_norm=1.0,
        strategy=ways,
        weights=cast_weights(recipe, ways, parts.unwrapped_model),
        pipeline=parts.pipeline,
    )
    for _ in range(STEPS):
        batches = case.batches()  # each step has its own
        if rank % (stages := ways.stage_count(ranks)) < stages - 1:
            batches = [without_learning(batch) for batch in batches]
        optimizer_step(
            step,
            prefetch(batches, accelerator.device, non_blocking=True),
            micro_steps=len(batches),
            planned_count=supervised,
            seed=42,
            stop=False,
        ).result()
    del batches
    with phases("save"):
        save(recipe, parts, TrainState(step=STEPS), in_the_foreground())
    release_engine(accelerator)
    return {name: (phase.peak_bytes, phase.allocated_bytes) for name, phase in phases.take().items()}


def tracked_on_ranks(
    some: Sequence[Case], folder: Path, strategy: str, ranks: int = 2, node: int = 0
) -> list[dict[str, tuple[int, int]]]:
    """By so many gloo processes, `node` of them a machine; what rank 0 tracked of each case."""
    return [of_ranks[0] for of_ranks in tracked_on_each_rank(some, folder, strategy, ranks, node)]


def tracked_on_each_rank(
    some: Sequence[Case], folder: Path, strategy: str, ranks: int = 2, node: int = 0
) -> list[list[dict[str, tuple[int, int]]]]:
    """By so many gloo processes, `node` of them a machine; of each case what each rank tracked."""
    ports = free_ports(len(some))  # each training meets at a port of its own: the last one's may still be held
    lines = [json.dumps([port, asdict(case)]) for port, case in zip(ports, some, strict=True)]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    own |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(node or ranks)}
    with ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = []
        for rank in range(ranks):
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, str(folder), strategy, *lines],
                env=os.environ | own | {"RANK": str(rank), "LOCAL_RANK": str(rank % int(own["LOCAL_WORLD_SIZE"]))},
                stdout=said[rank],
                stderr=errors[rank],
            )
            stack.callback(process.wait)
            stack.callback(process.kill)  # before it is waited for: a rank whose partner died waits for it
            processes.append(process)
        for process in processes:
            process.wait(timeout=900)
        for file in (*said, *errors):
            file.seek(0)
        told = [[line.removeprefix("tracked ") for line in file if line.startswith("tracked ")] for file in said]
        assert {len(lines) for lines in told} == {len(some)}, "".join(file.read()[-3000:] for file in errors)
    found = [[{name: tuple(pair) for name, pair in json.loads(line).items()} for line in lines] for lines in told]
    return [list(of_ranks) for of_ranks in zip(*found, strict=True)]


def differences(
    planned_here: dict[str, Any],
    tracked_here: dict[str, Any],
    only_ends: Sequence[str] = ("load",),
    phases: Sequence[str] = PHASES,
) -> Iterator[str]:
    """What differs, to the byte. Of some phases only the end is held: reading a file makes temporaries of its own."""
    assert list(planned_here) == list(tracked_here) == list(phases)
    for name, here in planned_here.items():
        there = tracked_here[name]
        if here[1] != there[1] or (name not in only_ends and here[0] != there[0]):
            yield f"{name}: tracked {there}, planned {here}"


def main(words: Sequence[str]) -> None:
    folder, strategy, *lines = words
    let_go_at_once()
    if read_strategy(strategy).kind == "deepspeed":
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False  # compiled on first use, and of no use here
    for line in lines:
        port, case = json.loads(line)
        os.environ["MASTER_PORT"] = str(port)
        found = tracked(Case(**case), Path(folder), strategy)
        print("tracked", json.dumps(found), flush=True)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
