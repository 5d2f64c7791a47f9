"""The options that decide how a traced step is planned.

Every public function that plans makes one `PlanOptions` of its keywords and passes it down. Creating it checks every
option, so the functions below need not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from memplan.core.choices import CHECKPOINTS, GRADIENTS, LAYOUTS, Checkpoint, Gradients, Layout, require_choice
from memplan.core.division import Compression, Divide, Division, compression_of, division_of
from memplan.core.units import parse_share, parse_size
from memplan.errors import InvalidShapes, InvalidSize, UnsupportedCall, UnsupportedProblem

if TYPE_CHECKING:
    import os

    import torch

    from memplan.evict.costs import CostModel
    from memplan.evict.workload import Policy as EvictionPolicy
    from memplan.schedule.select import Policy as SchedulePolicy
    from memplan.solvers.base import Solver

    Costs = CostModel | str | os.PathLike[str]
    Device = str | torch.device | Sequence[str | torch.device]
else:  # torch is not imported here; tools that read signatures at run time see these
    Costs = Device = Any

Budget = int | float | str
DynamicShapes = Mapping[str, Any] | Sequence[Any]

_BUDGET_HINT = "give bytes (8589934592), a text ('8GiB'), a share of the need without a budget (0.5, '50%'), or 'min'"


class PlanKeywords(TypedDict, total=False):
    """The keywords that `memplan.plan` and `Backend` have in common, apart from `gradients`."""

    budget: Budget | Sequence[Budget] | None
    policy: str | EvictionPolicy
    costs: Costs | None
    checkpoint: Checkpoint
    divide: Divide
    compress: Compression | None
    schedule: str | SchedulePolicy
    solver: str | Solver
    layout: Layout
    time_limit: float | None
    device: Device | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `memplan.plan`, which describes each of them; `train` says what is traced, and is none of them.

    Raises:
        MemplanError: An option has no valid value, or options cannot be combined; its subclasses say which of both.

    Example:
        >>> options = PlanOptions(budget="8GiB", policy="recompute")
        >>> replace(options, budget=1 << 30).policy
        'recompute'
    """

    budget: Budget | Sequence[Budget] | None = None
    policy: str | EvictionPolicy = "auto"
    costs: Costs | None = None
    checkpoint: Checkpoint = "follow"
    divide: Divide = None
    compress: Compression | None = None
    gradients: Gradients = "safe"
    schedule: str | SchedulePolicy = "auto"
    solver: str | Solver = "auto"
    layout: Layout = "auto"
    time_limit: float | None = None
    device: Device | None = None
    dynamic_shapes: DynamicShapes | None = None

    def __post_init__(self) -> None:
        require_choice("checkpoint", self.checkpoint, CHECKPOINTS)
        require_choice("gradients", self.gradients, GRADIENTS)
        if self.gradients_in_arena:
            refuse_beside_arena(device=self.device, budget=self.budget, dynamic_shapes=self.dynamic_shapes)
        if self.dynamic_shapes is not None:
            self._refuse_beside_dynamic_shapes()
        division_of(self.divide)
        compression_of(self.compress)
        self._require_budgets()
        self._require_known_names()
        self._require_known_costs()
        _ = self.layout_solver

    @property
    def division(self) -> Division | None:
        """The division that `divide` stands for; None for no division."""
        return division_of(self.divide)

    @property
    def compression(self) -> str:
        """The compression that `compress` stands for; "" for none."""
        return compression_of(self.compress)

    @property
    def gradients_in_arena(self) -> bool:
        """Whether the gradients of parameters are planned and stay in the arena to the end of the step."""
        return self.gradients == "arena"

    @property
    def layout_solver(self) -> str | Solver:
        """The solver that makes the layout, or its name.

        Raises `UnsupportedProblem` for an unknown layout, or a layout that another solver makes.
        """
        if self.layout not in LAYOUTS:
            what = f"there is no layout {self.layout!r}"
            raise UnsupportedProblem(what, hint=f"choose one of: {', '.join(LAYOUTS)}")
        if self.layout == "auto":
            return self.solver
        if self.solver not in ("auto", self.layout):
            what = f"layout={self.layout!r} is made by the solver of that name, not by {self.solver!r}"
            raise UnsupportedProblem(what, hint="leave out one of them")
        return self.layout

    def _require_budgets(self) -> None:
        """Raise `InvalidSize` for a budget in no known notation, or one for each device where there is one device."""
        if self.budget is None:
            return
        if isinstance(self.budget, (str, bytes)) or not isinstance(self.budget, Sequence):
            read_budget(self.budget)
            return
        devices = 1 if self.device is None or not isinstance(self.device, (list, tuple)) else len(self.device)
        if devices == 1:
            what = f"{self.budget!r} is not a budget: there is one device"
            raise InvalidSize(what, where="budget", hint=_BUDGET_HINT)

    def _require_known_names(self) -> None:
        """Raise the errors of the policies, solvers and limits for a value that they do not know.

        The registries are imported only for values other than the defaults.
        """
        if self.policy != "auto":
            from memplan.evict.select import fit_policy

            fit_policy(self.policy)
        if self.schedule != "auto":
            from memplan.schedule.select import policy_of

            policy_of(self.schedule)
        if self.solver != "auto" or self.time_limit is not None:
            from memplan.solvers.select import require_limit, solver_of

            solver_of(self.solver)
            require_limit("time_limit", self.time_limit)

    def _require_known_costs(self) -> None:
        """Raise `InvalidCosts` for an unknown cost model, and the errors of `load_costs` for a file."""
        if self.costs is not None:
            from memplan.evict.costs import cost_model

            cost_model(self.costs)

    def _refuse_beside_dynamic_shapes(self) -> None:
        """Raise `InvalidShapes` for options beside `dynamic_shapes` that work for one shape only."""
        if self.device is not None:
            what = "a plan for another device has one shape"
            hint = "leave out one of them: shapes that vary are planned where the model is"
            raise InvalidShapes(what, where="device with dynamic_shapes", hint=hint, see="one-shape")
        if self.divide or self.compress:
            what = "ops are divided, and masks packed, for one shape"
            where = f"{'divide' if self.divide else 'compress'} with dynamic_shapes"
            raise InvalidShapes(what, where=where, hint="leave out one of them", see="one-shape")
        if self.budget is not None:
            what = "a budget's evictions hold for one size only"
            hint = "give the budget without dynamic_shapes, for the largest shape; memplan.max_batch finds it"
            raise InvalidShapes(what, where="budget with dynamic_shapes", hint=hint, see="one-shape")


DEFAULTS = PlanOptions()


def refuse_beside_arena(**others: Any) -> None:
    """Raise `UnsupportedCall` for the first option that is set and cannot be combined with `gradients="arena"`."""
    for name, option in others.items():
        if option is not None and option is not False:
            what = "gradients='arena' is not supported with it"
            raise UnsupportedCall(
                what,
                where=f"{name}={option!r}",
                hint="leave out one of them, or use compile_step",
                see="gradients-arena",
            )


def read_budget(budget: object) -> int | float | Literal["min"]:
    """Return a budget in one of three notations: bytes (int), a share of the need without it (float), or "min".

    Raises `InvalidSize` for anything else.
    """
    if budget == "min":
        return "min"
    if isinstance(budget, str):
        if budget.strip().endswith("%"):
            return _share(parse_share(budget))
        nbytes = parse_size(budget)
        if not nbytes and budget.strip("0."):
            raise InvalidSize(f"{budget!r} is less than a byte", where="budget", hint=_BUDGET_HINT)
        return nbytes
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise InvalidSize(f"{budget!r} is not a budget", where="budget", hint=_BUDGET_HINT)
    if isinstance(budget, float):
        return _share(budget)
    if budget < 0:
        raise InvalidSize(f"{budget!r} is negative", where="budget", hint=_BUDGET_HINT)
    return budget


def _share(share: float) -> float:
    """Return a share. Raises `InvalidSize` unless it is above 0 and at most 1."""
    if not 0 < share <= 1:
        raise InvalidSize(f"{share!r} is not a share between 0 and 1", where="budget", hint=_BUDGET_HINT)
    return share
