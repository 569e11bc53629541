"""Configurations of other tools, brought into a recipe."""
