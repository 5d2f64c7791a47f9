"""Plans whose sizes are expressions: made once for hint values, and resolved for any values of their symbols.

In: a `Plan` and the sizes of its graph as expressions. Out: a `SymbolicPlan`, and a `Plan` for given values. In the
order of the data flow: `expression.py` (sizes as text that can be evaluated), `symbols.py` (the varying dimensions
and their ranges), `sizes.py` (every size of a graph as an expression), `place.py` (offsets for given sizes),
`resolve.py` (whole plans for given values), `plan.py` (`SymbolicPlan`), `planfile.py` (JSON files). Like tract's
memory schema, the symbolic plan is a type of its own, apart from the resolved plan. Nothing here imports torch.
"""

from __future__ import annotations

from memplan.symbolic.expression import Expression
from memplan.symbolic.plan import SymbolicPlan, make_symbolic
from memplan.symbolic.planfile import load_symbolic
from memplan.symbolic.resolve import Placement
from memplan.symbolic.sizes import Sizes
from memplan.symbolic.symbols import Symbol

__all__ = ["Expression", "Placement", "Sizes", "Symbol", "SymbolicPlan", "load_symbolic", "make_symbolic"]
