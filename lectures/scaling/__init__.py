"""The lecture `scaling`: sizes x ranks x strategies by the plan, and what shards of states save.

May import: lectures/output.py, rehearse, compare, planner and what is below them.
"""
