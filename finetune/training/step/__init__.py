"""One optimizer step: its gradients, its update, its batches and random numbers, and the record of it.

May import: what `training` may.
"""
