"""The scheduling policies by name. Each is imported on first use: the traced order needs neither numpy nor numba."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule
from memplan.errors import MemplanError

Policy = Callable[[Graph], Schedule]

# name -> module and function
POLICIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "auto": ("portfolio", "portfolio"),
        "traced": ("policies.traced", "traced"),
        "early_free": ("policies.early_free", "early_free"),
        "late_alloc": ("policies.early_free", "late_alloc"),
        "lpmf": ("policies.lpmf", "lpmf"),
        "greedy": ("policies.greedy", "greedy"),
        "reverse_greedy": ("policies.reverse_greedy", "reverse_greedy"),
        "beam": ("search.beam", "beam"),
        "exact": ("search.exact", "exact"),
        "cpsat": ("search.cpsat", "cpsat"),
    }
)


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
