"""Configurations of other trainers into a recipe.

May import: recipe, files, errors.
"""
