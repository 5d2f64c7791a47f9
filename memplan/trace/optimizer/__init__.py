"""Add the optimizer's update to the step: one fused kernel per parameter, as soon as it may run.

`updates.py` adds the ops, `optimizers.py` says which optimizers are supported, and `update_groups.py` which updates can
share a kernel call.
"""
