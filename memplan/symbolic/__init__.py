"""Plans whose sizes are expressions: made once for hint values, and resolved for any values of their symbols.

In: a `Plan` and the sizes of its graph as expressions. Out: a `SymbolicPlan`, and a `Plan` for given values. In the
order of the data flow: `sizes.py` (every size of a graph as an expression of the varying dimensions) and `plan.py`
(`SymbolicPlan`, the plans for given values, and files). Like tract's memory schema, the symbolic plan is a type of its
own, apart from the resolved plan. Nothing here imports torch.
"""

from __future__ import annotations

from memplan.symbolic.plan import SymbolicPlan, load_symbolic, make_symbolic
from memplan.symbolic.sizes import Expression, Sizes, Symbol

__all__ = ["Expression", "Sizes", "Symbol", "SymbolicPlan", "load_symbolic", "make_symbolic"]
