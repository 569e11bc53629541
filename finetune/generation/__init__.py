"""Answers of a model in this process: to prompts in batches, and to held-out rows with their scores.

    generate    the decoding: batches, sampling, ends; training, eval, chat and sample import it
    held_out    rows with references: read, answered by all ranks, scored

May import: strategies, tokens, model and what is below them.
"""
