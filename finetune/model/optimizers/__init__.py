"""Optimizers that no library has as we need them: AdamW in bfloat16, rounded at random, and its random bits; AdamW with
moments of one byte that can be sharded, and their blocks.

May import: what `model` may.
"""
