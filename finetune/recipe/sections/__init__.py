"""A recipe's sections with their defaults: one module for each part of the page.

May import: the same as recipe/, and from recipe/ layouts.py, metric_names.py and yaml_text.py.
"""
