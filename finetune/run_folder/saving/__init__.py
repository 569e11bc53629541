"""Saving a checkpoint: this rank's part, and writing it while training continues.

May import: strategies, tokens and everything below them.
"""
