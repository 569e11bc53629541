"""What the proofs train: a tiny Llama with random weights, eight chats, and the recipe that they all share."""

from __future__ import annotations

import json
import random
from pathlib import Path

from finetune.preflight.gpu_proof.plan import PROOF_ROWS, PROOF_SAVED_AFTER, PROOF_STEPS
from finetune.preflight.shrink import BUILT_IN, END_TOKENS, train_tokenizer

# Weights five times as large as a new model's, so that attention is not nearly uniform: documents that see each other
# then change the first loss by 6e-3 instead of 2e-5.
SPREAD = 0.1
LONGEST_CHAT = 160  # words


def write_proof_recipe(folder: Path) -> Path:
    """`folder`/recipe.yaml, and beside it the model and the rows: a full fine-tuning in float32 on one device."""
    chats = _chats()
    rows = folder / "chats.jsonl"
    rows.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), "utf-8")
    recipe = folder / "recipe.yaml"
    content = {
        "model": {"name_or_path": str(_model(folder / "model", chats)), "dtype": "float32"},
        "lora": None,
        "data": {"train": [{"path": "json", "data_files": str(rows)}], "packing": False, "max_length": 1024},
        "training": {
            "global_batch_size": PROOF_ROWS,
            "max_steps": PROOF_STEPS,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "linear",
            "warmup_steps": 0,
            "mixed_precision": "no",
        },
        "samples": {"count": 0},
        "save_steps": PROOF_SAVED_AFTER,
    }
    recipe.write_text(json.dumps(content), "utf-8")  # JSON is YAML
    return recipe


def _chats() -> list[list[dict[str, str]]]:
    """Of 10 to LONGEST_CHAT words; the second half of an answer says the first again, which attention can find."""
    draw = random.Random(0)
    words = " ".join(BUILT_IN).split()
    lengths = [LONGEST_CHAT, 10, 110, 40, 140, 25, 80, 60]
    assert len(lengths) == PROOF_ROWS
    chats = []
    for length in lengths:
        half = " ".join(draw.choices(words, k=length // 2))
        chats.append([{"role": "user", "content": "Say it twice."}, {"role": "assistant", "content": f"{half} {half}"}])
    return chats


def _model(folder: Path, chats: list[list[dict[str, str]]]) -> Path:
    """Two layers of 64 with two query heads to a key-value head of 32; 0.2 M float32 weights, and their tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = train_tokenizer([*BUILT_IN, *(turn["content"] for chat in chats for turn in chat)])
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
        bos_token_id=None,
        **END_TOKENS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
