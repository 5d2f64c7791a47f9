"""The policies that order ops by a single rule: `Graph` in, `Schedule` out, without a search.

All are list scheduling with different priorities: `list_policies.py` names them, and `list_kernel.py` is the loop.
"""
