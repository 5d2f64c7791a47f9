"""`memplan.max_batch`: find the largest batch size that fits, from fake tensors, without running out of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memplan.core.choices import Gradients
from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, InvalidModel, InvalidSize, MemplanError, UnsupportedGraph
from memplan.evict.costs import CostModel, cost_model
from memplan.evict.select import fit_policy
from memplan.evict.workload import Policy as EvictionPolicy
from memplan.evict.workload import Workload
from memplan.planning.batch_search import largest_within
from memplan.planning.budget import plan_within
from memplan.planning.byte_limits import ByteLimits
from memplan.planning.checkpoints import without_checkpoints
from memplan.planning.fit import make_workload, smallest
from memplan.planning.make_plan import ScheduledGraph
from memplan.planning.options import Costs, PlanOptions, read_size
from memplan.solvers import Solver
from memplan.torch_inside.graphs import FakeTensorMode
from memplan.trace.planning import device_costs, plan_traced
from memplan.trace.tracing import trace

Make = Callable[[int], tuple[nn.Module, Any]]


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
    gradients: Gradients = "auto",
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
        InvalidModel: `make` ignores its batch size.
        UnsupportedGraph: `make` fails on fake tensors, or the model cannot be traced.

    Example:
        ```python
        def make(batch):
            model = torch.nn.Linear(64, 10)
            return model, (torch.randn(batch, 64),)

        batch = memplan.max_batch(make, "1MiB")
        ```
    """
    limits = ByteLimits(total=_limit("budget", budget), arena=_limit("arena_budget", arena_budget))
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (lowest, highest))
    if limits == ByteLimits() or not whole or not 1 <= lowest <= highest:
        raise InvalidSize(
            f"budget={budget!r}, arena_budget={arena_budget!r}, lowest={lowest}, highest={highest}",
            where="max_batch",
            hint="give a budget in bytes and 1 <= lowest <= highest",
        )
    options = PlanOptions(
        policy="auto" if policy is None else policy, costs=costs, solver=solver, gradients=gradients, reserve=reserve
    )
    evicts = policy is not None
    search = _Search(make, limits, options, train=train, evicts=evicts)
    if search.over(lowest) > 0:
        least = search.limit + search.over(lowest)
        raise BudgetInfeasible(
            f"a batch of {lowest} does not fit into {format_bytes(search.limit)}",
            op="",
            smallest=least,
            where="max_batch",
            hint=f"it needs {least} bytes ({format_bytes(least)})",
        )
    fits = largest_within(search.over_or_refused, search.limit, lowest=lowest, highest=highest)
    if fits > lowest and search.same_need(lowest, fits):
        raise InvalidModel(
            f"make({lowest}) and make({fits}) return the same inputs, which need the same memory: it ignores its batch",
            where="max_batch",
            hint="build the inputs from the batch: lambda batch: (model, (torch.randn(batch, 64),))",
        )
    while fits > lowest and not search.placed(fits):  # the first is nearly always placed
        fits -= 1
    return fits


def _limit(name: str, budget: object) -> int | None:
    """Return a budget in bytes; None for none. Raises `InvalidSize`."""
    return None if budget is None else read_size(name, budget)


@dataclass(slots=True)
class _Search:
    """Plan single batch sizes and remember what they need; `evicts`: storages that do not fit may be evicted."""

    make: Make
    limits: ByteLimits
    options: PlanOptions
    train: bool | None
    evicts: bool
    _overs: dict[int, int] = field(default_factory=dict)
    _inputs: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        """The budget in bytes that errors name: that of the total, or else that of the arena."""
        found = self.limits.arena if self.limits.total is None else self.limits.total
        assert found is not None
        return found

    def over(self, batch: int) -> int:
        """Return by how many bytes the fewest in which this batch size can run exceed the budgets; negative: room."""
        if batch not in self._overs:
            plain, costs, limit = self._plain(batch)
            least = plain.arena_size
            if self.evicts and least > limit:
                least = smallest(_workload(plain, costs), fit_policy(self.options.policy))
            self._overs[batch] = least - limit
        return self._overs[batch]

    def over_or_refused(self, batch: int) -> int:
        """Return what `over` returns; where the model takes no such batch, the error says which one fits."""
        try:
            return self.over(batch)
        except UnsupportedGraph as error:
            fits = max((known for known, over in self._overs.items() if over <= 0), default=0)
            hint = (
                f"{fits} fits; if the model takes no batch of {batch}, set highest= to what it takes; or {error.hint}"
            )
            raise UnsupportedGraph(error.node, error.reason, hint, see=error.see) from error

    def same_need(self, one: int, two: int) -> bool:
        """Return whether two batch sizes make inputs of the same sizes and need the same memory."""
        return self._inputs[one] == self._inputs[two] and self._overs[one] == self._overs[two]

    def placed(self, batch: int) -> bool:
        """Return whether a plan of this batch size keeps the budgets, placement included."""
        plain, costs, limit = self._plain(batch)
        if plain.arena_size <= limit:
            return True
        if not self.evicts:
            return False
        options = replace(self.options, budget=self.limits.total, arena_budget=self.limits.arena)
        try:
            plan_within(ScheduledGraph.of(plain), options, costs)
        except BudgetInfeasible:
            return False
        return True

    def _plain(self, batch: int) -> tuple[Plan, CostModel, int]:
        """Return the plan without evictions, the costs on its device, and the most bytes that its arena may have.

        Where evictions are allowed, they replace the model's activation checkpoints, as in a plan with a budget.
        """
        model, inputs = self._example(batch)
        self._inputs[batch] = tuple(
            tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in tree_leaves(inputs)
        )
        traced = trace(
            model,
            inputs,
            train=self.train,
            gradients_in_arena=self.options.gradients_in_arena,
            copy_gradients=self.options.gradients_copied,
        )
        if self.evicts:
            traced = replace(traced, graph=without_checkpoints(traced.graph))
        plan = plan_traced(traced, self.options)
        limit = self.limits.arena_beside(plan.total - plan.arena_size)
        return plan, cost_model(self.options.costs or device_costs(traced.device)), limit

    def _example(self, batch: int) -> tuple[nn.Module, Any]:
        """Return the model and the inputs of a batch size, on fake tensors."""
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
                model, inputs = self.make(batch)
        except MemplanError:
            raise
        except Exception as error:
            hint = "make(batch) runs on fake tensors: build the model and its inputs without reading values of tensors"
            raise UnsupportedGraph(
                f"make({batch})", f"{type(error).__name__}: {error}".splitlines()[0], hint, see="max-batch"
            ) from error
        return model, inputs


def _workload(plan: Plan, costs: CostModel) -> Workload:
    """Return the step of a plan without evictions as a workload."""
    return make_workload(plan.graph, plan.schedule.order, costs, plan.alignment)
