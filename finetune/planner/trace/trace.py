"""One training, from loading to saving, on tensors without data: its timeline.

`assemble` and `optimizer_step` are the trainer's own; nothing of the model, the loss, the optimizer or the step is
written a second time here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch's documentation names it by this path alone
from transformers import PreTrainedModel

from finetune.architecture.compiled.choice import why_left_off
from finetune.closed_form.constants import CUBLAS_WORKSPACE_HOPPER
from finetune.launch.launcher import Launch
from finetune.measure.phases import Phase, Phases
from finetune.model.build import decoder_parts
from finetune.model.dtypes import COMPUTE
from finetune.model.optimizer import unwrap_optimizer
from finetune.planner.trace import stand_ins
from finetune.planner.trace.fake_device import pretend_device
from finetune.planner.trace.fake_model import dataless_build, fake_batch, has_joined_documents, host_pages, no_data
from finetune.planner.trace.flops import Halves, Operation, count_operations
from finetune.planner.trace.kernel_workspaces import workspaces
from finetune.planner.trace.pinned_memory import pinned_memory
from finetune.planner.trace.recorder import Recorder, tagging, tensors_in
from finetune.planner.trace.timeline import Timeline
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.run_folder.save_restore import checkpoint_tensors
from finetune.run_folder.tensor_checks import largest_magnitude
from finetune.strategies.accelerator import accumulation_context, build_accelerator
from finetune.strategies.assemble import Assembled, assemble
from finetune.strategies.fsdp import make_mesh
from finetune.strategies.pipeline.build import parts_of_recipe
from finetune.strategies.zero_state import local_shard
from finetune.tokens.batches import MicroBatch, prefetch, without_learning
from finetune.training.cast_weights import cast_weights
from finetune.training.objectives import objective_of
from finetune.training.step import StepParts, optimizer_step

Build = Callable[..., nn.Module]
STEPS = 2  # the optimizer's state is made at the end of the first, so it is beside everything in the second
# Set by Accelerate for its own plugins, and read again by the next Accelerator of this process.
PLUGIN_SETTINGS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "FSDP_CPU_RAM_EFFICIENT_LOADING")


@dataclass(frozen=True)
class Traced:
    """A trace's result: its record, and the trainer's own measurement."""

    timeline: Timeline
    measured: dict[str, Phase]
    operations: Mapping[Operation, int]  # of all steps, of layers as they are written
    compiles: bool  # a run on a GPU compiles the layers
    stage_layers: tuple[range, ...] = ()  # those of the stage's runs, under a pipeline


def trace(
    recipe: Recipe,
    strategy: Strategy,
    batches: Sequence[MicroBatch],
    *,
    ranks: int = 1,
    rank: int = 0,
    node: int = 0,
    gpu: bool = False,
    cublas: int = CUBLAS_WORKSPACE_HOPPER,
) -> Traced:
    """The timeline for one of `ranks`: load, two optimizer steps over `batches` each, save.

    Process-wide state in Accelerate, DeepSpeed and torch's process groups is created for the trace and removed after
    it. So it is not for a process that trains.

    Args:
        rank: Its number; above 0 only under a pipeline, whose ranks differ.
        node: Ranks on one machine; 0: all of them.
        gpu: Compute on a GPU: the timeline's device is fake_device.py's DEVICE_NAME, and host memory is "cpu".
        Otherwise
            everything is on the CPU.
        cublas: A cuBLAS workspace's bytes, if `gpu`.
    """
    strategy = stand_ins.without_disks(strategy)
    # ZeRO's engine has one number format; its third stage partitions each weight as it is loaded.
    dtype = (COMPUTE[recipe.training.mixed_precision] or torch.float32) if strategy.uses_engine else None
    build = dataless_build(recipe, dtype=dtype)
    supervised = sum(len(batch["supervised"]) for batch in batches)
    masks = any(has_joined_documents(batch) for batch in batches)
    # Registered for a CPU's plan too: autograd's engine reads which kinds of devices exist at a process's first
    # backward, and aborts at a tensor on one that is registered later (torch 2.13).
    pretend = pretend_device()
    layout = parts_of_recipe(recipe) if strategy.schedule else None
    batches = _of_rank(batches, strategy, ranks, rank)
    device = pretend if gpu else torch.device("cpu")
    with _accelerator(recipe, strategy, (ranks, rank), node or ranks, device) as accelerator, ExitStack() as inside:
        if strategy.uses_engine and strategy.shards_parameters:
            build = _partitioning_build(build, accelerator, adapters=recipe.lora is not None)
        mesh = make_mesh(strategy, device) if strategy.shards_modules else None
        inside.enter_context(_without_devices(recipe, strategy, gpu=gpu))
        mode = inside.enter_context(no_data(float(supervised), masks=masks))
        recorder = Recorder(device, mode)
        halves, around = Halves(recorder.phases), [tagging(recorder, gloo=not gpu)]
        if gpu:
            around += [pinned_memory(recorder), workspaces(recorder, device, cublas, recipe.training.deterministic)]
        with count_operations(recorder.phases, *around, current=halves.current, fake_mode=mode) as operations:
            with recorder.phases("load"):
                # The ranks [ranks] int32, which torch's device mesh keeps in host memory.
                numbers = None if mesh is None else torch.empty(ranks, dtype=torch.int32, device="cpu")
                parts = assemble(recipe, strategy, accelerator, build, mesh, layout, launch=None)
            model = cast(PreTrainedModel, parts.unwrapped_model)
            halves.watch(parts.pipeline.runs if parts.pipeline else ())
            recorder.mark((*map(local_shard, model.parameters()), *model.buffers()), "parameters")
            with recorder.modules(model, decoder_parts(model).get_output_embeddings()):
                _train(recipe, strategy, accelerator, parts, recorder, mode, batches, supervised)
            _save(parts, recorder.phases)
            _record_layers(parts, recorder)
            del numbers
        compiles = gpu and why_left_off(recipe, strategy, model) is None
        held = () if parts.pipeline is None else parts.pipeline.own_layers
        return Traced(recorder.timeline, recorder.phases.take(), operations, compiles, held)


def _of_rank(batches: Sequence[MicroBatch], strategy: Strategy, ranks: int, rank: int) -> Sequence[MicroBatch]:
    """The last stage of a pipeline learns alone."""
    stages = strategy.stage_count(ranks)
    if rank % stages == stages - 1:
        return batches
    return [without_learning(batch) for batch in batches]


@contextmanager
def _without_devices(recipe: Recipe, strategy: Strategy, *, gpu: bool) -> Iterator[None]:
    """Stand-ins for DDP's reducer, for a pipeline's sends, and for memory that CUDA moves."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.parallel, "DistributedDataParallel", stand_ins.Replica))
        if strategy.schedule is not None:
            stack.enter_context(stand_ins.sends_of_a_pipeline(gloo=not gpu))
        if OPTIMIZERS[recipe.training.optim].paged:
            stack.enter_context(host_pages())
        yield


def _partitioning_build(build: Build, accelerator: Accelerator, *, adapters: bool) -> Build:
    """Partition each weight as it is created, on the device. This includes a quantised one, which a run moves there
    from the host itself; fake tensors cannot.
    """
    partition = stand_ins.partitioner(accelerator, adapters=adapters)

    def building(recipe: Recipe, _: torch.device, **options: Any) -> nn.Module:
        return build(recipe, accelerator.device, on_parameter=partition, **options)

    return building


def _step_batches(
    recipe: Recipe, strategy: Strategy, accelerator: Accelerator, mode: FakeTensorMode, batches: Sequence[MicroBatch]
) -> Iterator[MicroBatch]:
    """The batches of one step. Where they are copied to a device, one or two are there at a time; a single CPU process,
    and DeepSpeed's, computes on those that the host holds for the step."""
    on_host: Iterator[MicroBatch] = (fake_batch(mode, batch) for batch in batches)
    if not strategy.distributed or strategy.uses_engine or accelerator.device.type != "cpu":
        return prefetch(list(on_host), accelerator.device, recipe.training.non_blocking)
    return on_host


def _train(
    recipe: Recipe,
    strategy: Strategy,
    accelerator: Accelerator,
    parts: Assembled,
    recorder: Recorder,
    mode: FakeTensorMode,
    batches: Sequence[MicroBatch],
    supervised: int,
) -> None:
    parts.model.train()
    for _ in range(STEPS):
        stream = _step_batches(recipe, strategy, accelerator, mode, batches)
        _step(recipe, strategy, accelerator, parts, recorder, stream, len(batches), supervised)
        del stream  # before the next step's are made


def _step(
    recipe: Recipe,
    strategy: Strategy,
    accelerator: Accelerator,
    parts: Assembled,
    recorder: Recorder,
    batches: Iterator[MicroBatch],
    micro_steps: int,
    supervised: int,
) -> None:
    def note_gradients(*_: Any) -> None:
        recorder.mark((parameter.grad for parameter in parts.unwrapped_model.parameters()), "gradients")
        for component, tensors in stand_ins.engine_parts(parts).items():
            recorder.mark(tensors, component)

    def note_copy(name: str, copy: torch.Tensor) -> None:
        recorder.mark([copy], "cast weights")
        recorder.place_in_layer(copy, name)

    handle = unwrap_optimizer(parts.optimizer).register_step_pre_hook(note_gradients)
    step_parts = StepParts(
        accelerator=accelerator,
        model=parts.model,
        optimizer=parts.optimizer,
        objective=objective_of(recipe),
        phases=recorder.phases,
        max_grad_norm=recipe.training.max_grad_norm,
        skip_gradient_sync=accumulation_context(accelerator, strategy, parts.model),
        weights=cast_weights(recipe, strategy, parts.unwrapped_model, note_copy),
        pipeline=parts.pipeline,
    )
    # Every value that is read to the host is this number, so the sum over all ranks is too.
    optimizer_step(
        step_parts,
        batches,
        micro_steps=micro_steps,
        planned_count=supervised,
        seed=recipe.training.seed,
        stop=False,
    )
    handle.remove()
    recorder.mark(tensors_in(list(parts.optimizer.state.values())), "optimizer state")


def _record_layers(parts: Assembled, recorder: Recorder) -> None:
    """Record the layers that weights and optimizer state belong to. They are allocated outside the layers' modules."""
    for name, tensor in (*parts.unwrapped_model.named_parameters(), *parts.unwrapped_model.named_buffers()):
        recorder.place_in_layer(tensor, name)
        for value in tensors_in(parts.optimizer.state.get(tensor, {})):
            recorder.place_in_layer(value, name)


def _save(parts: Assembled, phases: Phases) -> None:
    with phases("save"):
        _copy_as_a_checkpoint(parts)  # a function of its own: what it holds ends before the phase does


def _copy_as_a_checkpoint(parts: Assembled) -> None:
    """Allocate as a checkpoint does: a scalar that says whether a tensor is finite, and safetensors' copies of a group
    in host memory.
    """
    groups = []
    for tensors in checkpoint_tensors(parts).values():
        pieces = (getattr(value, "tensor", value) for value in tensors.values())
        groups.append([getattr(tensor, "_local_tensor", tensor) for tensor in pieces])
    for local in groups:
        for tensor in local:
            largest_magnitude(tensor)
    for local in groups:
        copies = [tensor.contiguous().to("cpu") for tensor in local]
        del copies


@contextmanager
def _accelerator(
    recipe: Recipe, strategy: Strategy, place: tuple[int, int], node: int, device: torch.device
) -> Iterator[Accelerator]:
    """The trainer's Accelerator in a process group without communication; `place`: the number of ranks, and ours."""
    before = dict(os.environ)
    for name in PLUGIN_SETTINGS:
        os.environ.pop(name, None)
    AcceleratorState._reset_state(reset_partial_state=True)  # as accelerate's own tests do
    ranks, rank = strategy.rank_count(place[0]), place[1]
    if strategy.distributed:
        _pretend_ranks(ranks, rank, node, device)
    launch = Launch((), None, None, True, ranks, rank, on_cpu=True, local_rank=rank % node, local_world_size=node)
    try:
        # Else Accelerate imports DeepSpeed, where it is installed, for an isinstance check: a second.
        no_engine = mock.patch("accelerate.utils.other.is_deepspeed_available", return_value=False)
        # There are no other ranks to broadcast to, and the pickled object would be counted as memory.
        no_broadcast = mock.patch.object(dist, "broadcast_object_list")
        with stand_ins.engine_without_ranks(device) if strategy.uses_engine else no_engine, no_broadcast:
            accelerator = build_accelerator(recipe, strategy, launch)
            if strategy.uses_engine and device.type != "cpu":
                stand_ins.as_on_gpus(accelerator, strategy)
            # On CPU ranks it is "cpu:0", which fake tensors do not treat as "cpu".
            PartialState().device = accelerator.state.device = device
            yield accelerator
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


def _pretend_ranks(ranks: int, rank: int, node: int, device: torch.device) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch has no public fake process group

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % node), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(node), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # else Accelerate sets them, and warns
    devices = dist.Backend.backend_capability[dist.Backend.FAKE]
    if device.type not in devices:
        devices.append(device.type)
    dist.init_process_group(dist.Backend.FAKE, rank=rank, world_size=ranks, store=FakeStore())
