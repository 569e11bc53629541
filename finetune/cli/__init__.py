"""The verbs of `finetune`; heavy imports stay inside them.

May import: everything.
"""
