"""How ranks are started, meet and are told to stop.

May import: recipe, files, errors.
"""
