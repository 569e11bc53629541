"""Checks of strangers' files before a library reads them: sizes, kinds, numbers, and programs that they make this
machine run.

May import: recipe, files and the modules on the lowest line. No torch here.
"""
