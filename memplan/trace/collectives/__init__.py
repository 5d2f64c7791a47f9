"""Adds to a captured graph the collectives of a model that is divided among ranks, or copied to them.

`parallel_graph.py` captures such a model and adds them; `sharded.py` gathers parameters and reduces their gradients
(FSDP2), and `replicated.py` averages gradients in buckets (DDP).
"""
