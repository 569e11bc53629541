"""A rival on the same card and rows: transformers, peft and Liger's kernels, as their users put them together.

A part of gpu.py. 8B LoRA with the settings of recipes/llama3_8b_lora_1x80gb.yaml: adapters of rank 16 in float32 on all
linear layers of a bfloat16 base, autocast, sdpa, clipping, torch's fused AdamW, nothing recomputed. Rows are made
twice: documents packed into full rows (a document then sees those before it, which this kit never allows), and
documents padded to the longest of a micro-batch. Tokens a second count real tokens, not padding.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_recipes import DPO_RECIPE, SKIPPED, STEPS, recipes, write_rows

if TYPE_CHECKING:
    from benchmarks.gpu_checks import Lines

RECIPE = DPO_RECIPE  # 8B LoRA on 80 GB
LIGER = "liger_kernel"


def peer(lines: Lines, *, shrunken: bool) -> None:
    """Tokens a second and peak memory of the rival, packed and padded. `shrunken` runs without Liger."""
    if not shrunken and importlib.util.find_spec(LIGER) is None:
        lines.add("8B LoRA", "not run", f"{LIGER} is not installed")
        return
    import torch

    from finetune.model.known_configs import full_config
    from finetune.recipe.loader import load_recipe
    from finetune.rehearse.shrink import sample_texts, train_tokenizer

    recipe = load_recipe(str(recipes()[RECIPE]), []).recipe
    assert recipe.lora is not None
    device = torch.device("cpu" if shrunken else "cuda")
    length, batch = recipe.data.max_length, recipe.training.global_batch_size
    if shrunken:
        length, batch = length // 8, 2
    tokenizer = train_tokenizer(sample_texts(recipe.data))
    with tempfile.TemporaryDirectory(prefix="finetune-peer-") as name:
        file = write_rows(Path(name, "rows.jsonl"), tokens=batch * length, max_length=length)
        chats = [json.loads(line)["messages"] for line in file.read_text("utf-8").splitlines()]
    documents = [list(tokenizer.apply_chat_template(chat)["input_ids"])[:length] for chat in chats]
    config, _ = full_config(recipe.model.name_or_path, recipe.model.revision)
    if shrunken:
        config |= {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2}
        config |= {"num_hidden_layers": 2, "vocab_size": len(tokenizer), "head_dim": 16}
    with lines.check("model and adapters") as found:
        model = _model(config, recipe, device, liger=not shrunken)
        found["seen"] = f"{sum(each.numel() for each in model.parameters() if each.requires_grad):,} trained weights"
    steps = 3 if shrunken else STEPS
    for way, rows in (("packed", list(packed(documents, length))), ("padded", documents)):
        with lines.check(f"8B LoRA, {way}") as found:
            _train(model, rows[:batch] if way == "packed" else rows, device, steps, recipe.training, found)


def _model(config: dict[str, Any], recipe: Any, device: Any, *, liger: bool) -> Any:
    """The random base in bfloat16 with peft's adapters, which peft keeps in float32."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    torch.manual_seed(0)
    with torch.device(device):
        base: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    base.config.use_cache = False
    return get_peft_model(
        base, LoraConfig(r=recipe.lora.r, lora_alpha=recipe.lora.lora_alpha, target_modules="all-linear")
    )


def packed(documents: Sequence[Sequence[int]], length: int) -> Iterator[list[int]]:
    """Rows of at most `length` tokens, each of whole documents in order."""
    row: list[int] = []
    for document in documents:
        if row and len(row) + len(document) > length:
            yield row
            row = []
        row = [*row, *document]
    yield row


def _train(
    model: Any, rows: Sequence[Sequence[int]], device: Any, steps: int, training: Any, found: dict[str, Any]
) -> None:
    """A few optimizer steps on all rows, one row in a micro-batch (`padded` documents: as many as fill a row)."""
    import torch

    longest = max(map(len, rows))
    each = max(1, 4096 // longest) if longest < 4096 and device.type == "cuda" else 1
    batches = [rows[first : first + each] for first in range(0, len(rows), each)]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=training.learning_rate, fused=device.type == "cuda")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    supervised = sum(len(row) - 1 for row in rows)
    took, losses = [], []
    for _ in range(steps):
        began = time.monotonic()
        total = torch.zeros((), device=device)
        for batch in batches:
            width = max(map(len, batch))
            ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in batch], device=device)
            seen = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch], device=device)
            inputs = {"input_ids": ids, "labels": torch.where(seen.bool(), ids, -100)}
            if not bool(all(len(row) == width for row in batch)):
                inputs["attention_mask"] = seen
            with torch.autocast(device.type, torch.bfloat16):
                # transformers divides the summed loss by this number, so that micro-batches add up to a step's mean.
                loss = model(**inputs, num_items_in_batch=supervised).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(weights, training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))  # waits for the device
        took.append(time.monotonic() - began)
    seconds = statistics.median(took[min(SKIPPED, steps - 1) :])
    tokens = sum(map(len, rows))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    found["figures"] = {"tokens_per_second": tokens / seconds, "step_seconds": seconds, "tokens": tokens}
    found["figures"] |= {"peak_memory_gib": peak, "losses": losses, "rows_at_once": each}
    memory = "" if peak is None else f", peak {peak:.2f} GiB"
    found["seen"] = f"{tokens / seconds:,.0f} tokens/s, {seconds:.2f} s a step of {tokens:,} tokens{memory}"
    if not losses[-1] < losses[0]:
        found |= {"state": "failed", "seen": f"the loss does not fall: {losses}"}
