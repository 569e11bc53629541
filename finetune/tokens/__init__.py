"""Rows to token ids and labels, cached, packed, and dealt out as micro-batches.

May import: data, recipe, files, errors.
"""
