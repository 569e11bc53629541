"""The reference's log-probabilities of every answer, known before the first step.

`start` is the model that the run starts from. The run itself computes its log-probabilities, in the run's number
format, under its strategy and with its micro-batches. There is no second model in memory. A resumed run reads the
values from its folder. The cache folder keeps them too, under a key made of everything that they depend on.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from finetune.architecture.compiled.layers import CompiledLayers, compile_as_asked
from finetune.architecture.flash_kernels import choose_flash_kernel, widest_head
from finetune.base.location import folder_of
from finetune.errors import FinetuneError
from finetune.files import cache_folder, read_sealed, write_sealed
from finetune.generation.generate import activation_bytes
from finetune.launch.cpu_memory import give_back_freed_memory
from finetune.launch.determinism import deterministic_algorithms
from finetune.measure.metrics import Terminal
from finetune.measure.phases import Phases, give_back_cached_memory, memory_of
from finetune.model.dtypes import COMPUTE
from finetune.recipe.sections.preferences import Dpo, Kto, names_second_model
from finetune.strategies.assemble import Assembled, assemble, check_vocabulary
from finetune.strategies.pieces import all_ranks
from finetune.tokens.batches import prefetch
from finetune.tokens.cache import content_key
from finetune.tokens.mixture import Rows
from finetune.tokens.second_model import as_reference, reference_section
from finetune.training.agreement import Agreed
from finetune.training.batch_plan import BatchPlan
from finetune.training.cast_weights import cast_weights
from finetune.training.objectives import ChosenRows, objective_of
from finetune.training.objectives.answers import AnswerInputs, ReferenceValues, answer_batches, model_inputs
from finetune.training.objectives.preferences import JudgedAnswers, Pairs
from finetune.training.run import Forwards, Run, held_out_sets
from finetune.training.worst_step import compare_fast_paths

KEPT_IN_RUN = "reference.json"  # in the run folder
REFERENCE_FORMAT = 2
# A kept reference is compared with a live one on the first micro-batch: other weights under the same name differ more.
AGREEING = 0.02  # relative; bfloat16's rounding over a few hundred tokens stays below a tenth of it
MORE_ROWS = 4  # times a training step's in a micro-batch
# Micro-batches from which compiling a forward pays: it takes a GPU 5 to 15 s, and saves a few hundredths of one each.
WORTH_COMPILING = 200
VALUES = ("answers", "mismatched", "held_out")


def find_reference(
    run: Run, agreed: Agreed, assembled: Assembled, first_step: int, compiled: CompiledLayers
) -> dict[str, Any]:
    """Give the objective its reference, on every rank. Returns the receipt's facts.

    Args:
        assembled: The model as it is before the first step.

    Raises FinetuneError for a resumed run whose folder has no reference: the start is not known any more.
    """
    section, objective, accelerator = agreed.recipe.preferences, run.parts.objective, run.parts.accelerator
    assert section is not None
    assert isinstance(objective, Pairs | JudgedAnswers)
    key = reference_key(agreed, section)
    say = run.output.terminal.say
    own_file, kept_file = agreed.run_dir / KEPT_IN_RUN, cache_folder() / "references" / f"{key}.json"
    forwards = Forwards.of(run)
    shapes = _shapes(run.train_rows, run.eval_rows, run.plan, objective)
    if first_step > 0:
        source, reference = "the run folder", _read_by_all(accelerator, own_file, None, shapes)
        if reference is None:
            raise FinetuneError(
                f"{own_file}: the reference of this run's start is not there, or it is another run's, a shorter run's "
                "or (KTO) an earlier release's; restore the file, or start again with training.resume=never"
            )
    else:
        source, reference = "the cache", _read_by_all(accelerator, kept_file, key, shapes)
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext
        if section.reference == "adapter_off":
            computing = cast("Any", assembled.unwrapped_model).disable_adapter
        if names_second_model(section):  # keep_second_model has kept it
            assert reference is not None
        with computing():
            if reference is not None and not names_second_model(section) and not _agrees(forwards, reference):
                say("reference: the kept one is not this model's; it is computed again")
                reference = None
            if reference is None:
                source, reference = "computed", _computed(forwards, assembled, compiled, objective, shapes)
        if agreed.writes and agreed.launch.is_main:
            content = _as_json(key, reference)
            write_sealed(own_file, content)
            if source == "computed":
                kept_file.parent.mkdir(parents=True, exist_ok=True)
                write_sealed(kept_file, content)
    objective.reference = reference
    answers = sum(int(np.prod(shape)) for shape in shapes.values())
    origin = source if source == "computed" else f"from {source}"
    say(f"reference: {section.reference}, log-probabilities of {answers:,} answers, {origin} ({key[:12]})")
    return {"kind": section.reference, "key": key, "from": source}


def keep_second_model(agreed: Agreed, accelerator: Accelerator, terminal: Terminal, phases: Phases) -> None:
    """Compute the log-probabilities of a reference that is a model of its own, and keep them in the cache, unless they
    are there. Called before the run's own model is built, so that one of the two is in memory at a time.

    The guard compares its fast modules too.
    """
    section, recipe, plan = agreed.recipe.preferences, agreed.recipe, agreed.plan
    if section is None or not names_second_model(section):
        return
    key = reference_key(agreed, section)
    file = cache_folder() / "references" / f"{key}.json"
    objective = objective_of(recipe)
    assert isinstance(objective, Pairs | JudgedAnswers)
    rows = agreed.prepared
    shapes = _shapes(rows.train, rows.eval, plan, objective)
    if _read_by_all(accelerator, file, key, shapes) is not None:
        return
    # Adapters that are drawn so that they add nothing: a quantised base is built only with some.
    lora = None if recipe.lora is None else recipe.lora.model_copy(update={"init_lora_weights": True})
    other = recipe.model_copy(update={"model": reference_section(recipe), "lora": lora})
    terminal.say(f"reference: computing the log-probabilities of {section.reference}")
    with as_reference(recipe):
        assembled = assemble(other, agreed.strategy, accelerator, launch=agreed.launch)
        check_vocabulary(assembled.decoder, rows.facts["largest_token_id"])
    forwards = Forwards(
        accelerator,
        assembled.model,
        cast_weights(other, agreed.strategy, assembled.unwrapped_model),
        plan,
        rows.train,
        held_out_sets(rows.eval, rows.eval_sets),
        terminal,
        phases,
    )
    decoder, device = assembled.decoder, accelerator.device
    compiled = compile_as_asked(other, agreed.strategy, decoder, device, terminal.say)
    dtype = COMPUTE[recipe.training.mixed_precision] or decoder.dtype
    kernel = choose_flash_kernel(other, device, dtype, widest_head(decoder.config))
    with deterministic_algorithms(recipe.training.deterministic, device):
        # It takes no training step, so its layers are compiled without gradients alone.
        uncompiled = CompiledLayers(required=False, say=terminal.say, stopped="a reference trains nothing")
        assembled.model.train()  # not chained: DeepSpeed's train() returns None
        compare_fast_paths(forwards, assembled, uncompiled, kernel)
        with kernel.active():
            reference = _computed(forwards, assembled, compiled, objective, shapes)
    del assembled, forwards, decoder, compiled
    accelerator.free_memory()
    give_back_freed_memory()
    give_back_cached_memory(accelerator.device)
    if agreed.launch.is_main:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(file, _as_json(key, reference))
    accelerator.wait_for_everyone()


def reference_key(agreed: Agreed, section: Dpo | Kto) -> str:
    """The content address of a reference: everything that its values depend on, but not the strategy or the ranks."""
    recipe, plan = agreed.recipe, agreed.plan
    names = {"start": recipe.model.name_or_path, "adapter_off": recipe.model.name_or_path}
    name = names.get(section.reference, section.reference)
    revision = recipe.model.revision if name == recipe.model.name_or_path else "main"
    parts = {
        "version": REFERENCE_FORMAT,
        "kind": section.reference,
        "model": recipe.model.model_dump(mode="json"),
        "files": _files_of(name, revision),
        "adapter": None if agreed.adapter is None else agreed.adapter.sha256,
        "lora": None if recipe.lora is None else recipe.lora.model_dump(mode="json"),
        "quantization": None if recipe.quantization is None else recipe.quantization.model_dump(mode="json"),
        "formats": [recipe.training.mixed_precision, recipe.training.pure_bf16],
        "data": agreed.prepared.fingerprint,
        "seed": recipe.training.seed,  # of adapters that do not start at zero
    }
    if isinstance(section, Kto):  # which answers are put beside which prompts
        parts["stream"] = [plan.rows, plan.total_rows, plan.global_batch_size, recipe.data.max_length]
    return content_key(parts)


def _files_of(name: str, revision: str) -> list[Any]:
    """A model's files by name, size and time; the Hub's revision where its folder is not known yet."""
    folder = folder_of(name, revision)
    if folder is None:
        return [name, revision]
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".json", ".gguf"))
    stats = [(file.name, file.stat()) for file in files]
    return [name, *((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)]


def _shapes(
    train: Rows, held_out: Rows | None, plan: BatchPlan, objective: Pairs | JudgedAnswers
) -> dict[str, tuple[int, ...]]:
    """The arrays of the run's reference."""
    shapes: dict[str, tuple[int, ...]] = {
        "answers": (len(train.pool.lengths), 2 if isinstance(objective, Pairs) else 1)
    }
    if isinstance(objective, JudgedAnswers):
        shapes |= {"mismatched": (plan.total_rows,), "held_out": (0 if held_out is None else len(held_out),)}
    return shapes


def _computed(
    forwards: Forwards,
    assembled: Assembled,
    compiled: CompiledLayers,
    objective: Pairs | JudgedAnswers,
    shapes: dict[str, tuple[int, ...]],
) -> ReferenceValues:
    """The log-probabilities under the present model, in evaluation mode. Every rank calls it.

    They stay on the device until the last one is computed, so that the device never waits for the host.
    """
    values = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    forwards = replace(forwards, plan=_with_more_rows(forwards, assembled.decoder))
    rows = _all_units(forwards)
    groups = forwards.plan.groups(rows, np.arange(len(rows)))
    units = rows.units(np.arange(len(rows)))
    batches = answer_batches(forwards.plan, rows, groups)
    with compiled.forwards() if len(batches) >= WORTH_COMPILING else nullcontext():
        computed = [
            ("answers", units[places], figures) for figures, places in _log_probabilities(forwards, batches, "answers")
        ]
        if isinstance(objective, JudgedAnswers):
            for name, own_rows, steps in _streams(forwards):
                for first, indices in steps:
                    others = objective.mismatched_batches(ChosenRows(forwards.plan, own_rows, indices))
                    what = f"mismatched answers, {first:,} done"
                    for figures, places in _log_probabilities(forwards, others, what):
                        computed.append((name, np.asarray(places, np.int64) + first, figures))
    compiled.agree(partial(forwards.accelerator.reduce, reduction="sum"), forwards.accelerator.device)
    if computed:
        read = torch.cat([figures for _, _, figures in computed]).cpu().numpy()
        ends = np.cumsum([len(figures) for _, _, figures in computed])
        for (name, stands, _), numbers in zip(computed, np.split(read, ends[:-1]), strict=True):
            values[name][stands] = numbers.reshape(len(stands), *shapes[name][1:])
    return ReferenceValues(**{name: _summed(forwards.accelerator, array) for name, array in values.items()})


def _with_more_rows(forwards: Forwards, decoder: PreTrainedModel) -> BatchPlan:
    """The plan with up to MORE_ROWS times the rows in a micro-batch, since nothing is kept for backward.

    At most half of the free memory is planned for, on the rank with the least, so the pass stays below what is free
    beside a run's weights. Llama-3.1-8B in bf16 takes 4 x 16,384 x 2 = 131,072 bytes a token: 4 x 4,096 tokens are
    2.1 GB.
    """
    plan, ranks = forwards.plan, all_ranks()
    longest = plan.capacity or max(int(rows.lengths.max()) for rows in (forwards.train, *forwards.held_out))
    tokens = plan.per_device_batch_size * longest
    room = memory_of(forwards.accelerator.device).free // 2 // activation_bytes(decoder)
    times = max(1, min(MORE_ROWS, *ranks.gather(room // tokens)))
    return replace(plan, per_device_batch_size=times * plan.per_device_batch_size)


def _streams(forwards: Forwards) -> Iterator[tuple[str, Rows, Iterator[tuple[int, np.ndarray]]]]:
    """The steps whose mismatched answers are compared: the run's, and each held-out data set as one."""
    plan = forwards.plan
    steps = ((step * plan.global_batch_size, plan.rows_of(step)) for step in range(plan.total_steps))
    yield "mismatched", forwards.train, steps
    first = 0
    for part in forwards.held_out:
        yield "held_out", part, iter([(first, np.arange(len(part)))])
        first += len(part)


def _log_probabilities(
    forwards: Forwards, batches: list[AnswerInputs], what: str
) -> Iterator[tuple[Tensor, list[int]]]:
    """Each micro-batch's answers' log-probabilities on this rank, float32 on its device, with their places."""
    model, device = forwards.model, forwards.accelerator.device
    model.eval()
    try:
        with torch.no_grad(), forwards.weights.cast():
            on_device = prefetch([inputs.batch for inputs in batches], device, True)
            for number, (batch, inputs) in enumerate(zip(on_device, batches, strict=True), 1):
                forwards.terminal.progress(f"reference: {what}, micro-batch {number} of {len(batches)}")
                log_probability = -model(**model_inputs(batch, inputs.lengths))
                yield log_probability.float(), inputs.places
    finally:
        model.train()


def _all_units(forwards: Forwards) -> Rows:
    """Every document that is trained on or held out, once, each a row."""
    sets = [forwards.train, *forwards.held_out]
    units = np.unique(np.concatenate([rows.units(np.arange(len(rows))) for rows in sets]))
    return forwards.train.pool.rows(units, None)


def _agrees(forwards: Forwards, reference: ReferenceValues) -> bool:
    """Whether a kept reference is what the present model computes for the first micro-batch of every rank."""
    rows = _all_units(forwards)
    share = forwards.plan.per_device_batch_size * forwards.plan.world_size
    indices = np.arange(min(len(rows), share))
    units = rows.units(indices)
    differs = 0
    batches = answer_batches(forwards.plan, rows, [[int(index)] for index in indices])
    for on_device, places in _log_probabilities(forwards, batches, "comparing with the kept one"):
        figures = on_device.cpu().numpy()
        kept = reference.answers[units[places]].reshape(-1)
        differs += int((np.abs(figures - kept) > AGREEING * np.maximum(np.abs(figures), 1.0)).sum())
    return not _summed(forwards.accelerator, np.asarray([differs], np.float32))[0]


def _summed(accelerator: Accelerator, values: np.ndarray) -> np.ndarray:
    """Sum over ranks. One rank holds each value, the others hold zero."""
    tensor: Tensor = accelerator.reduce(torch.from_numpy(values).to(accelerator.device), reduction="sum")
    result: np.ndarray = tensor.cpu().numpy()
    return result


def _read_by_all(
    accelerator: Accelerator, file: Path, key: str | None, shapes: dict[str, tuple[int, ...]]
) -> ReferenceValues | None:
    """Rank 0's kept reference on every rank; None if rank 0 has none, or one of another key. `key` None accepts all."""
    content = read_sealed(file) if accelerator.is_main_process else None
    values: dict[str, np.ndarray] = {}
    if isinstance(content, dict) and key in (None, content.get("key")):
        # An earlier release put other answers beside the prompts.
        known = "mismatched" not in shapes or content.get("format") == REFERENCE_FORMAT
        for name, shape in shapes.items() if known else ():
            array = np.frombuffer(base64.b64decode(str(content.get(name, ""))), "<f4")
            if array.size == int(np.prod(shape)):
                values[name] = array.reshape(shape).copy()
    if not _summed(accelerator, np.asarray([values.keys() == shapes.keys()], np.float32))[0]:
        return None
    own = {name: values.get(name, np.zeros(shape, np.float32)) for name, shape in shapes.items()}
    return ReferenceValues(**{name: _summed(accelerator, array) for name, array in own.items()})


def _as_json(key: str, reference: ReferenceValues) -> dict[str, Any]:
    content: dict[str, Any] = {"key": key, "format": REFERENCE_FORMAT}
    for name in VALUES:
        if (array := getattr(reference, name)) is not None:
            content[name] = base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode()
    return content
