"""The model that learns: base weights, quantisation, adapters, optimizer. A method is a way to build a model.

May import: architecture, recipe, files, errors.
"""
