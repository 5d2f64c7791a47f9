"""Eviction policies: `Workload` in, events out, one file each.

Start at `auto.py`, the default: it searches decisions (`../search/`) from several starts (`seeds.py`) and measures
each exactly. `capuchin.py`, `delta.py`, `dtr.py`, `flow.py` and `genoa.py` are published policies, from whose answers
`auto` starts and with which it is compared; `cpsat.py` is exact for small graphs; `loading.py` is for models that
stay on the host.
"""
