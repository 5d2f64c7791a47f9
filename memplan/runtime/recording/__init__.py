"""`memplan.record`: records the allocations of one run of any function, plans them, and replays them on CUDA.

`recorded.py` runs the function and returns a `Recording`; `memplan/recording/` has the allocator and the tape.
"""
