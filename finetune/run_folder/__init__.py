"""A run's folder on disk: its owner, its checkpoints, its export, and its ranks' heartbeats.

May import: strategies, tokens and everything below them.
"""
