"""A model of the user's own configuration, made small: its loss and gradients beside the library's own.

May import: strategies, tokens and what is below them.
"""
