"""The reference's log-probabilities of every answer, known before the first step.

`start` is the very model that the run starts from, computed by the run itself: in its number format, under its
strategy, with its micro-batches. No second model is held, and a resumed run reads the values back from its folder. Such
values are kept in the cache folder too, under a key of everything that they depend on.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from finetune.errors import FinetuneError
from finetune.files import cache_folder, read_sealed, write_sealed
from finetune.model.packaged import folder_of
from finetune.recipe.sections.preferences import Dpo, Kto
from finetune.tokens.batches import MicroBatch, prefetch
from finetune.tokens.cache import content_key
from finetune.tokens.mixture import Rows
from finetune.training.objectives.answers import AnswerBatch, answer_batches, model_inputs
from finetune.training.objectives.preferences import Judged, Pairs, Reference
from finetune.training.run import Run
from finetune.training.start import Start

FILE = "reference.json"  # in the run folder
VERSION = 1
# A kept reference is compared with a live one on the first micro-batch: other weights under the same name differ more.
SAME = 0.02  # relative; bfloat16's rounding over a few hundred tokens stays below a tenth of it
ARRAYS = ("answers", "mismatched", "held_out")


def find_reference(run: Run, start: Start, unwrapped: nn.Module, first_step: int) -> dict[str, Any] | None:
    """Give the objective its reference, on every rank; None if it needs none. Returns the receipt's facts.

    Args:
        unwrapped: The model without the strategy's wrapper, as it is before the first step.

    Raises FinetuneError for a resumed run whose folder has no reference: the start is not known any more.
    """
    section, objective = start.recipe.preferences, run.parts.objective
    if section is None or not section.needs_reference:
        return None
    assert isinstance(objective, Pairs | Judged)
    key = reference_key(start, section)
    log = run.terminal.log
    own_file, kept_file = start.run_dir / FILE, cache_folder() / "references" / f"{key}.json"
    shapes = _shapes(run, objective)
    reference: Reference | None
    if first_step > 0:
        reference = _on_all_ranks(run, _read(own_file, None, shapes) if start.launch.is_main else None, shapes)
        if reference is None:
            raise FinetuneError(
                f"{own_file}: the reference of this run's start is not there, or it is another run's or a shorter "
                "run's; restore the file, or start again with training.resume=never"
            )
        objective.reference = reference
        return {"kind": section.reference, "key": key, "from": "the run folder"}
    computing: Callable[[], AbstractContextManager[Any]] = nullcontext
    if section.reference == "adapter_off":
        computing = cast(Any, unwrapped).disable_adapter
    elif section.reference != "start":
        raise FinetuneError(f"reference: {section.reference}: a second model is not supported yet")
    reference = _on_all_ranks(run, _read(kept_file, key, shapes) if start.launch.is_main else None, shapes)
    source = "the cache"
    with computing():
        if reference is not None and not _agrees(run, objective, reference):
            log("reference: the kept one is not this model's; it is computed again")
            reference = None
        if reference is None:
            source = "computed"
            reference = _computed(run, objective, shapes)
    objective.reference = reference
    if start.writes and start.launch.is_main:
        content = _as_json(key, reference)
        write_sealed(own_file, content)
        if source == "computed":
            kept_file.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(kept_file, content)
    answers = int(np.prod(shapes["answers"])) + sum(int(np.prod(shape)) for shape in list(shapes.values())[1:])
    log(f"reference: {section.reference}, log-probabilities of {answers:,} answers, {source} ({key[:12]})")
    return {"kind": section.reference, "key": key, "from": source}


def reference_key(start: Start, section: Dpo | Kto) -> str:
    """The content address of a reference: everything that its values depend on, but not the strategy or the ranks."""
    recipe, plan = start.recipe, start.plan
    names = {"start": recipe.model.name_or_path, "adapter_off": recipe.model.name_or_path}
    name = names.get(section.reference, section.reference)
    revision = recipe.model.revision if name == recipe.model.name_or_path else "main"
    parts = {
        "version": VERSION,
        "kind": section.reference,
        "model": recipe.model.model_dump(mode="json"),
        "files": _files_of(name, revision),
        "adapter": None if start.adapter is None else start.adapter.sha256,
        "lora": None if recipe.lora is None else recipe.lora.model_dump(mode="json"),
        "quantization": None if recipe.quantization is None else recipe.quantization.model_dump(mode="json"),
        "formats": [recipe.training.mixed_precision, recipe.training.pure_bf16],
        "data": start.prepared.fingerprint,
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


def _shapes(run: Run, objective: Pairs | Judged) -> dict[str, tuple[int, ...]]:
    """The arrays of the run's reference."""
    shapes: dict[str, tuple[int, ...]] = {
        "answers": (len(run.train_rows.pool.lengths), 2 if isinstance(objective, Pairs) else 1)
    }
    if isinstance(objective, Judged):
        shapes |= {"mismatched": (run.plan.total_rows,), "held_out": (len(run.eval_rows or ()),)}
    return shapes


def _computed(run: Run, objective: Pairs | Judged, shapes: dict[str, tuple[int, ...]]) -> Reference:
    """The log-probabilities under the present model, in evaluation mode. Every rank calls it."""
    values = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    rows = _all_units(run)
    groups = run.plan.groups(rows, np.arange(len(rows)))
    units = rows.units(np.arange(len(rows)))
    batches = answer_batches(run.plan, rows.documents, groups)
    for found, places in _log_probabilities(run, batches, "answers"):
        values["answers"][units[places]] = found.reshape(len(places), -1)
    if isinstance(objective, Judged):
        for name, own_rows, steps in _streams(run):
            for first, indices in steps:
                others = objective.mismatched_batches(run.plan, own_rows, indices)
                for found, places in _log_probabilities(run, others, f"mismatched answers, {first:,} done"):
                    values[name][[first + place for place in places]] = found
    return Reference(**{name: _summed(run, array) for name, array in values.items()})


def _streams(run: Run) -> Iterator[tuple[str, Rows, Iterator[tuple[int, np.ndarray]]]]:
    """The steps whose mismatched answers are compared: the run's, and the held-out rows as one."""
    plan = run.plan
    steps = ((step * plan.global_batch_size, plan.rows_of(step)) for step in range(plan.total_steps))
    yield "mismatched", run.train_rows, steps
    if run.eval_rows is not None:
        yield "held_out", run.eval_rows, iter([(0, np.arange(len(run.eval_rows)))])


def _log_probabilities(
    run: Run, batches: list[tuple[AnswerBatch, list[int]]], what: str
) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Each micro-batch's answers' log-probabilities on this rank, float32, with their places."""
    parts = run.parts
    parts.model.eval()
    try:
        with torch.no_grad(), parts.weights.cast():
            on_device = prefetch(
                cast(list[MicroBatch], [batch for batch, _ in batches]), parts.accelerator.device, True
            )
            for number, (batch, (_, places)) in enumerate(zip(on_device, batches, strict=True), 1):
                run.terminal.progress(f"reference: {what}, micro-batch {number} of {len(batches)}")
                yield (-parts.model(**model_inputs(batch))).float().cpu().numpy(), places
    finally:
        parts.model.train()


def _all_units(run: Run) -> Rows:
    """Every document that is trained on or held out, once, each a row."""
    sets = [rows for rows in (run.train_rows, run.eval_rows) if rows is not None]
    units = np.unique(np.concatenate([rows.units(np.arange(len(rows))) for rows in sets]))
    return run.train_rows.pool.rows(units, None)


def _agrees(run: Run, objective: Pairs | Judged, reference: Reference) -> bool:
    """Whether a kept reference is what the present model computes for the first micro-batch of every rank."""
    rows = _all_units(run)
    share = run.plan.per_device_batch_size * run.plan.world_size
    indices = np.arange(min(len(rows), share))
    units = rows.units(indices)
    differs = 0
    batches = answer_batches(run.plan, rows.documents, [[int(index)] for index in indices])
    for found, places in _log_probabilities(run, batches, "comparing with the kept one"):
        kept = reference.answers[units[places]].reshape(-1)
        differs += int((np.abs(found - kept) > SAME * np.maximum(np.abs(found), 1.0)).sum())
    return not _summed(run, np.asarray([differs], np.float32))[0]


def _summed(run: Run, values: np.ndarray) -> np.ndarray:
    """The sum over all ranks, of which one has each value and the others zeros."""
    accelerator = run.parts.accelerator
    tensor: Tensor = accelerator.reduce(torch.from_numpy(values).to(accelerator.device), reduction="sum")
    result: np.ndarray = tensor.cpu().numpy()
    return result


def _on_all_ranks(run: Run, found: Reference | None, shapes: dict[str, tuple[int, ...]]) -> Reference | None:
    """Rank 0's reference on every rank."""
    is_there = _summed(run, np.asarray([found is not None], np.float32))[0]
    if not is_there:
        return None
    values = {}
    for name, shape in shapes.items():
        own = np.zeros(shape, np.float32) if found is None else getattr(found, name)
        values[name] = _summed(run, own)
    return Reference(**values)


def _as_json(key: str, reference: Reference) -> dict[str, Any]:
    content: dict[str, Any] = {"key": key}
    for name in ARRAYS:
        if (array := getattr(reference, name)) is not None:
            content[name] = base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode()
    return content


def _read(file: Path, key: str | None, shapes: dict[str, tuple[int, ...]]) -> Reference | None:
    """A kept reference; None if there is none, or if it is not what was written for this key (None: for any)."""
    content = read_sealed(file)
    if not isinstance(content, dict) or key not in (None, content.get("key")):
        return None
    values = {}
    for name, shape in shapes.items():
        array = np.frombuffer(base64.b64decode(str(content.get(name, ""))), "<f4")
        if array.size != int(np.prod(shape)):
            return None
        values[name] = array.reshape(shape).copy()
    return Reference(**values)
