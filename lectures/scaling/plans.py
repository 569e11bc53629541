"""The plans of the lecture `scaling`: memory and time of each size under each strategy, on each number of GPUs.

A size is traced twice: under DDP and under FSDP2, on the GPUs of one machine. HSDP is FSDP2 within each machine, and an
all-reduce of each rank's shard of the gradients between them; its work follows from FSDP2's. A trace of two machines
gave the same operations and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune import planner
from finetune.closed_form.constants import GRADIENTS, MASTERS, OPTIMIZER_STATE, PARAMETERS
from finetune.closed_form.estimate import estimate
from finetune.files import write_json
from finetune.measure.collectives import CollectiveStats
from finetune.planner import CHIPS, Plan, StepTime, StepWork, changed, step_time
from finetune.recipe.gpus import Gpus, parse_gpus
from finetune.recipe.schema import Recipe

GPU, NODE = "A100", 8  # of the published runs: 80 GB, eight on a machine
VOCABULARY, HEAD = 32_128, 128  # T5's; numbers of a head, as in T5 11B
GPU_COUNTS = (8, 16, 64, 128, 512)
ROWS, TOKENS = 8, 512  # of a micro-batch, one on each rank: the batch grows with the ranks
SWEPT_STRATEGIES = ("ddp", "fsdp2", "hsdp")
# The three sizes of T5 that were published (Zhao et al., PyTorch FSDP, 2023, and the notes), as a decoder that the plan
# knows: hidden size and layers are chosen, the MLP's width follows from the number of parameters.
PUBLISHED = {"611M": (611e6, 1024, 36), "2.28B": (2.28e9, 2048, 36), "11.3B": (11.3e9, 4096, 40)}
PUBLISHED_LOSS = 7  # % of a GPU's TFLOP/s, at 11.3B from 8 to 512 GPUs
# The plan sends a ring's bytes from machine to machine over the link of one GPU. With a ring through each GPU's link, a
# machine sends as fast as all of them together, unless NVLink is slower.
ALL_LINKS = replace(CHIPS[GPU], between=NODE * CHIPS[GPU].between)
STATE_PARTS = (PARAMETERS, MASTERS, GRADIENTS, OPTIMIZER_STATE)


@dataclass(frozen=True)
class Cell:
    """One size under one strategy: figures of each number of ranks."""

    work: StepWork
    needed: Mapping[int, int]  # bytes of a GPU by ranks, by the closed form
    times: Mapping[int, StepTime]  # of an optimizer step, by ranks
    all_links: Mapping[int, StepTime]  # the same, were a machine's rings to use the links of all its GPUs
    traced: Plan | None  # on one machine; HSDP has two or more

    @property
    def flops(self) -> float:
        """Of a micro-step on one GPU: matrix products and attention of forward and backward, what is recomputed too."""
        return sum(self.work.flops(phase, "product", "attention") for phase in ("forward", "backward"))

    def teraflops(self, ranks: int, *, all_links: bool = False) -> float:
        """TFLOP/s of one GPU over a whole step."""
        time = (self.all_links if all_links else self.times)[ranks]
        return self.flops * time.layout.micro_steps / time.seconds / 1e12

    def loss(self, *, all_links: bool = False) -> float:
        """Share of a GPU's TFLOP/s that is lost from the fewest ranks to the most."""
        first, last = (self.teraflops(ranks, all_links=all_links) for ranks in (min(self.times), max(self.times)))
        return 1 - last / first


def decoder_config_of(parameters: float, hidden: int, layers: int) -> dict[str, Any]:
    """config.json of a Llama with T5's vocabulary and about so many parameters; its MLP's width is what is left."""
    of_a_layer = (parameters - VOCABULARY * hidden) / layers - 4 * hidden**2
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD,
        "intermediate_size": round(of_a_layer / (3 * hidden) / 8) * 8,
        "max_position_embeddings": TOKENS,
        "tie_word_embeddings": True,
    }


def parameters_of(config: Mapping[str, Any]) -> int:
    """All weights of `decoder_config_of`, its norms too."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    layer = 4 * hidden**2 + 3 * hidden * config["intermediate_size"] + 2 * hidden
    return int(config["vocab_size"] * hidden + layers * layer + hidden)


def with_model(recipe: Recipe, config: Mapping[str, Any], folder: Path) -> Recipe:
    """The recipe on this model, with full rows of TOKENS and one micro-batch of ROWS on each of a machine's GPUs."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", dict(config))
    batch = {"training.per_device_batch_size": ROWS, "training.global_batch_size": ROWS * NODE}
    return changed(recipe, {"model.name_or_path": str(folder), "data.max_length": TOKENS, **batch})


def gpus_of_ranks(ranks: int) -> Gpus:
    """Machines of NODE GPUs."""
    gpus = parse_gpus(f"{ranks // NODE}x{NODE}x{GPU}")
    assert gpus is not None
    return gpus


def plan_size(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[tuple[str, Cell]]:
    """The cells of one size, by strategy. Raises EnvironmentMismatch where the planner cannot trace."""
    traced = {}
    for strategy in SWEPT_STRATEGIES[:2]:
        traced[strategy] = planner.plan(changed(recipe, {"accelerate_config": strategy}), gpus_of_ranks(NODE))
    for strategy in SWEPT_STRATEGIES:
        variant = changed(recipe, {"accelerate_config": strategy})
        hsdp = strategy == "hsdp"
        planned = traced["fsdp2" if hsdp else strategy]
        work = with_copies(planned.work) if hsdp else planned.work
        ranks = [each for each in GPU_COUNTS if not hsdp or each > NODE]
        needed = {each: estimate(variant, config, gpus_of_ranks(each)).needed for each in ranks}
        layouts = {
            # The batch grows with the ranks: each has one micro-batch.
            each: replace(planned.layout, ranks=each, rows=each, copies=each // NODE if hsdp else 1)
            for each in ranks
        }
        times, all_links = (
            {each: step_time(work, chip, layouts[each], planned.layout) for each in ranks}
            for chip in (CHIPS[GPU], ALL_LINKS)
        )
        yield strategy, Cell(work, needed, times, all_links, None if hsdp else planned)


def with_copies(work: StepWork) -> StepWork:
    """FSDP2's work on one machine with HSDP's all-reduces: of what each reduce_scatter leaves on a rank."""
    backward = work.collectives["backward"]
    scattered = backward["reduce_scatter"]
    between = CollectiveStats(scattered.calls, scattered.payload_bytes // NODE)
    return replace(work, collectives={**work.collectives, "backward": {**backward, "all_reduce": between}})


def bytes_a_parameter(weights: int, gradients: int, state: int, stage: int, ranks: int) -> float:
    """What one GPU holds of each parameter under ZeRO's stage: 0 is DDP, and each further one divides one more part."""
    parts = ((state, 1), (gradients, 2), (weights, 3))
    return sum(nbytes / (ranks if stage >= divided_from else 1) for nbytes, divided_from in parts)


def state_bytes(planned: Plan) -> int:
    """What belongs to parameters, at the peak of the update."""
    return sum(planned.phases["step"].peak.parts.get(name, 0) for name in STATE_PARTS)
