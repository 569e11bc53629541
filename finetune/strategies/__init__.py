"""A strategy is a way to build an Accelerator: DDP, FSDP2, ZeRO; and the receipt of what really runs.

May import: model, launch, measure and what is below them.
"""
