"""Plans whose sizes are expressions: made once under a hint, placed for any values of their symbols.

In the order in which data flows: `expression.py` (sizes as text that can be evaluated), `symbols.py` (what varies, and
how far), `sizes.py` (every size of a graph as an expression), `place.py` (offsets for given sizes, in microseconds),
`resolve.py` (whole plans for given values), `plan.py` (`SymbolicPlan`), `planfile.py` (as a JSON file). The model to
learn from is tract's memory schema, which is symbolic too and kept apart from the one that is resolved. Nothing here
imports torch.
"""

from __future__ import annotations

from memplan.symbolic.expression import Expression
from memplan.symbolic.plan import SymbolicPlan, make_symbolic
from memplan.symbolic.planfile import load_symbolic
from memplan.symbolic.resolve import Placement
from memplan.symbolic.sizes import Sizes
from memplan.symbolic.symbols import Symbol

__all__ = ["Expression", "Placement", "Sizes", "Symbol", "SymbolicPlan", "load_symbolic", "make_symbolic"]
