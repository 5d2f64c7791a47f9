"""What every legal order needs at least, by minimum cuts, and what that proves.

Start at `cut.py` (the bound at one op), then `prover.py` (the best bound so far), `propagate.py` (pairs of ops that two
cuts order) and `repair.py` (an order improved by the cut at its peak).
"""
