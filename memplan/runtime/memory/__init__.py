"""The arena, and which step owns its bytes.

In: a `Plan` and a device. Out: an `Arena`. Start at `arena.py` (one allocation, and tensors at addresses in it) and
`arena_ownership.py` (steps in flight). `shared_arena.py` places several programs in one arena, `stream_ordering.py`
orders CUDA streams, `measure.py` measures what kernels allocate, and `host.py` pins host memory.
"""
