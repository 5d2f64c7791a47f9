"""Decides what runs the calls for which `on_mismatch="replan"` makes no further program.

If only sizes differ between such calls, one program for all sizes does; what remains runs on the original model.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.export import Dim

from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import MemplanError
from memplan.runtime.api.select import MAX_PROGRAMS
from memplan.runtime.guards.input_guards import same_constant
from memplan.runtime.on_demand.on_demand_offload import offload_within, run_within

_log = logging.getLogger("memplan")
_SMALLEST = 3  # an example with sizes below is no example of other sizes: torch specializes on 0, 1 and 2


class UnplannedCalls:
    """Runs calls without a plan on the original model; the first one logs a warning."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self._warned = False

    def run(  # noqa: PLR0917
        self,
        differs: MemplanError,
        refused: MemplanError | None,
        plan: Plan,
        device: torch.device,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call eagerly; saved activations are offloaded on demand to keep the budget of `plan`, if it has one.

        `differs`: how the call differs from the example. `refused`: why it has no program (None: there are as many
        programs as are kept). Both are the same error for a call in another mode.
        """
        offload = offload_within(plan, device)
        if not self._warned:
            self._warned = True
            how = "eagerly" if offload is None else f"eagerly within {format_bytes(offload.budget)}"
            why = f"there are {MAX_PROGRAMS} programs for other calls" if refused is None else refused.summary
            _log.warning(
                "%s: a call runs %s, without a plan: %s; it gets no program: %s; name the dimensions that vary in "
                "dynamic_shapes=, call it in fewer ways, or compile another module for such calls; this is logged once",
                *(plan.model, how, "it is in another mode" if differs is refused else differs.summary, why),
            )
        return run_within(offload, self._model, args, kwargs)


def shapes_of(
    forward: Callable[..., Any], spec: pytree.TreeSpec, calls: Sequence[Sequence[Any]]
) -> tuple[dict[str, Any], Sequence[Any]] | None:
    """Return `dynamic_shapes` for all sizes of calls that differ in sizes alone, and the leaves of one as the example.

    Dimensions that have the same size in each of the `calls` are one. Returns None if calls differ in anything else, or
    in nothing, or if all of them have sizes that are no examples of others. `spec`: the structure of all calls.
    """
    first = calls[0]
    if not all(_same_kind(x, y) for other in calls[1:] for x, y in zip(first, other, strict=True)):
        return None
    tensors = [(i, x) for i, x in enumerate(first) if isinstance(x, torch.Tensor)]
    sizes = {(i, d): tuple(call[i].shape[d] for call in calls) for i, x in tensors for d in range(x.dim())}
    varying = {at: found for at, found in sizes.items() if len(set(found)) > 1}
    examples = [n for n in range(len(calls)) if all(found[n] >= _SMALLEST for found in varying.values())]
    if not varying or not examples:
        return None
    names = {found: Dim(f"size{n}", min=1) for n, found in enumerate(dict.fromkeys(varying.values()))}
    leaves: list[Any] = [{d: names[found] for (at, d), found in varying.items() if at == i} for i in range(len(first))]
    args, kwargs = pytree.tree_unflatten([leaf or None for leaf in leaves], spec)
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    return dict(bound), calls[examples[-1]]


def _same_kind(one: Any, two: Any) -> bool:
    """Return whether two leaves are the same constant, or tensors that differ in sizes alone."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        kinds = ((x.dtype, x.device, x.dim(), x.requires_grad) for x in (one, two))
        return len(set(kinds)) == 1
    return type(one) is type(two) and not isinstance(one, torch.Tensor) and same_constant(one, two)
