"""Memory that CUDA kernels allocate and free within one operation, which a trace does not see.

Read from the sources of torch 2.13 (ATen/native/transformers/cuda/flash_attn/flash_api.cpp and attention_backward.cu,
native/cuda/ForeachReduceOp.cu, native/cuda/EmbeddingBackwardKernel.cu) and bitsandbytes 0.50 (backends/cuda/ops.py):

    operation                     workspace
    flash attention, backward     dq summed in float32, rows rounded up to 128; one float32 a row and head; where
                                  heads share keys, dk and dv of each head before they are summed
      where deterministic         multiprocessors / (sequences x heads) such sums, rounded up
    memory-efficient, backward    dq summed in float32, rows rounded up to 64, and one float32 a row and head
    4-bit matrix product          the weight, dequantised, and its scales in float32
    foreach norm                  one float32 for each 65,536 elements of the largest tensor, for each tensor
    embedding, backward           token ids sorted, twice, and partial sums of up to 1.1 rows a token
    matrix products               cuBLAS keeps a workspace for each thread that calls it: forward's and backward's
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from finetune.closed_form.constants import FLASH_BLOCK, FLOAT32, SORTED_TOKENS, rounded_up
from finetune.planner.trace.recorder import AroundOperation, Recorder

EFFICIENT_BLOCK = 64
NORM_CHUNK = 65_536  # elements
MULTIPROCESSORS = 188  # of the largest GPU so far (RTX PRO 6000 Blackwell); H200 132, RTX 4090 128
MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


def _flash(*arguments: Any) -> int:
    """grad_output, query, key and others: dq_accum [rows, heads, rounded head_dim] and softmax_d [heads, rows] in
    float32, dk_expanded and dv_expanded: key and value with the query's heads, in their format, if heads share keys.
    """
    query, key = arguments[1:3]
    rows, _ = _rows_and_sequences(arguments)
    heads, key_heads = query.shape[1], key.shape[1]
    expanded = 0 if heads == key_heads else 2 * key.numel() // key_heads * heads * key.element_size()
    return int(rows * heads * (_rounded_head(query) + 1) * FLOAT32 + expanded)


def _rows_and_sequences(arguments: Sequence[Any]) -> tuple[int, int]:
    """Rows of the kernel's sums, and sequences. mha_bwd's query is [batch, heads, tokens, head_dim].

    mha_varlen_bwd's is [tokens, heads, head_dim]; its documents are a block apart.
    """
    query: torch.Tensor = arguments[1]
    if query.ndim == 4:
        return query.shape[0] * rounded_up(query.shape[2], FLASH_BLOCK), query.shape[0]
    documents: int = arguments[6].numel() - 1
    return query.shape[0] + FLASH_BLOCK * documents, documents


def _rounded_head(query: torch.Tensor) -> int:
    return rounded_up(query.shape[-1], 32 if query.shape[-1] <= 128 else 64)


def deterministic_sums(name: str, arguments: Sequence[Any]) -> int:
    """Bytes of a deterministic kernel's dq_accum in float32, besides the first one.

    Several blocks sum a row's gradient, each into its own dq_accum, on a GPU with MULTIPROCESSORS. With 4 sequences and
    8 heads these are ceil(188 / 32) = 6 in all.
    """
    if WORKSPACES.get(name, (None, ""))[0] is not _flash:  # the memory-efficient one sums in one block
        return 0
    rows, sequences = _rows_and_sequences(arguments)
    heads = arguments[1].shape[1]
    further = -(-MULTIPROCESSORS // (sequences * heads)) - 1
    return int(further * rows * heads * _rounded_head(arguments[1]) * FLOAT32)


def _efficient(grad_output: torch.Tensor, query: torch.Tensor, *_: Any) -> int:
    """dq's sum [batch, heads, rounded tokens, head_dim] and delta [batch, heads, tokens], float32."""
    batch, heads, tokens, head_size = query.shape
    return batch * heads * (rounded_up(tokens, EFFICIENT_BLOCK) * head_size + tokens) * FLOAT32


def _four_bit(
    inputs: torch.Tensor, weight: torch.Tensor, shape: Sequence[int], absmax: torch.Tensor, block: int, *_: Any
) -> int:
    """The weight [outputs, inputs] in the input's format, and absmax [weights / block] float32."""
    elements = math.prod(shape)
    return elements * inputs.element_size() + elements // block * FLOAT32


def _norm(tensors: Sequence[torch.Tensor], *_: Any) -> int:
    """output_per_tensor [tensors, the largest tensor's chunks] float32."""
    return len(tensors) * -(-max(tensor.numel() for tensor in tensors) // NORM_CHUNK) * FLOAT32


def _embedding(grad_output: torch.Tensor, tokens: torch.Tensor, *_: Any) -> int:
    """For grad_output [T, h]: four [T] in the token ids' format, and partial sums [1.1 T, h] float32.

    The four are sorted ids, their original positions, and a copy of each.
    """
    count = tokens.numel()
    if count <= SORTED_TOKENS:
        return 0
    return 4 * count * tokens.element_size() + count * 11 // 10 * grad_output.shape[-1] * FLOAT32


WORKSPACES: dict[str, tuple[Callable[..., int], str]] = {
    "aten._scaled_dot_product_flash_attention_backward.default": (_flash, "backward workspace"),
    "torch_attn._varlen_attn_backward.default": (_flash, "backward workspace"),
    "aten._scaled_dot_product_efficient_attention_backward.default": (_efficient, "backward workspace"),
    "bitsandbytes.gemm_4bit.default": (_four_bit, "quantisation workspace"),
    "aten._foreach_norm.Scalar": (_norm, "other"),
    "aten.embedding_dense_backward.default": (_embedding, "backward workspace"),
}


def workspaces(recorder: Recorder, device: torch.device, cublas: int, deterministic: bool = False) -> AroundOperation:
    """Record, after each operation's results, the workspace that its kernel allocates in addition to them.

    Args:
        cublas: One cuBLAS workspace's bytes.
        deterministic: Plan the kernels that training.deterministic takes.
    """
    cublas_workspaces: dict[int, torch.Tensor] = {}  # by thread

    def allocate(nbytes: int, component: str) -> torch.Tensor:
        work = torch.empty(nbytes, dtype=torch.uint8, device=device)
        recorder.ledger.see(work)
        recorder.mark([work], component)
        return work

    def with_workspace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        name = str(func)
        if name == "aten.record_stream.default":
            return None
        # This product is added to its `out`. torch 2.11 cannot run it on fake tensors.
        result = kwargs["out"] if name == "aten.addmm.dtype_out" else run()
        thread = threading.get_ident()
        if func.namespace == "aten" and name.split(".")[1] in MATRIX_PRODUCTS:
            if result.device == device and thread not in cublas_workspaces:
                cublas_workspaces[thread] = allocate(cublas, "other")
        elif name in WORKSPACES:
            workspace_bytes, component = WORKSPACES[name]
            first = args[0]
            if isinstance(first, list | tuple):
                first = first[0]
            nbytes = 0
            if first.device == device:
                nbytes = workspace_bytes(*args)
                if deterministic:
                    nbytes += deterministic_sums(name, args)
            if nbytes:
                recorder.ledger.see(result)
                allocate(nbytes, component)
        return result

    return with_workspace
