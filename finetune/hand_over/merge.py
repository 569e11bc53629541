"""`finetune merge`: choose the base, write run_dir/merged, and compare the result with the trained model."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from finetune.errors import FinetuneError
from finetune.files import check_output, making, publish_folder
from finetune.finished_run import FinishedRun, best_device, finished_run, fitting, load_adapted, load_whole
from finetune.hand_over.agreement import agreement_with, documents_to_compare, run_reference
from finetune.hand_over.merged_weights import Merge, plan_merge, write_merged
from finetune.hand_over.own_folder import refuse_foreign, write_record
from finetune.model.new_tokens import load_tokenizer
from finetune.model.text_part import answering_part, auto_class
from finetune.recipe.schema import Dtype
from finetune.recipe.sections.model import BaseDtype
from finetune.tokens.dataset import prepare
from finetune.untrusted.model_folder import ADAPTER_WEIGHTS
from finetune.wording import counted

# A quantised base's adapter can be merged into the base's own weights, or into the dequantised ones of its training.
Base = Literal["own", "dequantized"]
RECORD, WRITTEN = "merge.json", "written"  # in merged/, and its key for the list of files
NOTHING_LOST = 0.1  # share of the adapter's change, in KL: a merged model that loses more gets a note


def merge_run(
    run_dir: Path,
    *,
    dtype: Dtype | None,
    base: Base | None,
    prompts: int,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write run_dir/merged with its merge.json. Returns merge.json and the folder.

    Args:
        dtype: The merged weights' format; None: the recipe's `model.dtype`.
        base: None: own; with a quantised base dequantized, because training saw those weights.
        prompts: Held-out documents to compare by; 0: nothing is compared.

    Raises:
        FinetuneError: no finished run with an adapter, a base without safetensors, an adapter that does not fit.
        DoesNotFit: the comparison loads a whole model, and the GPU has no room for it.
    """
    # Release 0.1.0 had starts that moved a part of the base into the adapter. adapter_config.json names them.
    overrides = ["lora.init_lora_weights=true"] if (run_dir / "adapter").is_dir() else []
    run = finished_run(run_dir, overrides)
    remedy = f"move {run_dir / 'merged'} to another place"
    refuse_foreign(run_dir / "merged", RECORD, below=run_dir, made_by="base", key=WRITTEN, remedy=remedy)
    check_output(run_dir / "merged", "merge", folder=True)
    device = best_device()
    merge = plan_merge(run.recipe, run_dir, device)
    chosen: BaseDtype = dtype or run.recipe.model.dtype  # reading a recipe replaces `auto`
    kind: Base = base or "own"
    if base is None and run.recipe.quantization is not None:
        kind = "dequantized"
    if kind == "dequantized" and run.recipe.quantization is None:
        raise FinetuneError(f"{run_dir}: its base was not quantised, so there is no dequantized one to merge into")
    with making(run_dir / "merged") as folder:
        weights = "the base's own weights" if kind == "own" else "the dequantised weights"
        say(f"merging into {weights}")
        write_merged(merge, folder, getattr(torch, chosen), dequantized=kind == "dequantized", say=say)
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        facts: dict[str, Any] = {
            "base": kind,
            "dtype": chosen,
            "agreement": _verify(run, merge, kind, folder, prompts, say) if prompts else None,
            "files": len(sizes),
            "bytes": sum(sizes),
        }
        if run.recipe.model.adapter:
            facts["started_from"] = run.recipe.model.adapter
        write_record(folder, RECORD, facts, key=WRITTEN)
        publish_folder(folder, run_dir / "merged")
    return {"folder": str(run_dir / "merged"), **facts}


def whole_model(run: FinishedRun, prompts: int, say: Callable[[str], None]) -> Path:
    """The folder with all weights: model/, or merged/, which is made if it is absent or older than the adapter."""
    if run.recipe.lora is None:
        return run.product
    merged = run.folder / "merged"
    made = merged / "merge.json"  # written last
    trained = run.product / ADAPTER_WEIGHTS
    if made.is_file() and made.stat().st_mtime >= trained.stat().st_mtime:
        say(f"{merged}: is newer than the adapter, so it is not merged again")
        return merged
    say(describe_merge(merge_run(run.folder, dtype=None, base=None, prompts=prompts, say=say)))
    return merged


def _verify(
    run: FinishedRun, merge: Merge, kind: Base, folder: Path, prompts: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Figures for the merged model, and for the base without the adapter, from one set of documents."""
    prepared = prepare(run.recipe, load_tokenizer(run.recipe))
    documents = documents_to_compare(prepared, prompts, merge.vocabulary)
    say(f"comparing over {counted(len(documents), 'document')}")
    with fitting(merge.device, run):
        adapted: Any = load_adapted(run, merge.device)
        reference = run_reference(adapted, documents)
        if not merge.adapter.moves_the_base:
            with adapted.disable_adapter():
                base = agreement_with(adapted, reference)
        del adapted
        gc.collect()  # peft's model refers to itself in circles, and the next one needs its memory
        if merge.adapter.moves_the_base:
            base = agreement_with(load_whole(run, merge.device, tuned=False), reference)
        # The merged model's agreement. Plain transformers loads it, as a user would.
        trust = {"trust_remote_code": run.recipe.model.trust_remote_code}  # the base's code was copied into the folder
        loaded: Any = auto_class(AutoConfig.from_pretrained(folder, **trust)).from_pretrained(
            folder, dtype="auto", use_safetensors=True, output_loading_info=True, **trust
        )
        model, info = loaded
        # Missing, unexpected and mismatched names: transformers only warns about them.
        wrong = sorted(str(name) for names in info.values() for name in names)
        if wrong:
            raise FinetuneError(f"{folder}: plain transformers misses or finds too much: {', '.join(wrong[:3])}")
        merged = agreement_with(answering_part(model.to(merge.device).eval()), reference)
    return {
        "documents": len(documents),
        "held_out": bool(len(prepared.split.held_out)),
        "tokens": reference.adapter.tokens,
        "adapter": reference.adapter.as_json(),
        "candidates": {kind: merged.as_json()},  # earlier releases compared two
        "base": base.as_json(),
    }


def describe_merge(facts: Mapping[str, Any]) -> str:
    """The verb's output: a table, the folder, and a note if the number format loses much of the adapter."""
    agreement, lines, note = facts["agreement"], list[str](), list[str]()
    if agreement is None:
        command = shlex.join(["finetune", "merge", str(Path(facts["folder"]).parent)])
        lines.append(f"not compared with the adapter; to compare both, run: {command}")
    else:
        documents = counted(
            agreement["documents"],
            "held-out document" if agreement["held_out"] else "training (none are held out) document",
        )
        merged = agreement["candidates"][facts["base"]]
        lines += [
            f"{counted(agreement['tokens'], 'answer token')} of {documents}, computed in float32:",
            f"{'':24}{'same top token':>15}{'mean KL':>11}{'largest logit difference':>26}{'loss':>9}",
        ]
        for name, row in {"the adapter": agreement["adapter"], "merged": merged, "the base": agreement["base"]}.items():
            lines.append(
                f"{name:24}{row['top1']:>15.2%}{row['kl']:>11.2e}{row['largest_logit_difference']:>26.2e}"
                f"{row['loss']:>9.4f}"
            )
        # The base's KL to the adapter model is the adapter's whole change. 1e-12 avoids a division by zero.
        lost_share = merged["kl"] / max(agreement["base"]["kl"], 1e-12)
        if lost_share > NOTHING_LOST and facts["dtype"] != "float32":
            lost = f"{lost_share:.0%} of what the adapter changed is lost in {facts['dtype']}"
            note.append(f"note: {lost}; take --dtype float32")
    if start := facts.get("started_from"):
        lines.append(f"its training started from the adapter {start}, which is in it")
    size = f"{counted(facts['files'], 'file')}, {facts['bytes'] / 1e6:,.0f} MB, {facts['dtype']}"
    return "\n".join([*lines, f"merged: {facts['folder']} ({size})", *note])
