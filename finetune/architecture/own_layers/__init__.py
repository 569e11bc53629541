"""The parts of a decoder layer that the kit computes with its own autograd: linear layers with adapters, norms and
gates.

May import: the same as `architecture`.
"""
