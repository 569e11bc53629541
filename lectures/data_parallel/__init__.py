"""The lecture `data-parallel`: torch.nn.DataParallel's four steps in time, bytes and memory, beside DDP.

May import: rehearse, compare, planner, the lectures' output and what is below them.
"""
