"""A simulator of a runtime that evicts on demand, op by op, for the policies DTR, DELTA and flow.

In: a `Workload`, a memory and an `Evictor`. Out: events. Start at `eviction_simulator.py`; `device_state.py` tracks
where every storage is, `memory.py` counts bytes or assigns addresses.
"""
