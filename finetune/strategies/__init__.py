"""A strategy is a way to build an Accelerator: DDP, FSDP2, ZeRO. The receipt says what really runs.

May import: model, launch, measure and everything below them.
"""
