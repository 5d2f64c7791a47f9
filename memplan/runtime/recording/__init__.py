"""`memplan.record`: records the allocations of one run of any function, plans them, and replays them on CUDA.

In: a function. Out: a `Recording`. Start at `recorded.py`, which runs the function; `memplan/recording/` has the
allocator and the tape.
"""
