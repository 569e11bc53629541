"""The trainer's step on fake tensors, recorded storage by storage.

May import: packages below the planner.
"""
