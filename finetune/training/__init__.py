"""One optimizer step, the loop around it, and the session around the loop.

May import: hub, report and what is below them.
"""
