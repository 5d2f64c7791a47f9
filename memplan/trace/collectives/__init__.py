"""Adds to a captured graph the collectives of a model that is divided among ranks, or copied to them.

`parallel_graph.py` captures such a model, gathers parameters and reduces their gradients (FSDP2), and averages
gradients in buckets (DDP); `local_parts.py` makes tensor parallelism's collectives ops of a plan.
"""
