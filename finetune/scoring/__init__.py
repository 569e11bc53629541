"""Scorers of answers, and a small general set that shows what a fine-tuning made a model forget.

May import: errors, files and what is below them.
"""
