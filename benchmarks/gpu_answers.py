"""How fast a random 8B answers: batches of three sizes, adapters beside the base and merged, transformers' own batches,
and 1,000 prompts by the code that `finetune eval` answers with.

A part of gpu.py. Every prompt gets the same number of new tokens, because no token ends an answer.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu_checks import Lines

MODEL = "meta-llama/Llama-3.1-8B"
PROMPTS, SHORTEST, LONGEST, NEW = 64, 60, 400, 64  # tokens
BATCH_TOKENS = (2_048, 16_384, 65_536)
ADAPTER_BATCH = 16_384  # tokens
EVALUATED, EVALUATED_NEW = 1_000, 256  # prompts of an evaluation, and tokens of each answer


def generate(lines: Lines, *, shrunken: bool) -> None:
    """Tokens a second of greedy answers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    from finetune.generation.generate import prompt_batches
    from finetune.generation.held_out import Batching, ScoredSet, generated_answers
    from finetune.generation.settings import left_padded
    from finetune.model.known_configs import full_config
    from finetune.rehearse.shrink import BUILT_IN, train_tokenizer
    from finetune.scoring.metrics import Scored
    from finetune.tokens.encoder import SamplePrompt

    device = torch.device("cpu" if shrunken else "cuda")
    count, shortest, longest, new = (6, 5, 20, 4) if shrunken else (PROMPTS, SHORTEST, LONGEST, NEW)
    sizes = (64, 128, 256) if shrunken else BATCH_TOKENS
    config, _ = full_config(MODEL)
    if shrunken:
        config |= {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2}
        config |= {"num_hidden_layers": 2, "vocab_size": 512, "head_dim": 16}
    config |= {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": None}
    draw = random.Random(0)

    def drawn(rows: int) -> list[list[int]]:
        lengths = [draw.randint(shortest, longest) for _ in range(rows)]
        return [[draw.randrange(3, config["vocab_size"]) for _ in range(length)] for length in lengths]

    prompts = drawn(count)
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.float32 if shrunken else torch.bfloat16
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=dtype, attn_implementation="sdpa"
        ).eval()
    settings = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)

    def seconds() -> float:
        if not shrunken:
            torch.cuda.synchronize()
        return time.monotonic()

    def answers(asked: Any, most: int, found: dict[str, Any]) -> None:
        batches = prompt_batches([len(prompt) for prompt in prompts], new, most)
        steps = tokens = 0
        asked.generation_config = settings
        began = seconds()
        with torch.no_grad():
            for batch in batches:
                output = asked.generate(**left_padded([prompts[index] for index in batch], device))
                given = max(len(prompts[index]) for index in batch)
                assert output.shape[1] - given == new, "an answer has ended"
                steps, tokens = steps + new, tokens + len(batch) * new
        told(found, seconds() - began, tokens, steps)

    def told(found: dict[str, Any], took: float, tokens: int, steps: int | None) -> None:
        found["figures"] = {"tokens_per_second": tokens / took, "tokens": tokens, "seconds": took, "steps": steps}
        found["seen"] = f"{tokens / took:,.0f} tokens/s, {tokens:,} tokens in {took:.1f} s"
        if steps:
            found["seen"] += f", {steps:,} decode steps of {1e3 * took / steps:.1f} ms"

    def as_eval_answers(model: Any, rows: int, new: int, found: dict[str, Any]) -> None:
        """The kit's batches, sized by free memory, in rounds after which ended rows leave."""
        tokenizer: Any = train_tokenizer(BUILT_IN)
        tokenizer.eos_token = None  # nothing ends an answer
        asked = [SamplePrompt(ids, "", None) for ids in drawn(rows)]
        steps = 0

        def show(_: str) -> None:
            nonlocal steps
            steps += 1

        began = seconds()
        answers = generated_answers(
            model,
            tokenizer,
            ScoredSet("prompts", asked, [Scored("", "")] * rows, [], new),
            Batching(True, device),
            show,
            lambda line: found.update(told=line),
        )
        told(found, seconds() - began, sum(len(each.tokens) for each in answers), steps)
        found["seen"] += "; " + found["told"] if "told" in found else ""
        if any(len(each.tokens) != new for each in answers):
            found["state"] = "failed"

    with lines.check("once, for warmth") as found:
        model.generation_config = settings
        model.generate(**left_padded(prompts[:1], device))
    for most in sizes:
        with lines.check(f"base, batches of {most:,} tokens") as found:
            answers(model, most, found)
    rows, length = (12, 140) if shrunken else (EVALUATED, EVALUATED_NEW)
    with lines.check(f"base, {rows:,} answers of {length} tokens as eval computes them") as found:
        as_eval_answers(model, rows, length, found)
    with lines.check("base, generate_batch of transformers") as found:
        began = seconds()
        own = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64) if shrunken else None
        outputs = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=own)
        tokens = sum(len(each.generated_tokens) for each in outputs.values())
        told(found, seconds() - began, tokens, None)
        if tokens != count * new:
            found |= {"state": "failed", "seen": f"{tokens} tokens of {count * new}; {found['seen']}"}
    most = sizes[1] if shrunken else ADAPTER_BATCH
    adapted: Any = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).eval()
    with lines.check(f"adapters in float32 beside the base, batches of {most:,} tokens") as found:
        answers(adapted.base_model.model, most, found)
    merged: Any = adapted.merge_and_unload()
    with lines.check(f"adapters merged, batches of {most:,} tokens") as found:
        answers(merged, most, found)
