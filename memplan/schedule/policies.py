"""The scheduling policies by name, and the check of the bounds that they prove.

Each policy is imported on first use: the traced order needs neither numpy nor numba. The bound in a plan file is proven
again from its evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from memplan.core.graph import Graph
from memplan.core.later import policy_in
from memplan.core.schedule import Evidence, Schedule, make_schedule, working_set
from memplan.errors import InvalidPlan
from memplan.schedule.cut import cut_bound

Policy = Callable[[Graph], Schedule]

# name -> module and function
POLICIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "auto": ("auto", "auto"),
        "traced": ("policies", "traced"),
    }
)


def traced(graph: Graph) -> Schedule:
    """Schedule the ops in the order in which the program ran when it was traced, which is eager's order."""
    return make_schedule(graph, tuple(range(len(graph.ops))), "traced")


def proven(graph: Graph, policy: str) -> Schedule:
    """Return the schedule of a graph whose ops are in order already, with the bound that cuts at its peaks prove.

    That is the order of a plan with evictions: its bound holds for all orders of the same ops and copies.
    """
    from memplan.schedule.auto import WORK, Prover
    from memplan.schedule.graph_arrays import make_graph_arrays

    arrays = make_graph_arrays(graph)
    prover = Prover(arrays, WORK * arrays.n)
    prover.raise_bound(arrays.traced)
    return prover.schedule(graph, arrays.traced, policy)


def order(graph: Graph, schedule: str | Policy = "auto") -> Schedule:
    """Schedule `graph` by a policy or its name. Raises `MemplanError` for an unknown name."""
    return policy_of(schedule)(graph)


def policy_of(schedule: str | Policy) -> Policy:
    """Return the policy of that name, or the given function itself. Raises `MemplanError` for an unknown name."""
    found: Policy = policy_in(POLICIES, "schedule", schedule, "memplan.schedule")
    return found


def require_evidence(graph: Graph, schedule: Schedule) -> None:
    """Raise `InvalidPlan` unless the cut or the working set of the op named by `proof` gives the bound."""
    if not graph.ops and not schedule.proof:
        return
    if schedule.evidence is Evidence.BETWEEN:
        if schedule.proof or cut_bound(graph, None) != schedule.bound:
            raise InvalidPlan(f"says {schedule.bound}, its evidence does not prove it", where="schedule.bound")
        return
    index = next((i for i, op in enumerate(graph.ops) if op.name == schedule.proof), None)
    if index is None:
        raise InvalidPlan("names no op of the graph", where="schedule.proof")
    proven = cut_bound(graph, index) if schedule.evidence is Evidence.CUT else working_set(graph)[0]
    if proven != schedule.bound:
        raise InvalidPlan(f"says {schedule.bound}, its evidence gives {proven}", where="schedule.bound")
