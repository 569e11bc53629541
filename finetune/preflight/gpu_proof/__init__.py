"""Small trainings that prove a machine's GPUs: the same curve as on the CPU, saved and resumed, by every strategy.

May import: preflight's jobs, training and what is below it.
"""
