"""Strangers' files, looked at before a library reads them: sizes, kinds, numbers, and what they make this machine run.

May import: recipe, files and the modules on the ground floor. No torch here.
"""
