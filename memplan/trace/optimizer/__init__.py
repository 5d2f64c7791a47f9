"""Add the optimizer's update to the step: one fused kernel per parameter, as soon as it may run.

In: an fx graph of the loss and its gradients, and an optimizer. Out: the graph with the updates. Start at
`updates.py`, which adds the ops; `optimizers.py` says which optimizers are supported, and `update_groups.py` which
updates can share a kernel call.
"""
