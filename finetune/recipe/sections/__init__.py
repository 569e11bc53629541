"""A recipe's sections with their defaults: one module for each part of the page.

May import: the same as recipe/, cross_checks.py and optimizers.py.
"""
