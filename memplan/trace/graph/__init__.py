"""Read the lowered fx graph into a `TracedGraph`: ops, values, storages, and what the caller owns.

In: `Captured`, after all passes. Out: a `TracedGraph`. Start at `build.py`. Beside it: `values.py` (storages, results
that are no values, and what leaves the step), `remap_to_plan.py` (kernels for a plan's recomputes and copies), and
`offload_target.py` (a model that stays on the host).
"""
