"""How a run's ranks hear from each other: heartbeats in a folder or over the network, and files between machines.

May import: strategies and what is below them.
"""
