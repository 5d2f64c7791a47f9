"""The arena, and which step owns its bytes.

In: a `Plan` and a device. Out: an `Arena`. Start at `arena.py` (one allocation, and tensors at addresses in it) and
`arena_ownership.py` (steps in flight). `shared_arena.py` places several programs in one arena, of which
`arena_parts.py` has the pieces, `passed_tensors.py` what they pass to each other, and `handed_gradients.py` what they
add up in one backward; `stream_ordering.py` orders CUDA streams, and `host.py` pins host memory.
"""
