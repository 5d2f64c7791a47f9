"""The data types that every stage shares, and the independent validator. It imports no torch and no solver.

In: nothing of memplan but its errors. Out: `Graph`, `Schedule`, `Problem`, `Solution`, `Plan`. Start at `graph.py`
(ops and storages), then `schedule.py` (their order), `lifetimes.py` (live intervals), `problem.py` (offset
assignment), `validate.py` (the validator) and `plan.py` (everything together). `units.py`, `jsonio.py`
and `csvio.py` read and write; `graph_edit.py` makes a graph from another.
"""
