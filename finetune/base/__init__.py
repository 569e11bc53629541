"""A base model's files: where they are on this machine, models inside Python packages, and a base's identity.

May import: recipe, untrusted and what is below them.
"""
