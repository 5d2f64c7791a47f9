"""Measures steps while they train and makes plans from the measured costs (`costs="measure"`).

In: a `Runner` and its options. Out: a `Measurement`, and a runner with a faster plan. Start at `profile_guided.py`,
which chooses the plans. `op_timer.py` times the ops of a program. Capuchin calls
this measured and guided execution.
"""
