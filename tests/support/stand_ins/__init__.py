"""GPUs, kernels and engines that this machine does not have."""
