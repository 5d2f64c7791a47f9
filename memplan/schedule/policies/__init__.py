"""The policies that order ops by a single rule: `GraphArrays` in, an order out.

`traced.py` is eager's order; `greedy.py`, `reverse_greedy.py`, `lpmf.py` and `early_free.py` are list scheduling with
different priorities, run by `orders.py` over `list_kernel.py`.
"""
