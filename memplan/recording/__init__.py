"""Records the allocations of a step and replays them at planned addresses, for programs that cannot be traced.

In: the events of a step and a solution. Out: an allocator as two C functions. Start at `tape.py`, the allocations of
a step and their offsets; `machine_kernel.py` replays a tape and detects a step that differs; `allocator.py` wraps it.
Nothing here imports torch.
"""
