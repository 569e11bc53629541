"""Before you pay: rehearse a recipe, compare strategies, examine this machine.

May import: training and what is below it.
"""
