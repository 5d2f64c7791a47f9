"""Recorded allocations, replayed at planned addresses: for programs that no tracer can read. No torch in here.

`tape.py` is what a step allocates, in order, and where the plan puts it; `machine_kernel.py` serves a step from the
tape, or notices that it is another one; `allocator.py` makes C functions of it, which an allocator's hook takes.
"""
