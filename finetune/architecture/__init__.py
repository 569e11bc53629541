"""A model's computation: attention inside documents, the loss, and a trial that finds which architectures train
correctly.

May import: recipe, files, errors.
"""
