"""The search of the default policy: one decision per storage (keep, recompute, offload), judged and improved.

`decisions.py` is the state, `descent.py` the greedy descent over it; the kernels expand decisions into events, place
copies and anneal.
"""
