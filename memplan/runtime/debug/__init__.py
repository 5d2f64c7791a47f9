"""Observes steps while they run.

Start at `hooks.py`, which calls functions of the user; `tracker.py` counts bytes, and `sanitizers.py` checks them.
"""
