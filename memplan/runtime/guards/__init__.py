"""Checks whether a call is the one that was planned, as dynamo's guards do, and raises for the first difference.

In: a `TracedGraph`, and the arguments of a call. Out: the tensors that the program takes, or an `InputMismatch`.
Start at `input_guards.py` (arguments), `module_guards.py` (submodules) and `parameter_guards.py` (addresses, and Python
values). `refused_calls.py` refuses `torch.func`, and steps that do not synchronize the ranks of a process group.
"""
