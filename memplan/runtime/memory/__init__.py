"""The arena and who owns its bytes.

Start at `arena.py` (one allocation, and tensors that are addresses in it), then `arena_ownership.py` (steps in flight),
`shared_arena.py` (several graphs in one arena), `stream_ordering.py` (several CUDA streams), `measure.py`, `host.py`.
"""
