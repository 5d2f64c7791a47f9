"""Eviction policies: `Workload` in, events out.

Start at `auto.py`, the default, which has `recompute` too: it searches decisions (`../search.py`) from several starts
and measures each exactly. One start are the decisions of a published policy, `dtr.py`; `capuchin.py` is another.
`delta.py` and `flow.py` are its last resorts, when it finds nothing else within the budget; `flow.py` itself falls back
to `genoa.py`, which keeps one op's operands at a time. `loading.py` adapts a policy to models that stay on the host.
`checkpoint.py` follows the model's activation checkpoints, without a budget. `../select.py` names the policies.
"""
