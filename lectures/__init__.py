"""The lectures of `python -m lectures NAME`: one question each, answered by figures, a picture and a file.

May import: preflight, planner and what is below them.
"""
