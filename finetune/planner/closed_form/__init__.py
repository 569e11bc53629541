"""The same peaks by arithmetic, in milliseconds, for the search through many variants.

May import: planner/constants and what is below the planner.
"""
