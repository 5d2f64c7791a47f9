"""Measures a sequence of events exactly: bytes by step, seconds, stalls.

In: a `Workload` and events. Out: `MeasuredEvents`, or events with their copies moved (`overlap.py`). Start at
`arrays.py`; `measure_kernel.py` is compiled because policies call it thousands of times.
"""
