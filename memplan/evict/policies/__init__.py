"""Eviction policies by name: `Workload` in, events out. Each is imported when it is first used.

Start at `auto.py`, the default, which has `recompute` too: it searches decisions (`../search.py`) from several starts
and measures each exactly. Starts are the decisions of `dtr.py`, and checkpoints: `checkpoint.py` follows those of the
model, or has one around each block. `delta.py` and `flow.py` are its last resorts, when it finds nothing else within
a budget; `flow` itself falls back to `genoa`, which keeps one op's operands at a time. `capuchin.py` is another policy.
`loading.py` adapts a policy to models that stay on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from memplan.core.later import policy_in
from memplan.evict.workload import Policy

# name -> module and function
POLICIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "auto": ("policies.auto", "auto"),
        "recompute": ("policies.auto", "recompute"),
        "flow": ("policies.flow", "flow"),
        "genoa": ("policies.flow", "genoa"),
        "dtr": ("policies.dtr", "dtr"),
        "delta": ("policies.delta", "delta"),
        "capuchin": ("policies.capuchin", "capuchin"),
    }
)


def policy_name(policy: str | Policy) -> str:
    """Return the name under which a plan records its policy: the given name, or that of the function."""
    return policy if isinstance(policy, str) else getattr(policy, "__name__", "custom")


def fit_policy(policy: str | Policy = "auto") -> Policy:
    """Return the policy of that name, or the given function itself. Raises `MemplanError` for an unknown name."""
    found: Policy = policy_in(POLICIES, "policy", policy, "memplan.evict")
    return found
