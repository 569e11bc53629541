"""One training on tensors without data, from loading to saving: its timeline.

`assemble` and `optimizer_step` are the trainer's own. No model, loss, optimizer or step is written a second time here.

A trace replaces these names while it runs. Most are not public, so they may change with any version of torch and
DeepSpeed. tests/planner compares traces with measured runs under each supported version.

    name                                           replaced by
    torch.nn.parallel.DistributedDataParallel      stand_ins.Replica, because the reducer is C++
    torch.distributed.isend, irecv                 stand_ins.sends_of_a_pipeline: there is no peer
    torch.distributed.broadcast_object_list        nothing: there is no peer, and pickles would count as memory
    accelerate.utils.other.is_deepspeed_available  no, under other strategies: the import takes a second
    DeepSpeed's accelerator and compiled parts     stand_ins.engine_without_ranks
    bitsandbytes' paged memory                     fake_model.host_pages
    masks, DTensor's shapes, FSDP2's chunks        fake_model.no_data
    the loss's chunks, for memory alone            stand_ins.few_chunks
    RoundedAdamW's compiled update                 stand_ins.fuse_update: one operation, without temporaries
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from torch import nn
from transformers import PreTrainedModel

from finetune.architecture.compiled.layers import why_left_off
from finetune.architecture.operations import nested_tensors
from finetune.closed_form.constants import CUBLAS_WORKSPACE_HOPPER
from finetune.launch.launcher import Launch
from finetune.measure.phases import Phase
from finetune.model.build import decoder_parts
from finetune.model.dtypes import COMPUTE
from finetune.model.optimizer import unwrap_optimizer
from finetune.planner.trace import stand_ins
from finetune.planner.trace.fake_device import pretend_device
from finetune.planner.trace.fake_model import dataless_build, host_pages, no_data
from finetune.planner.trace.flops import Halves, Operation, count_operations
from finetune.planner.trace.kernel_workspaces import workspaces
from finetune.planner.trace.pinned_memory import pinned_memory
from finetune.planner.trace.recorder import Recorder, tagging
from finetune.planner.trace.step_work import StepWork, per_step
from finetune.planner.trace.timeline import Timeline
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.run_folder.save_restore import checkpoint_tensors
from finetune.run_folder.tensor_checks import largest_magnitude
from finetune.strategies.accelerator import build_accelerator
from finetune.strategies.assemble import Assembled, assemble
from finetune.strategies.fsdp import make_mesh
from finetune.strategies.pieces import local_shard
from finetune.strategies.pipeline.build import parts_of_recipe
from finetune.tokens.batches import MicroBatch, changed_tensors, prefetch, without_learning
from finetune.training.cast_weights import cast_weights
from finetune.training.objectives import objective_of
from finetune.training.run import StepParts
from finetune.training.step import optimizer_step

STEPS = 2  # the first makes the optimizer's state at its end, so the second has it beside everything else
# Accelerate sets these for its own plugins, and the next Accelerator in this process reads them again.
PLUGIN_SETTINGS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "FSDP_CPU_RAM_EFFICIENT_LOADING")


@dataclass(frozen=True)
class Traced:
    """A trace's result."""

    timeline: Timeline
    measured: dict[str, Phase]  # the trainer's own measurement
    operations: Mapping[Operation, int]  # in all steps, by layers as they are written
    work: StepWork  # in one forward, one backward and one update
    stage_layers: tuple[range, ...] = ()  # the layers in a pipeline stage's runs


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
    first_batches: Sequence[MicroBatch] | None = None,
) -> Traced:
    """The timeline for one of `ranks`: load, two optimizer steps over `batches` each, save.

    The trace creates process-wide state in Accelerate, DeepSpeed and torch's process groups, and removes it afterwards.
    So do not call it in a process that trains.

    Args:
        rank: Its number; above 0 only under a pipeline, where ranks differ.
        node: Ranks on one machine; 0: all of them.
        gpu: Compute on a GPU: the timeline's device is fake_device.py's DEVICE_NAME, and host memory is "cpu".
            Otherwise everything is on the CPU.
        cublas: A cuBLAS workspace's bytes, if `gpu`.
        first_batches: In the first step, in place of `batches`. The loss then takes three chunks of tokens at most,
            because the others repeat the second one's memory. Only memory is right.
    """
    strategy = stand_ins.without_disks(strategy)
    # ZeRO's engine has one number format; its third stage partitions each weight as it is loaded.
    dtype = None
    if strategy.uses_engine:
        dtype = COMPUTE[recipe.training.mixed_precision] or torch.float32
    build = build_on_device = dataless_build(recipe, dtype=dtype)
    objective = objective_of(recipe)
    units = sum(objective.count(batch) for batch in batches)
    # A row whose positions restart has several documents, or padding.
    masks = any(bool((batch["position_ids"].diff(dim=1) != 1).any()) for batch in batches)
    # Registered for a CPU's plan too. Autograd's engine reads the kinds of devices once, at a process's first backward,
    # and aborts at a tensor on a device that is registered later (torch 2.13).
    device = pretend_device()
    if not gpu:
        device = torch.device("cpu")
    layout = parts_of_recipe(recipe) if strategy.schedule else None
    stages = strategy.stage_count(ranks)
    if rank % stages != stages - 1:  # only a pipeline's last stage has a loss
        batches = [without_learning(batch) for batch in batches]
    with ExitStack() as stack:
        accelerator = stack.enter_context(fake_accelerator(recipe, strategy, device, ranks, rank, node or ranks))
        if strategy.uses_engine and gpu:
            stand_ins.as_on_gpus(accelerator, strategy)
        if strategy.uses_engine and strategy.shards_parameters:
            partition = stand_ins.partitioner(accelerator, adapters=recipe.lora is not None)

            def build_partitioned(recipe: Recipe, _: torch.device, **options: Any) -> nn.Module:
                # On the device, quantised weights too. A run moves those there from the host; fake tensors cannot.
                return build_on_device(recipe, accelerator.device, on_parameter=partition, **options)

            build = build_partitioned
        mesh = make_mesh(strategy, device) if strategy.shards_modules else None
        stack.enter_context(mock.patch.object(nn.parallel, "DistributedDataParallel", stand_ins.Replica))
        if strategy.schedule is not None:
            stack.enter_context(stand_ins.sends_of_a_pipeline(gloo=not gpu))
        if first_batches is not None and recipe.data.unit == "documents":  # a pair's losses are kept by token
            stack.enter_context(stand_ins.few_chunks())
        if OPTIMIZERS[recipe.training.optim].paged:
            stack.enter_context(host_pages())
        fake_mode = stack.enter_context(no_data(float(units), masks=masks))
        recorder = Recorder(device, fake_mode)
        halves = Halves(recorder.phases)
        functions = [tagging(recorder, gloo=not gpu)]
        if gpu:
            functions += [pinned_memory(recorder), workspaces(recorder, device, cublas, recipe.training.deterministic)]
        counting = count_operations(recorder.phases, *functions, current=halves.current, fake_mode=fake_mode)
        operations = stack.enter_context(counting)
        with recorder.phases("load"):
            mesh_ranks = None
            if mesh is not None:  # torch's device mesh keeps the ranks [ranks] int32 in host memory
                mesh_ranks = torch.empty(ranks, dtype=torch.int32, device="cpu")
            parts = assemble(recipe, strategy, accelerator, build, mesh, layout, launch=None)
        if gpu and recipe.training.compile is not False:
            stand_ins.fuse_update(unwrap_optimizer(parts.optimizer))
        model = cast(PreTrainedModel, parts.unwrapped_model)
        stage_layers: tuple[range, ...] = ()
        if parts.pipeline is not None:
            halves.watch(parts.pipeline.runs)
            stage_layers = parts.pipeline.own_layers
        recorder.mark((*map(local_shard, model.parameters()), *model.buffers()), "parameters")

        def fake_batches(step_batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
            made = (changed_tensors(batch, fake_mode.from_tensor) for batch in step_batches)
            # A single CPU process, and DeepSpeed's, computes on the batches that the host holds for the step. Elsewhere
            # they are copied to a device, where one or two are live at a time.
            if strategy.distributed and not strategy.uses_engine and not gpu:
                return made
            return prefetch(list(made), accelerator.device, recipe.training.non_blocking)

        def note_gradients(*_: Any) -> None:
            recorder.mark((parameter.grad for parameter in model.parameters()), "gradients")
            for component, tensors in stand_ins.engine_parts(parts).items():
                recorder.mark(tensors, component)

        def note_copy(name: str, copy: torch.Tensor) -> None:
            recorder.mark([copy], "cast weights")
            recorder.place_in_layer(copy, name)

        unwrap_optimizer(parts.optimizer).register_step_pre_hook(note_gradients)
        step_parts = StepParts(
            accelerator=accelerator,
            model=parts.model,
            optimizer=parts.optimizer,
            objective=objective,
            phases=recorder.phases,
            max_grad_norm=recipe.training.max_grad_norm,
            strategy=strategy,
            weights=cast_weights(recipe, strategy, model, note_copy),
            pipeline=parts.pipeline,
        )
        with recorder.modules(model, decoder_parts(model).get_output_embeddings()):
            parts.model.train()
            for step_batches in (first_batches or batches, *[batches] * (STEPS - 1)):
                # No name for the batches: they end with their step, before the next step makes its own. Every value
                # that is read to the host is `units`, so the sum over all ranks is too.
                optimizer_step(
                    step_parts,
                    fake_batches(step_batches),
                    micro_steps=len(step_batches),
                    planned_count=units,
                    seed=recipe.training.seed,
                    stop=False,
                )
                recorder.mark(nested_tensors(list(parts.optimizer.state.values())), "optimizer state")
        with recorder.phases("save"):
            _copy_as_a_checkpoint(parts)  # a function of its own, so that its tensors end before the phase does
        # The layers of weights and optimizer states, which are allocated outside the layers' modules.
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            recorder.place_in_layer(tensor, name)
            for value in nested_tensors(parts.optimizer.state.get(tensor, {})):
                recorder.place_in_layer(value, name)
        del mesh_ranks
        measured = recorder.phases.take()
        work = per_step(
            operations,
            {name: phase.collectives for name, phase in measured.items()},
            steps=STEPS,
            micro_steps=len(batches),
            gathers_once=strategy.gathers_once,
            reduces_once=strategy.reduces_once,
            compiles=gpu and why_left_off(recipe, strategy, model) is None,
        )
        return Traced(recorder.timeline, measured, operations, work, stage_layers)


@contextmanager
def fake_accelerator(
    recipe: Recipe, strategy: Strategy, device: torch.device, ranks: int, rank: int, node: int
) -> Iterator[Accelerator]:
    """The trainer's Accelerator for one of `ranks`, in a process group without communication.

    Args:
        node: Ranks on one machine.
    """
    before = dict(os.environ)
    for name in PLUGIN_SETTINGS:
        os.environ.pop(name, None)
    AcceleratorState._reset_state(reset_partial_state=True)  # as accelerate's own tests do
    ranks, local_rank = strategy.rank_count(ranks), rank % node
    if strategy.distributed:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # torch has no public fake process group

        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(node), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # else Accelerate does, and warns
        devices = dist.Backend.backend_capability[dist.Backend.FAKE]
        if device.type not in devices:
            devices.append(device.type)
        dist.init_process_group(dist.Backend.FAKE, rank=rank, world_size=ranks, store=FakeStore())
    options: dict[str, Any] = {"local_rank": local_rank, "local_world_size": node}
    launch = Launch((), None, None, True, ranks, rank, on_cpu=True, **options)
    engine: Any = mock.patch("accelerate.utils.other.is_deepspeed_available", return_value=False)
    if strategy.uses_engine:
        engine = stand_ins.engine_without_ranks(device)
    try:
        with engine, mock.patch.object(dist, "broadcast_object_list"):
            accelerator = build_accelerator(recipe, strategy, launch)
            # On CPU ranks it is "cpu:0", which fake tensors do not treat as "cpu".
            PartialState().device = accelerator.state.device = device
            yield accelerator
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


def _copy_as_a_checkpoint(parts: Assembled) -> None:
    """Allocate as a checkpoint does.

    These are a scalar that says whether a tensor is finite, and safetensors' copies of one group in host memory.
    """
    groups = []
    for tensors in checkpoint_tensors(parts).values():
        pieces = (getattr(value, "tensor", value) for value in tensors.values())
        groups.append([getattr(tensor, "_local_tensor", tensor) for tensor in pieces])
    for group in groups:
        for tensor in group:
            largest_magnitude(tensor)
    for group in groups:
        copies = [tensor.contiguous().to("cpu") for tensor in group]
        del copies
