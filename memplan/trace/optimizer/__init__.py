"""The optimizer's update as ops of the step: one fused kernel per parameter, as soon as it may run.

`updates.py` adds them, `optimizers.py` says which optimizers are known, `update_groups.py` which updates share a call.
"""
