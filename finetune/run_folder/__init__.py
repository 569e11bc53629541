"""A run's folder on disk: who owns it, its checkpoints, its export, and the heartbeats of its ranks.

May import: strategies, tokens and what is below them.
"""
