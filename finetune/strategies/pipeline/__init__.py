"""A pipeline: each rank is a stage with a run of the decoder layers, on torch.distributed.pipelining."""
