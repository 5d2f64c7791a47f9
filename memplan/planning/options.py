"""The options that decide how a traced step is planned: one table, of which the others are subclasses.

Every public function makes one value of its keywords (`PlanOptions.of`) and passes it down. Creating it checks every
option, so the functions below need not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

from memplan.core.choices import Checkpoint, Compression, Gradients, Kernels, Layout, require_choices
from memplan.core.division import Divide, Division, division_of, require_sums
from memplan.core.units import parse_percent, parse_size
from memplan.errors import InvalidShapes, InvalidSize, UnsupportedCall, UnsupportedProblem, located

if TYPE_CHECKING:
    import os

    import torch

    from memplan.evict.costs import CostModel
    from memplan.evict.workload import Policy as EvictionPolicy
    from memplan.schedule.policies import Policy as SchedulePolicy
    from memplan.solvers.base import Solver

    Costs = CostModel | str | os.PathLike[str]
    Device = str | torch.device | Sequence[str | torch.device]
else:  # torch is not imported here; tools that read signatures at run time see these
    Costs = Device = Any

Budget = int | float | str
DynamicShapes = Mapping[str, Any] | Sequence[Any]

_BUDGET_HINT = "give bytes (8589934592), a text ('8GiB'), a share of the need without a budget (0.5, '50%'), or 'min'"
_SIZE_HINT = "give bytes (8589934592) or a text ('8GiB')"
BUDGETS = ("budget", "arena_budget", "host_budget", "pinned_budget")


class PlanKeywords(TypedDict, total=False):
    """The keywords that `memplan.plan` and `Backend` have in common, apart from `gradients`."""

    budget: Budget | Sequence[Budget] | None
    arena_budget: Budget | Sequence[Budget] | None
    host_budget: int | str | None
    pinned_budget: int | str | None
    reserve: int | str
    policy: str | EvictionPolicy
    costs: Costs | None
    checkpoint: Checkpoint
    kernels: Kernels | None
    divide: Divide
    compress: Compression | None
    schedule: str | SchedulePolicy
    solver: str | Solver
    layout: Layout
    time_limit: float | None
    device: Device | None
    in_flight: int | str | None


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
    arena_budget: Budget | Sequence[Budget] | None = None
    host_budget: int | str | None = None
    pinned_budget: int | str | None = None
    reserve: int | str = 0
    policy: str | EvictionPolicy = "auto"
    costs: Costs | None = None
    checkpoint: Checkpoint = "follow"
    kernels: Kernels | None = None
    divide: Divide = None
    compress: Compression | None = None
    gradients: Gradients = "arena"
    schedule: str | SchedulePolicy = "auto"
    solver: str | Solver = "auto"
    layout: Layout = "auto"
    time_limit: float | None = None
    device: Device | None = None
    in_flight: int | str | None = None
    dynamic_shapes: DynamicShapes | None = None
    falls_back: bool = False  # nobody asked for `kernels`: where they cannot be had, eager's are taken

    def __post_init__(self) -> None:
        require_choices(self)
        require_sums(self.division, self.kernels)
        if self.kernels == "inductor":
            self._refuse_beside_kernels()
        if self.dynamic_shapes is not None:
            self._refuse_beside_dynamic_shapes()
        division_of(self.divide)
        self._require_budgets()
        self._require_known_names()
        self._require_known_costs()
        _ = self.layout_solver

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Self:
        """Return the options that are among the keywords of a function."""
        return cls(**{field.name: keywords[field.name] for field in fields(cls) if field.name in keywords})

    @property
    def has_budget(self) -> bool:
        """Whether any budget limits what the step may need."""
        return any(getattr(self, name) is not None for name in BUDGETS)

    @property
    def budget_is_absolute(self) -> bool:
        """Whether `budget` is a number of bytes (or one for each device), and no share and no "min"."""
        if self.budget is None:
            return False
        each = [self.budget] if isinstance(self.budget, (int, float, str)) else self.budget
        return all(isinstance(read_budget(one), int) for one in each)

    @property
    def several_devices(self) -> bool:
        """Whether the step runs on more than one device."""
        return isinstance(self.device, (list, tuple)) and len(self.device) > 1

    @property
    def tracing(self) -> dict[str, Any]:
        """The options that decide how a call is captured, for `capture_call`."""
        return {
            "device": self.device,
            "gradients_in_arena": self.gradients_in_arena,
            "copy_gradients": self.gradients_copied,
            "kernels": self.kernels,
        }

    @property
    def reserved(self) -> int:
        """The bytes of `reserve`."""
        return read_size("reserve", self.reserve)

    @property
    def in_flight_bytes(self) -> int | None:
        """The bytes of `in_flight`; None for as many as fit."""
        return None if self.in_flight is None else read_size("in_flight", self.in_flight)

    @property
    def division(self) -> Division | None:
        """The division that `divide` stands for; None for no division."""
        return division_of(self.divide)

    @property
    def compression(self) -> str:
        """The compression that `compress` stands for; "" for none."""
        return self.compress or ""

    @property
    def gradients_in_arena(self) -> bool:
        """Whether gradients of parameters stay in the arena to the end of the step: not where they go to the host."""
        return self.gradients == "arena" and self.device is None

    @property
    def gradients_copied(self) -> bool:
        """Whether each gradient of a parameter is made in the arena and copied out as soon as it is complete."""
        return self.gradients == "outside" and self.device is None

    @property
    def layout_solver(self) -> str | Solver:
        """The solver that makes the layout, or its name.

        Raises `UnsupportedProblem` for a layout that another solver makes.
        """
        if self.layout == "auto":
            return self.solver
        if self.solver not in ("auto", self.layout):
            what = f"layout={self.layout!r} is made by the solver of that name, not by {self.solver!r}"
            raise UnsupportedProblem(what, hint="leave out one of them")
        return self.layout

    def _require_budgets(self) -> None:
        """Raise `InvalidSize` for a budget in no known notation, or one for each device where there is one device."""
        for name in ("budget", "arena_budget"):
            budget = getattr(self, name)
            if budget is None:
                continue
            if isinstance(budget, (str, bytes)) or not isinstance(budget, Sequence):
                read_budget(budget, name)
            elif not self.several_devices:
                raise InvalidSize(f"{budget!r} is not a budget: there is one device", where=name, hint=_BUDGET_HINT)
        for name in ("host_budget", "pinned_budget", "reserve", "in_flight"):
            if getattr(self, name) is not None:
                read_size(name, getattr(self, name))
        if self.several_devices and (self.host_budget is not None or self.pinned_budget is not None):
            what = "several devices share a step by blocks, and nothing waits on the host"
            raise InvalidSize(what, where="host_budget", hint="leave it out, or name one device")

    def _require_known_names(self) -> None:
        """Raise the errors of the policies, solvers and limits for a value that they do not know.

        The registries are imported only for values other than the defaults.
        """
        if self.policy != "auto":
            from memplan.evict.policies import fit_policy

            fit_policy(self.policy)
        if self.schedule != "auto":
            from memplan.schedule.policies import policy_of

            policy_of(self.schedule)
        if self.solver != "auto" or self.time_limit is not None:
            from memplan.solvers.placement import require_limit, solver_of

            solver_of(self.solver)
            require_limit("time_limit", self.time_limit)

    def _require_known_costs(self) -> None:
        """Raise `InvalidCosts` for an unknown cost model, and the errors of `load_costs` for a file."""
        if self.costs is not None:
            from memplan.evict.costs import cost_model

            cost_model(self.costs)

    def _refuse_beside_kernels(self) -> None:
        """Raise `UnsupportedCall` for options that cannot be combined with generated kernels yet."""
        others: dict[str, Any] = {"dynamic_shapes": None, "compress": None, "checkpoint": "follow"}
        if self.several_devices:  # a compiled kernel is of one device
            others["device"] = None
        for name, default in others.items():  # Inductor's partition follows the model's checkpoints
            if getattr(self, name) not in (default, ""):
                raise UnsupportedCall(
                    f"is not supported with kernels={self.kernels!r} yet",
                    where=name if default is None else f"{name}={getattr(self, name)!r}",
                    hint=f'leave out {name}=, or take kernels="aten"',
                    see="inductor-options",
                )

    def _refuse_beside_dynamic_shapes(self) -> None:
        """Raise `InvalidShapes` for options beside `dynamic_shapes` that work for one shape only."""
        if self.device is not None:
            what = "a plan for another device has one shape"
            hint = "leave out one of them: shapes that vary are planned where the model is"
            raise InvalidShapes(what, where="device with dynamic_shapes", hint=hint, see="one-shape")
        if self.divide or self.compress:
            what = "ops are divided, and activations coded, for one shape"
            where = f"{'divide' if self.divide else 'compress'} with dynamic_shapes"
            raise InvalidShapes(what, where=where, hint="leave out one of them", see="one-shape")
        for name in (*BUDGETS, "reserve"):
            if getattr(self, name):
                what = "a budget's evictions hold for one size only"
                hint = "give the budget without dynamic_shapes, for the largest shape; memplan.max_batch finds it"
                raise InvalidShapes(what, where=f"{name} with dynamic_shapes", hint=hint, see="one-shape")


def read_budget(budget: object, where: str = "budget") -> int | float | Literal["min"]:
    """Return a budget in one of three notations: bytes (int), a share of the need without it (float), or "min".

    Raises `InvalidSize`, which names `where`, for anything else.
    """
    with located(where):
        if budget == "min":
            return "min"
        if isinstance(budget, str) and budget.strip().endswith("%"):
            return _share(float(parse_percent(budget)), budget)
        if isinstance(budget, float):
            return _share(budget, budget)
        if not isinstance(budget, (int, str)) or isinstance(budget, bool):
            raise InvalidSize(f"{budget!r} is not a budget", hint=_BUDGET_HINT)
        return _read_bytes(budget, _BUDGET_HINT)


def read_size(where: str, size: object) -> int:
    """Return a number of bytes that is an int or a text ("1GiB"). Raises `InvalidSize`, which names `where`."""
    with located(where):
        if not isinstance(size, (int, str)) or isinstance(size, bool):
            raise InvalidSize(f"{size!r} is not a size", hint=_SIZE_HINT)
        return _read_bytes(size, _SIZE_HINT)


def _read_bytes(size: int | str, hint: str) -> int:
    """Return a size of at least 0 bytes. Raises `InvalidSize`, also for a text that stands for less than one byte."""
    if isinstance(size, str):
        nbytes = parse_size(size)
        if not nbytes and size.strip("0."):
            raise InvalidSize(f"{size!r} is less than a byte", hint=hint)
        return nbytes
    if size < 0:
        raise InvalidSize(f"{size!r} is negative", hint=hint)
    return size


def _share(share: float, given: object) -> float:
    """Return a share. Raises `InvalidSize` unless it is above 0 and at most 1."""
    if not 0 < share <= 1:
        raise InvalidSize(f"{given!r} is not a share between 0 and 1 of the need without a budget", hint=_BUDGET_HINT)
    return share


DEFAULTS = PlanOptions()
