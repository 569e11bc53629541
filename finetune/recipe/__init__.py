"""What the user writes: the typed recipe, read strictly, and the GPUs and strategy files that it names.

May import: errors, output_stream, paths, redaction.
"""
