"""Eviction policies: `Workload` in, events out.

Start at `auto.py`, the default, which has `recompute` too: it searches decisions (`../search.py`) from several starts
and measures each exactly. Starts are the decisions of `dtr.py`, and checkpoints: `checkpoint.py` follows those of the
model, or has one around each block. `delta.py` and `flow.py` are its last resorts, when it finds nothing else within
a budget; `flow` itself falls back to `genoa`, which keeps one op's operands at a time. `capuchin.py` is another policy.
`loading.py` adapts a policy to models that stay on the host. `../select.py` names the policies.
"""
