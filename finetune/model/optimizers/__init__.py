"""Optimizers that no library has as we need them: AdamW in bfloat16, rounded at random, and its random bits.

May import: what `model` may.
"""
