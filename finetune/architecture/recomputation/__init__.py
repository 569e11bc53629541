"""Layers that backward computes again: which ones, and which of their results are kept.

May import: the rest of architecture, and what is below it.
"""
