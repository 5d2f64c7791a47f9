"""From the lowered fx graph to `TracedGraph`: ops, values, storages, and who owns what.

Start at `build.py`; `alias_classes.py` (storages), `output_spec.py` (what leaves the step), `remap_to_plan.py` (kernels for
a plan's recomputes and copies), `offload_target.py` (a model that stays on the host), `opaque_outputs.py`.
"""
