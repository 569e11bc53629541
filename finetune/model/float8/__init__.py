"""float8 matrix products in decoder layers, by torchao: a recipe's needs for it, and the layers.

May import: the same as `model`.
"""
