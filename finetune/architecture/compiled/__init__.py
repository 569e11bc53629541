"""Decoder layers as torch.compile graphs, with the attention inside them as one operator.

May import: the same as `architecture`.
"""
