"""A pipeline: each rank is a stage with a run of decoder layers, on torch.distributed.pipelining.

May import: model, launch, measure and everything below them; from strategies only the modules about pieces and shards.
"""
