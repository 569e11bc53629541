"""Saving a checkpoint: what this rank writes, and writing it while training goes on.

May import: strategies, tokens and what is below them.
"""
