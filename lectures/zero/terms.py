"""What ZeRO keeps on a GPU, by closed terms read from DeepSpeed's sources: an engine that cannot be traced.

Of P parameters, N ranks, b bytes a parameter. Everything here is bytes; what the model itself makes (activations,
logits, workspaces) comes from elsewhere and is added.

    term                    where DeepSpeed 0.19 makes it                                   stages
    parameters              whole bP; under stage 3 each rank's bP/N                        all
    masters                 float32 partition, stage_1_and_2.py single_partition_of_...     not where offloaded
    gradients               whole bP (1); averaged partition (2); flat partition (3)        not where offloaded (2, 3)
    moments                 two float32 a partition, from the first update on               not where offloaded
    reduce bucket           reduce_bucket_size elements, ipg_buckets                        1, 3 (2 frees it)
    host staging            largest parameter, temp_grad_buffer_for_gpu_offload             2 with offload
    gathered                parameters that are whole at the moment                         3
    prefetch bucket         stage3_prefetch_bucket_size elements, after forward             3

The planner traces the engine itself (planner/trace/stand_ins.py); these terms explain what others measured, with
DeepSpeed's own sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_BUCKET = 500_000_000  # elements; DeepSpeed's own, 2 GB in float32 whatever the model
DEFAULT_PREFETCH = 50_000_000  # elements
FLOAT32 = 4


@dataclass(frozen=True)
class ZeroJob:
    """One training under ZeRO."""

    stage: int
    parameters: int
    largest: int  # elements of the largest parameter
    ranks: int
    param_bytes: int = FLOAT32
    offload: bool = False
    bucket: int = DEFAULT_BUCKET


def zero_terms(job: ZeroJob, *, updated: bool, gathered: int, prefetched: bool = False) -> dict[str, int]:
    """Bytes on one GPU by term; those that are 0 are left out.

    Args:
        updated: An optimizer update has been made, so its moments exist (under fp16 the first ones may be skipped).
        gathered: Elements of parameters that are whole at this moment under stage 3.
        prefetched: A forward of stage 3 has just ended.
    """
    b, here = job.param_bytes, job.parameters // job.ranks
    on_gpu = not job.offload
    gradients = {1: b * job.parameters, 2: b * here * on_gpu, 3: b * here * on_gpu}[job.stage]
    found = {
        "parameters": b * job.parameters if job.stage < 3 else b * here * on_gpu,
        "masters": FLOAT32 * here * on_gpu,
        "gradients": gradients,
        "moments": 2 * FLOAT32 * here * on_gpu * updated,
        "reduce bucket": b * job.bucket * (job.stage != 2),
        "host staging": b * job.largest * (job.stage == 2 and job.offload),
        "gathered": b * gathered * (job.stage == 3),
        "prefetch bucket": b * DEFAULT_PREFETCH * (job.stage == 3 and prefetched),
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


@dataclass(frozen=True)
class Gpt2Step:
    """What a GPT-2 of transformers keeps between the phases of a step, beside weights and states, in bytes."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    batch: int
    tokens: int
    param_bytes: int = FLOAT32

    def retained(self) -> dict[str, int]:
        """By term. Nothing of it is needed after backward: the loop's variables hold it until the next forward.

        The causal mask of each layer is a buffer of one byte an element (positions squared); the outputs keep the
        logits and, through `past_key_values`, views of each layer's query, key and value in one tensor. The 4D mask
        and cuBLAS's workspace (8,519,680 bytes before Hopper) are the rest.
        """
        b, seen = self.param_bytes, self.batch * self.tokens
        return {
            "logits": b * seen * self.vocabulary,
            "keys and values": b * self.layers * seen * 3 * self.hidden,
            "causal masks": self.layers * self.positions**2,
            "attention mask": b * self.batch * self.tokens**2,
            "cuBLAS": 8_519_680,
        }

    def saved(self) -> dict[str, int]:
        """By term, what forward saves for backward beside that: bytes of each token, of a hidden state each h.

        A layer: the inputs of two layer norms and what they give, and attention's output: 5 h; of the MLP, four times
        as wide, the input of its activation, three products on the way (`gelu_new` is written out in Python) and its
        output: 20 h. Two dropout masks of one byte an element, two means and two deviations, and one logarithm a head.
        The head: the last norm's input and output, the embeddings' dropout mask, and what log_softmax gives.
        """
        b, h, seen = self.param_bytes, self.hidden, self.batch * self.tokens
        layer = 25 * h * b + 2 * h + 4 * FLOAT32 + self.heads * FLOAT32
        return {
            "layers": self.layers * seen * layer,
            "head": seen * (2 * h * b + h + 2 * FLOAT32),
            "log softmax": seen * self.vocabulary * b,
        }
