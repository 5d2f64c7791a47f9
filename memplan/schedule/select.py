"""The scheduling policies by name. Each is imported on first use: the traced order needs neither numpy nor numba."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule, make_schedule
from memplan.errors import MemplanError

Policy = Callable[[Graph], Schedule]

# name -> module and function
POLICIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "auto": ("portfolio", "portfolio"),
        "traced": ("select", "traced"),
        "early_free": ("policies.list_policies", "early_free"),
        "late_alloc": ("policies.list_policies", "late_alloc"),
        "lpmf": ("policies.list_policies", "lpmf"),
        "greedy": ("policies.list_policies", "greedy"),
        "reverse_greedy": ("policies.list_policies", "reverse_greedy"),
        "beam": ("search.ideals", "beam"),
        "exact": ("search.ideals", "exact"),
        "cpsat": ("search.cpsat", "cpsat"),
    }
)


def traced(graph: Graph) -> Schedule:
    """Schedule the ops in the order in which the program ran when it was traced, which is eager's order."""
    return make_schedule(graph, tuple(range(len(graph.ops))), "traced")


def order(graph: Graph, schedule: str | Policy = "auto") -> Schedule:
    """Schedule `graph` by a policy or its name. Raises `MemplanError` for an unknown name."""
    return policy_of(schedule)(graph)


def policy_of(schedule: str | Policy) -> Policy:
    """Return the policy of that name, or the given function itself. Raises `MemplanError` for an unknown name."""
    if callable(schedule):
        return schedule
    if schedule not in POLICIES:
        raise MemplanError(f"schedule={schedule!r}", hint=f"choose one of: {', '.join(map(repr, POLICIES))}")
    module, name = POLICIES[schedule]
    found: Policy = getattr(import_module(f"memplan.schedule.{module}"), name)
    return found
