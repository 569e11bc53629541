"""The lecture `zero`: the homework's six runs, measured small, planned large, and beside the figures of the notes.

May import: rehearse, compare, planner, the lectures' output and what is below them.
"""
