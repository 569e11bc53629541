"""What a finished run is good for: chat, evaluation, merging.

May import: training and what is below it.
"""
