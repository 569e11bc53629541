"""Optimizers that no library offers as we need them: AdamW in bfloat16 with stochastic rounding and its random bits,
and AdamW with shardable one-byte moments and their blocks.

May import: the same as `model`.
"""
