"""The Hugging Face Hub: what may leave this machine, model cards, pushes.

May import: run_folder and what is below it.
"""
