"""The trainer's step on fake tensors, recorded storage by storage.

May import: planner/constants and what is below the planner.
"""
