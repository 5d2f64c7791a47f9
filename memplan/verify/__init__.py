"""Proving again what a plan says of all orders and all layouts: `memplan check --verify`.

`cut.py` finds minimum cuts by networkx, with nothing of the code that proved them first; `proofs.py` says which proof
belongs to which claim and how it ended; `within.py` ends what takes too long.
"""

from __future__ import annotations

from memplan.verify.proofs import Proof, State, verify

__all__ = ["Proof", "State", "verify"]
