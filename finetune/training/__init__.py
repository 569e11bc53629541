"""One optimizer step, the loop around it, and the session around the loop.

run.py draws which object holds which.

May import: hub, report and everything below them.
"""
