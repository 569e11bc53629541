"""The user's input: the typed recipe, read strictly, with its GPUs and strategy files.

May import: errors, output_stream, paths, redaction.
"""
