"""What a model computes: attention inside documents, the loss, and a trial of which architectures are trained rightly.

May import: recipe, files, errors.
"""
