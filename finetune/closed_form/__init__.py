"""A recipe's memory peaks by arithmetic, in milliseconds: `activation_checkpointing: auto`, and the planner's search.

May import: model, measure, and everything below them.
"""
