"""Analyses of a plan: which buffers are alive, when they are used, what changed, what would save memory.

In: a `Plan` (`diff.py`: two). Out: frozen dataclasses, which `report/` renders. Start at `buffers.py` (live buffers and
their uses), then `rows.py` (buffers of repeated layers as rows, and the figures that checks compare), `explain.py`,
`diff.py`, `needs.py`, `forecast.py`, and `allocated.py`, what CUDA's allocator recorded.
"""
