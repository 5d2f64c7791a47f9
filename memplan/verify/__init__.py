"""Verifies the optimality claims of a plan, over all orders and all layouts: `memplan check --verify`.

In: a `Plan`. Out: a `Proof` for each claim. Start at `proofs.py`, which selects a proof for each claim; `cut.py`
finds minimum cuts by networkx and shares no code with the prover.
"""

from __future__ import annotations

from memplan.verify.proofs import Proof, ProofState, verify

__all__ = ["Proof", "ProofState", "verify"]
