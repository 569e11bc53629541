"""The lecture `formats`: bits of a number, what a format's range does to a run's numbers, and a curve under each.

May import: lectures/output.py, rehearse, compare, planner and what is below them.
"""
