"""Whether prompts may share a left-padded batch: a padded row of the small model beside the same row alone.

Attention masks its padding. Padding may still change the tokens after it: through layers that carry a state along the
row, through positions or chunks that are counted from its beginning, and through the cache.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from finetune.generation.settings import GREEDY, answering, left_padded
from finetune.library_errors import class_and_words
from finetune.probe.compare import kits_model, probe_documents
from finetune.probe.small_model import SmallModel
from finetune.recipe.schema import Recipe

# Tokens of each prompt: shorter and longer than a window. The padding of the others is no multiple of a chunk.
PROMPT_LENGTHS = (5, 20, 13)
NEW_TOKENS = 4  # the first is of the prompt's own forward, the others of the cache that it left
# Relative difference of a token's logits, in float32. With a mask, kernels add up in another order, which changes 1e-6,
# and a little more through states and routers. If one padded token is seen, a tenth and more changes.
SAME = 1e-4
LEAST_LOGIT = -1e30  # some models give tokens that are none the smallest number, which would outweigh all others


def compare_padded(recipe: Recipe, small: SmallModel, device: torch.device) -> dict[str, Any]:
    """Compare a left-padded row's logits with the same row's alone, over the first tokens of greedy answers.

    Both are computed in float32 with the library's own attention, as samples are. `same` says whether prompts may share
    a batch.
    """
    largest = 0.0
    try:
        model, decoder = kits_model(recipe, small, device)
        rows = len(decoder.get_input_embeddings().weight)  # type: ignore[arg-type]
        prompts = [ids.tolist() for ids, _ in probe_documents(rows, small.special, lengths=PROMPT_LENGTHS)]
        with answering(model):
            tokens, logits = _greedy(model, prompts, device)
            for row, prompt in enumerate(prompts):
                tokens_alone, logits_alone = _greedy(model, [prompt], device)
                for step in range(NEW_TOKENS):
                    # Relative to the spread of the expected logits [vocabulary]; their mean changes no probability.
                    kept = logits_alone[step][0] > LEAST_LOGIT
                    padded, single = logits[step][row][kept].double(), logits_alone[step][0][kept].double()
                    off = float((padded - single).norm() / (single - single.mean()).norm())
                    if not off <= largest:  # NaN too, which then stays
                        largest = off
                    if tokens[row][step] != tokens_alone[0][step]:
                        break  # from here on the two rows differ whatever is padded
    except Exception as error:  # of the model's own code, which may know no mask or no cache
        return {"same": False, "difference": None, "reason": class_and_words(error)}
    if not math.isfinite(largest):
        return {"same": False, "difference": None, "reason": "logits are not finite"}
    return {"same": largest <= SAME, "difference": largest, "reason": None}


def _greedy(model: nn.Module, prompts: list[list[int]], device: torch.device) -> tuple[list[list[int]], list[Tensor]]:
    """New tokens [prompts, new], and for each of them the logits [prompts, vocabulary] that it was chosen by."""
    batch = left_padded(prompts, device)
    exactly = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    output = model.generate(  # type: ignore[operator]  # peft and transformers both have it
        **batch, **exactly, **GREEDY, use_cache=True, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    return output.sequences[:, -NEW_TOKENS:].tolist(), list(output.logits)
