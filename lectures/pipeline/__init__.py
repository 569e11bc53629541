"""The lecture `pipeline`: layers split over stages, one micro-batch or several at a time, measured and planned.

May import: lectures/output.py, rehearse, compare, planner and what is below them.
"""
