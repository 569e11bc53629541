"""What learns: attention, loss, quantisation, adapters, optimizer. A method is a way to build a model.

May import: recipe, files, errors.
"""
