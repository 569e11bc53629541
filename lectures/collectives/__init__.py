"""The lecture `collectives`: five operations on four gloo ranks, and a broadcast sent naively and in a ring.

May import: lectures/output.py, rehearse, compare, planner and what is below them.
"""
