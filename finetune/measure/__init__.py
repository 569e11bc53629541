"""Each phase's memory, time and collectives, and each step's metrics; free when switched off.

May import: recipe, files, errors.
"""
