"""The arena, and which step owns its bytes.

In: a `Plan` and a device. Out: an `Arena`. Start at `arena.py` (one allocation, and tensors at addresses in it) and
`arena_ownership.py` (steps in flight). `idle_arenas.py` says when its bytes are given back between steps.
`shared_arena.py` places several programs in one arena.
"""
