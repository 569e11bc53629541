"""Finished runs whose tiny model gives eight answers by heart, made in seconds: the kit's documents, a plain loop."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from finetune.files import write_json
from finetune.generation.settings import stop_on
from finetune.model.build import build_model, decoder_parts
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.loader import load_recipe
from finetune.recipe.resolved import resolved_yaml
from finetune.run_folder.save_restore import export_weights
from finetune.strategies.assemble import Assembled
from finetune.tokens.conversation import CONVERSATION
from finetune.tokens.dataset import Prepared, prepare
from tests.support.models.tiny import tiny_model
from tests.support.runs.recipes import merged, tiny, write_recipe

# Answers of one to six words, so that rows of a batch end at different tokens.
PAIRS = {
    f"Say {word}": " ".join([word, "one two three number four"[: 4 * at]]).strip()
    for at, word in enumerate("river boat sea stone bridge road hills birds".split())
}


def write_rows(file: Path) -> Path:
    rows = [{"instruction": question, "output": answer} for question, answer in PAIRS.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def save_base(folder: Path, tokenizer: PreTrainedTokenizerBase, listed: list[str] | None = None, **config: Any) -> Path:
    """A tiny model for this tokenizer. Its generation settings end on `listed`, else on the tokenizer's eos."""
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=None, **config)
    ends = tokenizer.convert_tokens_to_ids(listed or [tokenizer.eos_token])
    model.generation_config = GenerationConfig(eos_token_id=ends if len(ends) > 1 else ends[0])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Learned:
    """A finished run, its model as after the last step, and its prepared data."""

    folder: Path
    model: Any
    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared
    file: Path  # its rows


def learned_by_heart(folder: Path, base: Path, *, steps: int = 600, learn: bool = True, **sections: Any) -> Learned:
    """Train until each supervised token is the likeliest, and write the run's folder as a training does."""
    folder.mkdir(parents=True, exist_ok=True)
    file = write_rows(folder / "rows.jsonl")
    plain: dict[str, Any] = {
        "lora": None,
        "model": {"attention": "sdpa"},
        "data": {"packing": False, "max_length": 2040},
        "training": {"activation_checkpointing": False},
        "samples": {"count": 8},
        "output_dir": str(folder / "run"),
    }
    write_recipe(folder, merged(tiny(base, file, **plain), sections))
    loaded = load_recipe(folder / "recipe.yaml")
    recipe, run = loaded.recipe, folder / "run"
    tokenizer = load_tokenizer(recipe)
    prepared = prepare(recipe, tokenizer)
    model: Any = build_model(recipe, torch.device("cpu"))
    stop_on(decoder_parts(model), prepared.conversation.stops.values())
    if learn:
        _memorise(model, [prepared.pool.document(index) for index in range(len(prepared.pool.lengths))], steps)
    run.mkdir()
    (run / "recipe.yaml").write_text(resolved_yaml(loaded), "utf-8")
    write_json(run / CONVERSATION, prepared.conversation.as_json())
    write_json(run / "receipt.json", {"probe": {"padding": {"same": True}}})
    dtype = None if recipe.lora else torch.float32
    weights = Assembled(model, model, None).trained_weights(dtype=dtype, keep=True)
    export_weights(recipe, model, weights, tokenizer)
    return Learned(run, model.eval(), tokenizer, prepared, file)


def _memorise(model: Any, documents: list[Any], steps: int) -> None:
    # One row: the beginning that all documents share (1,390 tokens of cohere2), and behind it each document's own end.
    same = next(at for at, each in enumerate(zip(*(ids for ids, _ in documents), strict=False)) if len({*each}) > 1)
    parts = [torch.tensor(documents[0][0][:same]), *(torch.tensor(ids[same:]) for ids, _ in documents)]
    starts = [0] + [same] * len(documents)
    positions = torch.cat([torch.arange(len(part)) + start for part, start in zip(parts, starts, strict=True)])
    owner = torch.cat([torch.full((len(part),), at) for at, part in enumerate(parts)])
    seen = ((owner[:, None] == owner) | (owner == 0)) & (positions[:, None] >= positions)
    inputs = {
        "input_ids": torch.cat(parts)[None],
        "position_ids": positions[None],
        "attention_mask": torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None],
    }
    labels = torch.cat([torch.full((same,), -100), *(torch.tensor(labels[same:]) for _, labels in documents)])
    places = (labels[1:] != -100).nonzero()[:, 0]  # each position that predicts a supervised token
    targets = labels[1:][places]
    inner: Any = decoder_parts(model)
    # The second moment forgets large gradients in 20 steps. torch's 0.999 remembers them for 1,000, and shrinks every
    # update until then: at step 600 cohere2's model still confused two questions, each with a loss of 0.69.
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, betas=(0.9, 0.95), weight_decay=0)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, steps)
    for _ in range(steps):
        # The head alone over these positions: its logits of the whole row would take most of the time.
        logits = inner.lm_head(inner.model(**inputs, use_cache=False).last_hidden_state[0, places])
        loss = torch.nn.functional.cross_entropy(logits, targets)
        if (logits.argmax(-1) == targets).all() and loss < 0.06:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slower.step()
    raise AssertionError(f"not learned in {steps} steps: {float(loss.detach())}")
