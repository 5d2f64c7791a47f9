"""Lower bounds of max live over all legal orders, by minimum cuts.

In: `GraphArrays`. Out: a bound in bytes, with its evidence. Start at `cut.py` (the bound at one op), then `prover.py`
(the best bound so far), `propagate.py` (pairs of ops whose order follows from two cuts) and `repair.py` (an order
improved by the cut at its peak).
"""
