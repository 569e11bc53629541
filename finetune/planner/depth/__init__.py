"""From a shallow trace to the full depth, and what the caching allocator makes of it.

May import: planner/trace, planner/constants and what is below the planner.
"""
