"""A model of the user's own configuration, made small: its loss and gradients against the library's own.

May import: strategies, tokens and the floors below them."""
