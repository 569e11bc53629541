"""The verbs of `finetune`.

Light modules are imported at the top. So are annexes, because an annex imports nothing before a name is asked for.
Modules that import torch, numpy or matplotlib are imported inside the verb that needs them, so `finetune check RECIPE`
answers in under half a second.

May import: everything.
"""
