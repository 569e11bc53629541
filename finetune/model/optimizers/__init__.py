"""Optimizers that no library has as we need them. They may import what `model` may.

rounded_adamw.py: AdamW for weights in bfloat16, rounded at random; random_bits.py: the bits that it rounds with.
"""
