"""Matrix products of decoder layers in float8, by torchao: what a recipe needs for it, and the layers.

May import: what `model` may.
"""
