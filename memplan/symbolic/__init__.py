"""Plans whose sizes are expressions: made once for hint values, and resolved for any values of their symbols.

In: a `Plan` and the sizes of its graph as expressions. Out: a `SymbolicPlan`, and a `Plan` for given values. In the
order of the data flow: `sizes.py` (every size of a graph as an expression of the varying dimensions), `place.py`
(offsets for given sizes), `resolve.py` (whole plans for given values), `plan.py` (`SymbolicPlan`, and its files).
Like tract's memory schema, the symbolic plan is a type of its own, apart from the resolved
plan. Nothing here imports torch.
"""

from __future__ import annotations

from memplan.symbolic.plan import SymbolicPlan, load_symbolic, make_symbolic
from memplan.symbolic.resolve import Placement
from memplan.symbolic.sizes import Expression, Sizes, Symbol

__all__ = ["Expression", "Placement", "Sizes", "Symbol", "SymbolicPlan", "load_symbolic", "make_symbolic"]
