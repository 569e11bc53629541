"""The Hugging Face Hub: what may leave this machine, model cards, pushes.

May import: run_folder and everything below it.
"""
