"""Numbers and names that several of the planner's folders use. No torch, so that the closed form stays light."""

from __future__ import annotations

STEP_PHASES = ("forward", "backward", "step")  # of an optimizer step; load and save are around it
HALF, FLOAT32 = 2, 4  # bytes of a bfloat16 or float16 number, and of a float32 one

# Outside of the tensors, and so of every trace: measured by others, see docs/planner.md. Bytes.
CUDA_CONTEXT = 500_000_000  # CUDA's own, with the kernels that are loaded
NCCL_BUFFERS = 700_000_000  # of a communicator
CUBLAS_WORKSPACE = 8_519_680  # one a thread that multiplies matrices; ATen/cuda/CublasHandlePool.cpp
CUBLAS_WORKSPACE_HOPPER = 32 * 2**20  # the same from compute capability 9.0 on

# As in the sources that kernel_workspaces.py names.
FLASH_BLOCK = 128  # rows that a block of flash attention's backward works on
SORTED_TOKENS = 3072  # the embeddings' backward sorts token ids where there are more than these
# torch/csrc/distributed/c10d/reducer.hpp: a bucket is full when it has reached these bytes.
DDP_FIRST_BUCKET, DDP_BUCKET = 2**20, 25 * 2**20
# architecture/loss.py: CHUNK_BYTES, TILE and GRADIENT_TOKENS, which imports torch; test_closed_form.py compares
LOSS_CHUNK_BYTES, LOSS_TILE, LOSS_GRADIENT_TOKENS = 256 * 2**20, 256, 2048
ROUNDED_AT_ONCE = 2**23  # elements: ROUNDED_CHUNK of model/optimizers/rounded_adamw.py, compared there too

# A tensor's purpose. Every byte in a plan has one of these components.
COMPONENTS = (
    PARAMETERS := "parameters",
    MASTERS := "masters",  # float32 copies that ZeRO's engine updates; under other strategies the parameters are these
    GRADIENTS := "gradients",  # as the optimizer sees them: of shards where the strategy shards
    UNSHARDED_GRADIENTS := "unsharded gradients",  # of full size, until they are reduced and scattered to the ranks
    OPTIMIZER_STATE := "optimizer state",
    ACTIVATIONS := "activations",  # made by forward, and by recomputation in backward
    LOGITS_AND_LOSS := "logits and loss",
    GATHERED_LAYERS := "gathered layers",  # unsharded weights
    CAST_WEIGHTS := "cast weights",  # copies in the computation's number format
    COMMUNICATION_BUFFERS := "communication buffers",
    QUANTISATION_WORKSPACE := "quantisation workspace",  # 4-bit weights, dequantised for a matrix product
    BACKWARD_WORKSPACE := "backward workspace",  # gradients of activations, and of weights before they are accumulated
    OTHER := "other",  # batches, norms, temporaries of an update
)


def loss_chunk_rows(vocabulary: int) -> int:
    """Tokens to which the loss applies the head at once; architecture/loss.py: chunk_rows."""
    return max(1, LOSS_CHUNK_BYTES // (FLOAT32 * vocabulary * LOSS_TILE)) * LOSS_TILE


def loss_gradient_rows(vocabulary: int, hidden: int) -> int:
    """Tokens whose slopes wait for one addition to a trained head's gradient; architecture/loss.py: gradient_rows."""
    chunk = loss_chunk_rows(vocabulary)
    return max(1, min(LOSS_GRADIENT_TOKENS, hidden - 2 * chunk) // chunk) * chunk


def rounded_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not less."""
    return -(-number // multiple) * multiple
