"""The lecture `qlora`: full, LoRA and QLoRA, the memory of each part; planned at full size, tracked on a small model.

May import: lectures/output.py, lectures/local_ranks.py, rehearse, compare, planner and what is below them.
"""
