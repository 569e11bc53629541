"""A pipeline: each rank is a stage with a run of the decoder layers, on torch.distributed.pipelining.

May import: model, launch, measure and what is below them; of strategies what knows of pieces and shards.
"""
