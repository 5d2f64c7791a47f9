"""Which Python callable runs each op of the plan, and writes where it is told.

Start at `kernel_selection.py` (candidates are tried on the real thing, `probe.py` judges); the other files are kernels
that need more than a call.
"""
