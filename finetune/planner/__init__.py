"""Will it fit, and how fast will it be? The trainer's own step, run on tensors without data.

May import: training and what is below it.
"""
