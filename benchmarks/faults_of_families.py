"""Faults in what makes model families right: attention, layers with a state, experts, text parts, new tokens, probe.

`python benchmarks/seeded_faults.py` seeds them; each names the tests that must notice.
"""

from __future__ import annotations

from benchmarks.common import Fault

ATTENTION, BY_DOCUMENT = "architecture/test_attention.py", "architecture/test_by_document.py"
ROUTER, REACH, PART = "architecture/test_router_loss.py", "model/test_adapter_reach.py", "model/test_text_part.py"
TOKENS, THINKING, JUDGE = "model/test_new_tokens.py", "tokens/test_thinking_masks.py", "probe/test_judge.py"

FAULTS_OF_FAMILIES = (
    Fault(
        "attention sinks are left out",
        "architecture/attention.py",
        "_with_sinks if asked.sinks is not None else _plain",
        "_plain",
        ATTENTION,
    ),
    Fault(
        "a sink is not divided by the scale",
        "architecture/attention.py",
        "(asked.sinks.to(query.dtype) / asked.scale)",
        "asked.sinks.to(query.dtype)",
        ATTENTION,
    ),
    Fault(
        "scores are not capped",
        "architecture/attention.py",
        "asked.cap * torch.tanh((query @ key.transpose(2, 3)).float() * (asked.scale / asked.cap))",
        "(query @ key.transpose(2, 3)).float() * asked.scale",
        ATTENTION,
    ),
    Fault(
        "chunks of attention are ignored",
        "architecture/attention.py",
        "    if chunk is None:\n        return lengths",
        "    if True:\n        return lengths",
        ATTENTION,
    ),
    Fault(
        "a layer with a state runs over the whole row",
        "architecture/by_document.py",
        "if lengths is None or len(lengths) == 1:",
        "if True:",
        BY_DOCUMENT,
    ),
    Fault(
        "a recomputed layer with a state sees the row that came last",
        "architecture/by_document.py",
        "return nullcontext(), self._as_it_was(self.lengths)",
        "return nullcontext(), nullcontext()",
        BY_DOCUMENT,
    ),
    Fault(
        "the router's loss is over the batch and not by document",
        "architecture/router_loss.py",
        "document = begins.cumsum(0) - 1",
        "document = begins.cumsum(0) * 0",
        ROUTER,
    ),
    Fault(
        "the router's loss is not weighted by learned tokens",
        "architecture/router_loss.py",
        "(learned * auxiliary).sum()",
        "auxiliary.sum()",
        ROUTER,
    ),
    Fault(
        "all-linear leaves experts out",
        "model/adapter_reach.py",
        "parameters = _shortest([*held, *plain], [name for name, _ in model.named_parameters()])",
        "parameters = []",
        REACH,
    ),
    Fault(
        "all-linear reaches a vision tower",
        "model/adapter_reach.py",
        'return lambda path: not place or path == place or path.startswith(f"{place}.")',
        "return lambda path: True",
        REACH,
    ),
    Fault(
        "an adapter beside what Mamba's kernels read is not in the computation",
        "model/adapter_reach.py",
        'if hasattr(mixer, "A_log") and hasattr(mixer, "D"):',
        "if False:",
        REACH,
    ),
    Fault(
        "convolutions are counted among the matrices",
        "model/adapter_reach.py",
        "isinstance(module, nn.Embedding | nn.Conv1d)",
        "isinstance(module, nn.Embedding)",
        REACH,
    ),
    Fault(
        "a text part's adapter has its own names alone",
        "model/text_part.py",
        "save_file(tensors | added, file, metadata",
        "save_file(tensors, file, metadata",
        PART,
    ),
    Fault(
        "a text part forgets whether its head is tied",
        "model/text_part.py",
        "part.config.tie_word_embeddings = stated",
        "part.config.tie_word_embeddings = not stated",
        PART,
    ),
    Fault(
        "a new token's row begins at random",
        "model/new_tokens.py",
        "if fill and model.device.type",
        "if False and model.device.type",
        TOKENS,
    ),
    Fault(
        "a new token's row begins as the mean of all",
        "model/new_tokens.py",
        "tuple(piece for piece in own if piece < rows) for row",
        "() for row",
        TOKENS,
    ),
    Fault(
        "a new token that the vocabulary has is added",
        "model/new_tokens.py",
        "    if mistakes:\n",
        "    if False:\n",
        TOKENS,
    ),
    Fault(
        "a thinking block that the prompt opens is not closed by the model",
        "tokens/assistant_spans.py",
        "if not closed:  # the model closes the block",
        "if False:",
        THINKING,
    ),
    Fault(
        "a prompt's empty thinking block may be followed by another",
        "tokens/encoder.py",
        'is_closed = rendered.text[max(0, start - 40) : start].rstrip().endswith("</think>")',
        "is_closed = False",
        THINKING,
    ),
    Fault(
        "the probe refuses nothing",
        "probe/judge.py",
        "return next(iter(found.values())).largest <= with_library.bound",
        "return True",
        JUDGE,
    ),
    Fault(
        "the probe computes in the recipe's precision on a CPU",
        "probe/judge.py",
        '    if device.type == "cpu":\n        return None\n',
        "",
        JUDGE,
    ),
)
