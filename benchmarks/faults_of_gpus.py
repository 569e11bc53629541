"""Faults in what a GPU alone takes: devices, process groups, kernels, memory. A machine without one must notice them.

`python benchmarks/seeded_faults.py` seeds them; each names the tests that must notice.
"""

from __future__ import annotations

from benchmarks.common import Fault

CUDA, THREADS = "strategies/test_as_on_cuda.py", "strategies/test_accelerator.py -k work_on_the_host"
OLDER, PEERS = "strategies/test_older_gpus.py", "strategies/test_peer_access.py"
VARLEN, OFFLOADED = "architecture/test_varlen_kernel.py", "strategies/test_offloaded_state.py"
LOSS = "architecture/test_loss.py"

FAULTS_OF_GPUS = (
    Fault(
        "every rank computes on the first GPU",
        "strategies/accelerator.py",
        'torch.device("cuda", gpu_of_rank(launch.local_rank))',
        'torch.device("cuda", 0)',
        CUDA,
    ),
    Fault(
        "ranks on GPUs are asked for on the CPU",
        "strategies/accelerator.py",
        "cpu=zero is None and on_cpu",
        "cpu=zero is None",
        CUDA,
    ),
    Fault(
        "gradients in host memory have no way to be reduced",
        "strategies/accelerator.py",
        'process_group.backend = "cpu:gloo,cuda:nccl"',
        "process_group.backend = None",
        CUDA,
    ),
    Fault(
        "an optimizer in host memory runs on one thread",
        "strategies/accelerator.py",
        '(device.type == "cpu" or offloaded)',
        'device.type == "cpu"',
        THREADS,
    ),
    Fault(
        "the engine does not overlap",
        "strategies/zero.py",
        '"overlap_comm": not on_cpu',
        '"overlap_comm": False',
        CUDA,
    ),
    Fault(
        "a dropped step's gradients stay under ZeRO-2",
        "strategies/zero.py",
        "self.engine.zero_optimization_stage() == 2",
        "self.engine.zero_optimization_stage() == 3",
        "strategies/test_zero_keys.py -k dropped",
    ),
    Fault(
        "a resumed scale counts from the run's start",
        "strategies/zero.py",
        'self._own.last_overflow_iter = state["overflow"]',
        "pass",
        "strategies/test_zero_keys.py -k grows",
    ),
    Fault(
        "two views of one storage are one tensor",
        "run_folder/saving/own_pieces.py",
        "key = (pointer, tensor.storage_offset(), ",
        "key = (pointer, ",
        "run_folder/saving/test_own_pieces.py",
    ),
    Fault(
        "a rank without files goes by its configuration",
        "strategies/assemble.py",
        "        agree(section, asked.tied)",
        "        pass",
        "strategies/test_agreement.py",
    ),
    Fault(
        "two matrices of a file are never compared",
        "model/stored_structure.py",
        "            if not torch.equal(rows[0].to(dtype), rows[1].to(dtype)):",
        "            if False:",
        "model/test_stored_structure.py",
    ),
    Fault(
        "the engine does not pin",
        "strategies/zero.py",
        '"pin_memory": not on_cpu',
        '"pin_memory": False',
        CUDA,
    ),
    Fault(
        "bfloat16 is emulated",
        "strategies/gpu_needs.py",
        "if capability >= AMPERE or not remedies:",
        "if True:",
        OLDER,
    ),
    Fault(
        "RTX 40 cards ask for each other's memory",
        "strategies/gpu_needs.py",
        "if not missing or check_cuda_p2p_ib_support():",
        "if True:",
        PEERS,
    ),
    Fault(
        "every card is taken for one without a way to the others",
        "strategies/gpu_needs.py",
        "if not missing or check_cuda_p2p_ib_support():",
        "if not missing:",
        PEERS,
    ),
    Fault(
        "ranks of a copy give up after ten minutes",
        "strategies/fsdp.py",
        "dist.new_group(line, timeout=timeout)",
        "dist.new_group(line)",
        "strategies/test_fsdp.py -k wait_as_long",
    ),
    Fault(
        "copies and shards change places",
        "strategies/fsdp.py",
        "for lines in (ranks.T, ranks)]",
        "for lines in (ranks, ranks.T)]",
        "strategies/test_fsdp.py -k wait_as_long",
    ),
    Fault(
        "flash attention is asked in float32",
        "architecture/attention.py",
        "_computed_in(query) == torch.float32 or ",
        "",
        "architecture/test_attention.py -k 16_bits_alone",
    ),
    Fault(
        "flash attention is asked for before Ampere",
        "architecture/attention.py",
        " or not has_flash(query.device)",
        "",
        OLDER,
    ),
    Fault(
        "chunks keep the documents' ends",
        "architecture/attention.py",
        "starts = cu_seq_lens if lengths == document_lengths else _starts(lengths, query.device)",
        "starts = cu_seq_lens",
        "architecture/test_attention.py -k away_from_the_cpu",
    ),
    Fault(
        "groups of queries lead to plain products away from a CPU",
        "architecture/attention.py",
        '(query.device.type != "cpu" or asked.cap)',
        "asked.cap",
        OLDER,
    ),
    Fault(
        "the kernel's window is a token too long",
        "architecture/varlen_kernel.py",
        "else window - 1\n",
        "else window\n",
        VARLEN,
    ),
    Fault(
        "the kernel is not told of groups",
        "architecture/varlen_kernel.py",
        'options["enable_gqa"] = k.shape[1] != q.shape[1]',
        'options["enable_gqa"] = False',
        VARLEN,
    ),
    Fault(
        "a sink's gradient is left out on a GPU",
        "architecture/varlen_kernel.py",
        "ctx.save_for_backward(query, key, value, sinks, starts, output, with_sink)",
        "ctx.save_for_backward(query, key, value, sinks, starts, plain, with_sink)",
        VARLEN,
    ),
    Fault(
        "reserved memory is not told",
        "training/memory_report.py",
        "peak_reserved(device) if on_gpu else None",
        "None",
        CUDA,
    ),
    Fault(
        "a probe is remembered for every card",
        "probe/remembered.py",
        'return f"{torch.cuda.get_device_name(device)} {major}.{minor}"',
        "return device.type",
        CUDA,
    ),
    Fault(
        "a probe on a GPU computes in float32",
        "probe/judge.py",
        'if device.type == "cpu":\n        return None\n    return torch.bfloat16',
        "if True:\n        return None\n    return torch.bfloat16",
        CUDA,
    ),
    Fault(
        "a GPU's gradient of the head forgets the chunks before",
        "architecture/loss.py",
        "out_dtype=total.dtype, out=total)",
        "out_dtype=total.dtype, beta=0, out=total)",
        LOSS,
    ),
    Fault(
        "chunks of the loss leave tiles half full",
        "architecture/loss.py",
        "max(1, CHUNK_BYTES // (4 * vocabulary * TILE)) * TILE",
        "max(1, CHUNK_BYTES // (4 * vocabulary))",
        LOSS,
    ),
    Fault(
        "a finished run is loaded on the CPU",
        "finished_run/load.py",
        '"cuda" if torch.cuda.is_available() else "cpu"',
        '"cpu"',
        CUDA,
    ),
    Fault(
        "resumed state of offloaded weights lies on the mesh's device",
        "run_folder/trained_tensors.py",
        "local_part(sharded)[0].copy_(state)",
        "sharded = DTensor.from_local(state, parameter.device_mesh, parameter.placements, run_check=False)",
        OFFLOADED,
    ),
    Fault(
        "an installed kernel whose results are not numbers is taken",
        "architecture/flash_kernels.py",
        "if not difference <= LARGEST_DIFFERENCE:  # NaN too",
        "if difference > LARGEST_DIFFERENCE:",
        "architecture/test_flash_kernels.py",
    ),
    Fault(
        "a rank takes a kernel that another cannot",
        "architecture/flash_kernels.py",
        "if without and self.taken is not None:",
        "if False:",
        "architecture/test_flash_kernels.py",
    ),
    Fault(
        "an installed kernel is not switched off again",
        "architecture/flash_kernels.py",
        "        restore_flash_attention_impl()\n",
        "        pass\n",
        "architecture/test_flash_kernels.py",
    ),
)
