"""Output for people: a run's curves and pages, a preview of the data.

May import: run_folder and everything below it.
"""
