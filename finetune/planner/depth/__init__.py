"""From a shallow trace to the full depth, and the caching allocator's reserve for it.

May import: planner/trace and everything below the planner.
"""
