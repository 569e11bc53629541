"""The trainer's step on fake tensors, recorded storage by storage.

May import: what is below the planner.
"""
