"""The same peaks by arithmetic, in milliseconds, for the search through many variants.

May import: what is below the planner.
"""
