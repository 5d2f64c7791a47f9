"""The data types that every stage shares, and the independent validator. No torch, no solver.

In: nothing of memplan but its errors. Out: `Graph`, `Schedule`, `Problem`, `Solution`, `Plan`.
Start at `graph.py` (what runs), then `schedule.py` (in which order), `lifetimes.py` (live intervals), `problem.py` (the
offset-assignment problem), `validate.py` (the oracle), `plan.py` (all of it together). `units.py`, `jsonio.py`,
`jsonschema.py` and `csvio.py` read and write.
"""
