"""The sections of a recipe, with their defaults: a module for each part of the page.

May import: what recipe/ may, cross_checks.py and optimizers.py.
"""
