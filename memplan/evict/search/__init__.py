"""The search of the default policy: one decision per storage (keep, recompute, offload), measured and improved.

In: a `Workload`. Out: `Decisions`, and their events. Start at `decisions.py`, the state; `descent.py` is the greedy
descent over it; the kernels expand decisions into events, place copies and anneal.
"""
