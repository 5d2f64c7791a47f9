"""Observes steps while they run.

In: a `Plan`, and functions of the user. Out: functions that the generated code calls before and after each op. Start
at `hooks.py`, which calls functions of the user and has one that counts bytes; `sanitizers.py` checks them.
"""
