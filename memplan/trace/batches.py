"""`memplan.max_batch`: find the largest batch size that fits, by plans, without running out of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memplan.core.choices import Gradients
from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, InvalidModel, InvalidSize
from memplan.evict.workload import Policy as EvictionPolicy
from memplan.planning.options import Costs, PlanOptions, read_size
from memplan.solvers import Solver
from memplan.torch_inside.graphs import FakeTensorMode
from memplan.trace.planning import plan_traced
from memplan.trace.step_example import MAKE, StepExample
from memplan.trace.tracing import trace

_SECANTS = 12  # sizes that are guessed from the needs of others; then the range is halved
Make = Callable[[int], tuple[Any, ...]]


def max_batch(
    make: Make,
    budget: int | str | None = None,
    *,
    arena_budget: int | str | None = None,
    reserve: int | str = 0,
    lowest: int = 1,
    highest: int = 1 << 20,
    train: bool | None = None,
    policy: str | EvictionPolicy | None = "auto",
    costs: Costs | None = None,
    solver: str | Solver = "auto",
    gradients: Gradients = "arena",
) -> int:
    """Return the largest batch size from `lowest` to `highest` whose step fits the budgets.

    Everything is planned on fake tensors: nothing runs and no memory of the model's size is allocated. A larger batch
    is assumed to need no less memory.

    Args:
        make: a function from a batch size to `(model, example_inputs)`. It is called on fake tensors, so it must not
            read a tensor's numbers.
        budget: the most bytes on the device, everything together (`Plan.total`), as a number or a text such as "8GiB".
        arena_budget: the most bytes that the arena alone may have. One of both budgets is needed; both hold.
        reserve: bytes on the device that the step does not show, such as an optimizer's state; the total counts them.
        lowest: the smallest batch size to consider, at least 1.
        highest: the largest batch size to consider.
        train: plan forward and backward (True) or the forward alone (False); None follows `model.training`.
        policy: what decides the evictions, as in `memplan.plan`; None: nothing is evicted.
        costs: the cost model for evictions, its name ("a100", "h100", "h200", "cpu") or a .json file; None: the one
            nearest to the model's device.
        solver: the solver that places the buffers, or its name.
        gradients: where the gradients of parameters are, as in `memplan.compile`.

    Returns:
        The batch size.

    Raises:
        BudgetInfeasible: `lowest` does not fit; the error's `smallest` is the number of bytes that it needs.
        InvalidSize: the budget or the bounds make no sense.
        InvalidModel: `make` fails on fake tensors, or ignores its batch size.
        UnsupportedGraph: The model cannot be traced.

    Example:
        ```python
        def make(batch):
            model = torch.nn.Linear(64, 10)
            return model, (torch.randn(batch, 64),)

        batch = memplan.max_batch(make, "1MiB")
        ```
    """
    if isinstance(make, nn.Module) or not callable(make):
        what = f"is a {type(make).__name__}, not a function from a batch size to (model, example_inputs)"
        raise InvalidModel(what, where="make", hint=MAKE)
    budgets = {"budget": budget, "arena_budget": arena_budget}
    limits = {name: read_size(name, given) for name, given in budgets.items() if given is not None}
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (lowest, highest))
    if not limits or not whole or not 1 <= lowest <= highest:
        raise InvalidSize(
            f"budget={budget!r}, arena_budget={arena_budget!r}, lowest={lowest}, highest={highest}",
            where="max_batch",
            hint="give a budget, such as '8GiB', and 1 <= lowest <= highest",
        )
    options = PlanOptions(
        policy="auto" if policy is None else policy, costs=costs, solver=solver, gradients=gradients, reserve=reserve
    )
    search = _Search(make, limits, options, train=train, evicts=policy is not None)
    limit = next(iter(limits.values()))
    if search.over(lowest) > 0:
        least = limit + search.over(lowest)
        raise BudgetInfeasible(
            f"needs at least {format_bytes(least)}: a batch of {lowest} does not fit into {format_bytes(limit)}",
            op="",
            smallest=least,
            where="max_batch",
            hint=f"give at least {least} bytes ({format_bytes(least)}), or a smaller lowest=",
        )
    fits = largest_within(search.over, limit, lowest=lowest, highest=highest)
    if fits > lowest and search.over(lowest) == search.over(fits):
        raise InvalidModel(
            f"make({lowest}) and make({fits}) need the same memory: it ignores its batch",
            where="max_batch",
            hint="build the inputs from the batch: lambda batch: (model, (torch.randn(batch, 64),))",
        )
    return fits


@dataclass(slots=True)
class _Search:
    """Plans single batch sizes and remembers what they need; `evicts`: storages that do not fit may be evicted."""

    make: Make
    limits: dict[str, int]
    options: PlanOptions
    train: bool | None
    evicts: bool
    _overs: dict[int, int] = field(default_factory=dict)

    def over(self, batch: int) -> int:
        """Return by how many bytes the smallest plan of this batch size exceeds the budgets; negative: room."""
        if batch not in self._overs:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
                model, args, kwargs = StepExample(self.make).made(batch)
            traced = trace(model, args, kwargs, train=self.train, **self.options.tracing)
            over = self._excess(plan_traced(traced, self.options))
            if over > 0 and self.evicts:
                least: dict[str, Any] = {next(iter(self.limits)): "min"}
                over = min(over, self._excess(plan_traced(traced, replace(self.options, **least))))
            self._overs[batch] = over
        return self._overs[batch]

    def _excess(self, plan: Plan) -> int:
        """Return by how many bytes a plan exceeds the budgets."""
        needs = {"budget": plan.total, "arena_budget": plan.arena_size}
        return max(needs[name] - limit for name, limit in self.limits.items())


def largest_within(over: Callable[[int], int], limit: int, *, lowest: int, highest: int) -> int:
    """Return the largest size from `lowest` to `highest` that fits; `lowest` is known to fit.

    Args:
        over: The bytes by which a size exceeds the limit; 0 or negative where it fits.
        limit: The limit in bytes, from which the first guess is made.
        lowest: The smallest size.
        highest: The largest size.

    Example:
        >>> largest_within(lambda batch: 100 + 10 * batch - 1000, 1000, lowest=1, highest=4096)
        90
    """
    known: dict[int, int] = {lowest: over(lowest)}
    fits, fails = lowest, highest + 1
    while fails - fits > 1:
        guess = min(max(_guess(known, limit, fits, fails), fits + 1), fails - 1)
        known[guess] = over(guess)
        fits, fails = (fits, guess) if known[guess] > 0 else (guess, fails)
    return fits


def _guess(known: dict[int, int], limit: int, fits: int, fails: int) -> int:
    """Return the size whose need should meet the limit: needs are nearly affine in the size of the batch."""
    if len(known) == 1:
        return fits * max(limit // max(limit + known[fits], 1), 2)
    if len(known) > _SECANTS:
        return (fits + fails) // 2
    largest = sorted(known)
    one, two = largest[-2:] if fails > largest[-1] else (fits, fails)
    slope = (known[two] - known[one]) / (two - one)
    return one + int(-known[one] / slope) if slope > 0 else 2 * two
