"""`finetune rehearse`: a recipe end to end, small and on the CPU.

    rehearsal    the verb: the recipe changed, trained, resumed, exported, compared
    shrink       a small model with a tokenizer of the rows; lectures and benchmarks use it too

Importing it loads no torch. May import: training and what is below it.
"""
