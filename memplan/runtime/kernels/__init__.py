"""Selects the Python callable that runs each op of the plan and writes its result to the planned address.

In: a `KernelCall` and real tensors. Out: a `BoundOp`. Start at `kernel_selection.py`, which tries candidates on real
tensors; `probe.py` compares their results. The other files contain kernels that need more than one call.
"""
