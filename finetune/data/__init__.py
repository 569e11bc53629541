"""Files and Hub data sets to checked rows, without a tokenizer and without torch.

May import: recipe, files, errors.
"""
