"""`finetune merge`: which base, into which folder, and how well the result agrees with the trained model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from finetune.errors import FinetuneError
from finetune.files import TEMPORARY_PREFIX, check_output, publish_folder, remove_folder, write_json
from finetune.finished_run.agreement import (
    Agreement,
    ComparedDocument,
    Reference,
    agreement_with,
    documents_to_compare,
    run_reference,
)
from finetune.finished_run.load import FinishedRun, best_device, finished_run, fitting, load_adapted, load_whole
from finetune.finished_run.merging import Merge, plan_merge, write_merged
from finetune.model.build import load_tokenizer
from finetune.model.text_part import answering_part, auto_class
from finetune.recipe.schema import Dtype
from finetune.recipe.sections.model import BaseDtype
from finetune.tokens.dataset import prepare
from finetune.wording import counted

# What the adapter of a quantised base can be merged into: the base's own weights, or the dequantised ones that it
# was trained with.
Base = Literal["own", "dequantized"]
NOTHING_LOST = 0.1  # of what the adapter changed (in KL): a merged model that is further off gets a note


def merge_run(
    run_dir: Path,
    *,
    dtype: Dtype | None,
    base: Base | None,
    prompts: int,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write run_dir/merged and its merge.json, and return that.

    Args:
        dtype: The merged weights' format; None: the recipe's `model.dtype`.
        base: None: own, or with a quantised base the one of two that agrees best with the adapter.
        prompts: Held-out documents to compare by; 0: nothing is compared, and dequantized is taken.

    Raises:
        FinetuneError: no finished run with an adapter, a base without safetensors, an adapter that does not fit.
        DoesNotFit: a whole model, which comparing needs, does not fit on the GPU.
    """
    run = finished_run(run_dir)
    if (run_dir / "merged").is_symlink():
        raise FinetuneError(f"{run_dir / 'merged'}: is a link, through which nothing is written; remove it")
    check_output(run_dir / "merged", "merge", folder=True)
    device = best_device()
    merge = plan_merge(run.recipe, run_dir, device)
    chosen: BaseDtype = dtype or run.recipe.model.dtype  # reading a recipe replaces `auto`
    merged: dict[Base, Path] = {}
    try:
        for kind in _candidates(run, base, compared=prompts > 0):
            log(f"merging into {_words(run, kind)}")
            merged[kind] = run_dir / f"{TEMPORARY_PREFIX}merged-{kind}"
            remove_folder(merged[kind])
            write_merged(merge, merged[kind], getattr(torch, chosen), dequantized=kind == "dequantized", log=log)
        agreement = _verify(run, merge, merged, prompts, log) if prompts else None
        best = next(iter(merged)) if agreement is None else _nearest(agreement["candidates"])
        facts: dict[str, Any] = {"base": best, "dtype": chosen, "agreement": agreement, **_sizes(merged[best])}
        facts |= {"started_from": run.recipe.model.adapter} if run.recipe.model.adapter else {}
        write_json(merged[best] / "merge.json", facts)
        publish_folder(merged[best], run_dir / "merged")
    finally:
        for folder in merged.values():
            remove_folder(folder)
    return {"folder": str(run_dir / "merged"), **facts}


def _candidates(run: FinishedRun, base: Base | None, *, compared: bool) -> list[Base]:
    if run.recipe.quantization is None:
        if base == "dequantized":
            raise FinetuneError(
                f"{run.folder}: its base was not quantised, so there is no dequantized one to merge into"
            )
        return ["own"]
    if base is not None:
        return [base]
    if compared:
        return ["dequantized", "own"]
    return ["dequantized"]


def _words(run: FinishedRun, kind: Base) -> str:
    own = "the base's own weights"
    if kind == "own":
        return own
    return "the dequantised weights"


def _sizes(folder: Path) -> dict[str, int]:
    weights = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return {"files": len(weights), "bytes": sum(weights)}


def _verify(
    run: FinishedRun, merge: Merge, merged: Mapping[Base, Path], prompts: int, log: Callable[[str], None]
) -> dict[str, Any]:
    """Figures for each candidate, and for the base without the adapter, from one set of documents."""
    prepared = prepare(run.recipe, load_tokenizer(run.recipe))
    documents = documents_to_compare(prepared, prompts, merge.vocabulary)
    log(f"comparing over {counted(len(documents), 'document')}")
    with fitting(merge.device):
        reference, without = _reference_and_base(run, documents, merge.device)
        candidates = {kind: _compared(folder, reference, merge.device) for kind, folder in merged.items()}
    return {
        "documents": len(documents),
        "held_out": bool(len(prepared.split.held_out)),
        "tokens": reference.tokens,
        "adapter": reference.adapter.as_json(),
        "candidates": {kind: agreement.as_json() for kind, agreement in candidates.items()},
        "base": without.as_json(),
    }


def _reference_and_base(
    run: FinishedRun, documents: Sequence[ComparedDocument], device: torch.device
) -> tuple[Reference, Agreement]:
    """The logits of the base with its adapter, and how far the base alone is from them."""
    adapted: Any = load_adapted(run, device)
    reference = run_reference(adapted, documents)
    if run.base_is_inside:
        with adapted.disable_adapter():
            without = agreement_with(adapted, reference)
    del adapted
    gc.collect()  # peft's model refers to itself in circles, and the next one needs its memory
    if not run.base_is_inside:
        without = agreement_with(load_whole(run, device, tuned=False), reference)
    return reference, without


def _compared(folder: Path, reference: Reference, device: torch.device) -> Agreement:
    """The agreement of the merged model, loaded by plain transformers as its users do."""
    loaded: Any = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype="auto", use_safetensors=True, output_loading_info=True
    )
    model, info = loaded
    wrong = sorted(str(name) for names in info.values() for name in names)
    if wrong:
        raise FinetuneError(f"{folder}: plain transformers misses or finds too much: {', '.join(wrong[:3])}")
    return agreement_with(answering_part(model.to(device).eval()), reference)


def _nearest(candidates: Mapping[Base, Mapping[str, float]]) -> Base:
    return min(candidates, key=lambda kind: candidates[kind]["kl"])


def in_words(facts: Mapping[str, Any]) -> str:
    """The verb's output: the folder, a table, and advice."""
    size = f"{counted(facts['files'], 'file')}, {facts['bytes'] / 1e6:,.0f} MB, {facts['dtype']}"
    start = facts.get("started_from")
    lineage = [f"its training started from the adapter {start}, which is in it"] if start else []
    return "\n".join([*_table(facts), *lineage, f"merged: {facts['folder']} ({size})", *_advice(facts)])


def _table(facts: Mapping[str, Any]) -> Iterator[str]:
    agreement = facts["agreement"]
    if agreement is None:
        yield "not compared with the adapter: --verify is 0"
        return
    kind = "held-out" if agreement["held_out"] else "training (none are held out)"
    documents = f"{agreement['documents']:,} {kind} document{'s' * (agreement['documents'] != 1)}"
    yield f"{counted(agreement['tokens'], 'answer token')} of {documents}, computed in float32:"
    yield f"{'':24}{'same top token':>15}{'mean KL':>11}{'largest logit difference':>26}{'loss':>9}"
    rows = {"the adapter": agreement["adapter"]}
    for kind, figures in agreement["candidates"].items():
        rows["merged" if len(agreement["candidates"]) == 1 else f"merged, {kind} base"] = figures
    rows["the base"] = agreement["base"]
    for name, row in rows.items():
        yield (
            f"{name:24}{row['top1']:>15.2%}{row['kl']:>11.2e}{row['largest_logit_difference']:>26.2e}{row['loss']:>9.4f}"
        )


def _advice(facts: Mapping[str, Any]) -> Iterator[str]:
    agreement = facts["agreement"]
    if agreement is None:
        return
    if len(agreement["candidates"]) > 1:
        loss = min(agreement["candidates"], key=lambda kind: agreement["candidates"][kind]["loss"])
        yield f"base: {facts['base']}, which agrees better with the adapter" + (
            "" if loss == facts["base"] else f"; the loss is lower with {loss}: --base {loss}"
        )
    lost_share = agreement["candidates"][facts["base"]]["kl"] / max(agreement["base"]["kl"], 1e-12)
    if lost_share > NOTHING_LOST and facts["dtype"] != "float32":
        yield f"note: {lost_share:.0%} of what the adapter changed is lost in {facts['dtype']}; take --dtype float32"
