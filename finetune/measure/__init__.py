"""Memory, time and collectives of each phase, and the metrics of each step; free when it is off.

May import: recipe, files, errors.
"""
