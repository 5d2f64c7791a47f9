"""Read the lowered fx graph into a `TracedGraph`: ops, values, storages, and what the caller owns.

In: `Captured`, after all passes. Out: a `TracedGraph`. Start at `build.py`. Beside it: `alias_classes.py` (storages),
`output_spec.py` (what leaves the step), `remap_to_plan.py` (kernels for a plan's recomputes and copies),
`offload_target.py` (a model that stays on the host), and `opaque_outputs.py` (results that are not values).
"""
