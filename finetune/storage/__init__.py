"""A run outlives its machine: its checkpoints and records on an object store, the Hub or a folder (`run.storage`).

May import: hub and everything below it.
"""
