"""The lectures of `python -m lectures NAME`: one question each, answered by figures, a picture and a file.

May import: rehearse, compare, planner and what is below them.
"""
