"""What of a decoder layer the kit computes by autograd of its own: linear layers with adapters, norms and gates.

May import: what `architecture` may.
"""
