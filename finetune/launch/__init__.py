"""How ranks are started, how they meet, and how a signal stops them.

May import: recipe, files, errors.
"""
