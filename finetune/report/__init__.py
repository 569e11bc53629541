"""What a person looks at: curves and pages of a run, a preview of the data.

May import: run_folder and what is below it.
"""
