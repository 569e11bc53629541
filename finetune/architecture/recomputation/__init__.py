"""Layers that backward computes again: the choice of layers, and the results that are kept.

May import: the rest of architecture, and everything below it.
"""
