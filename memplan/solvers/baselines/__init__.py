"""Solvers of one rule each. The portfolio starts from `greedy.py` and falls back to `naive.py`; users may select any.

`partition.py` draws the table of steps x partitions, `tstack.py` the diagram of evictions; `online.py` is what an
allocator without a plan does.
"""
