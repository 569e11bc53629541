"""Decoder layers as graphs of torch.compile, and the attention inside of them as one operator.

May import: what `architecture` may.
"""
