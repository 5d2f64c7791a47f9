"""On-demand offload (`on_mismatch="passive"`): runs calls that have no plan eagerly, within the budget.

In: the model, a call, and the budget. Out: the result of the call; saved activations are offloaded when the budget is
exceeded. Start at `on_demand_offload.py`; `eager_step.py` runs a whole training step.
"""
