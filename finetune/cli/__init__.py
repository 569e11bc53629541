"""The verbs of `finetune`.

Annexes are imported at the top: they import nothing before a name is asked for. Light modules too. What imports torch,
numpy or matplotlib is imported where a verb needs it, so `finetune check RECIPE` answers in a fifth of a second.

May import: everything.
"""
