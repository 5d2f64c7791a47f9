"""The plan of a training step: the ops and their order, the offset of every storage, and the bytes outside the arena.

A `Plan` is plain data. It is saved as JSON, not as a pickle, and a loaded file is accepted only after the independent
validator and checks against its own graph (`memplan.load`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from memplan.core.collectives import Collective, collectives_of
from memplan.core.division import Division
from memplan.core.evictions import DeviceArena, Eviction, EvictionPlan, compressions_of, evictions_of
from memplan.core.graph import Graph, StorageKind
from memplan.core.in_place import placed
from memplan.core.later import later
from memplan.core.problem import Problem, Solution
from memplan.core.schedule import Schedule
from memplan.core.totals import (
    beside_results,
    copied_bytes,
    functional_transient,
    gathered_profile,
    known_transient,
    outside_bytes,
    outside_profile,
    released_bytes,
    transient_on,
    transient_profile,
)
from memplan.core.units import format_bytes

if TYPE_CHECKING:
    from memplan.analysis.forecast import Forecast
    from memplan.report.summary import Report

SCHEMA_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSection:
    """One of the graphs of a joint plan.

    `name` is the function that it begins in ("forward in model.py:12"), `ends` why it ends there ("" where the model
    ends). `forward` and `backward` are numbers of ops; `arena_size` are the bytes of its arena if it had one of its
    own.
    """

    name: str
    ends: str
    forward: int
    backward: int
    arena_size: int


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """A validated plan. Sizes are in bytes; steps are positions in `schedule.order`.

    The bounds of a new plan, over all orders and over all layouts, were proven in this process. Loading a plan proves
    the bound of all orders again, and that of all layouts where it is max live. Else `solution.claimed` is True.

    Args:
        model: the name of the model.
        graph: the ops that run. With an eviction plan it includes recomputed ops and copies to the host and back.
        schedule: the order of the ops.
        problem: one buffer for each planned storage that has bytes.
        solution: the offset of each buffer.
        alignment: bytes; sizes and offsets are multiples of it.
        redzone: bytes on each side of every buffer, for the sanitizer.
        versions: the versions of memplan and torch that made the plan.
        temporaries: for each op, the bytes that its kernel allocates outside the arena while it runs, measured when
            the plan was compiled. None if not measured: fake tensors do not show a kernel's scratch memory.
        eviction: how a budget is kept; None without a budget.
        division: how ops of the traced graph were divided by rows; None if they were not.
        compress: how saved activations are compressed: "int8" quantizes activations, "" compresses
            nothing.
        reserve: bytes on the device that the step does not show, such as the state of an optimizer; `total` has them.
        sections: the graphs of a joint plan, in the order in which they were traced; () for a plan of one graph.
        kernels: what the kernels are those of, where the plan was made for a `target`, and why attention runs in single
            ops on a GPU; else "".

    Example:
        >>> plan = memplan.plan(model, example_inputs)
        >>> plan.total, plan.arena_size, plan.fragmentation
        >>> plan.save("model.plan.json")
    """

    model: str
    graph: Graph
    schedule: Schedule
    problem: Problem
    solution: Solution
    alignment: int
    redzone: int = 0
    versions: Mapping[str, str]
    temporaries: tuple[int, ...] | None = None
    eviction: EvictionPlan | None = None
    division: Division | None = None
    compress: str = ""
    reserve: int = 0
    sections: tuple[GraphSection, ...] = ()
    kernels: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", MappingProxyType(dict(self.versions)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Support `copy` and `pickle`, which cannot copy the read-only `versions`."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return partial(Plan, **{**own, "versions": dict(self.versions)}), ()

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the graph: a plan fits exactly the models that are traced to this graph."""
        return self.graph.fingerprint

    @cached_property
    def placed(self) -> Graph:
        """The graph with in-place reuse applied: a result that takes an input's bytes is a value of its storage."""
        return placed(self.graph, self.schedule.order)

    @property
    def arena_size(self) -> int:
        """Bytes of the preallocated arena; on several devices, of all their arenas together."""
        return self.solution.arena_size

    @property
    def max_live(self) -> int:
        """The largest sum of live buffer sizes over all steps, bytes with padding: no layout needs less.

        On several devices it is the sum of each device's own maximum.
        """
        if self.devices:
            return sum(section.max_live for section in self.devices)
        return self.problem.max_live

    @property
    def devices(self) -> tuple[DeviceArena, ...]:
        """The arenas of a plan for several devices, in the order in which the devices were given; () for one device."""
        return self.eviction.sections if self.eviction else ()

    @property
    def fragmentation(self) -> float:
        """1 - max_live / arena_size: the share of the arena that holds no live buffer at the peak."""
        return (self.arena_size - self.max_live) / self.arena_size if self.arena_size else 0.0

    @property
    def padding(self) -> int:
        """Bytes that alignment (and red zones) add to max live."""
        return self.problem.max_live - self.schedule.max_live

    @cached_property
    def evictions(self) -> tuple[Eviction, ...]:
        """Every eviction that is followed by another use of the storage: recomputed and offloaded ones in the order of
        their return, then compressed ones."""
        found = evictions_of(self.graph, self.eviction.instances) if self.eviction else ()
        return (*found, *(compressions_of(self.graph, self.schedule.order) if self.compress else ()))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of a step in the order in which every rank runs them; gathers that a budget repeats too."""
        return collectives_of(self.graph, self.schedule.order)

    @cached_property
    def gathered(self) -> tuple[int, ...]:
        """Bytes at each step of parameters that this rank has gathered from the others, and not given up again."""
        return gathered_profile(self.graph, self.schedule.order)

    @property
    def host_size(self) -> int:
        """Bytes of the host arena, which holds the offloaded copies."""
        return self.eviction.host.arena_size if self.eviction else 0

    @property
    def pinned(self) -> int:
        """The most bytes of the host that are page-locked for the step; 0 where it runs on the CPU."""
        if self.eviction is None or not self.on_accelerator:
            return 0
        return copied_bytes(self.graph, self.host_size, away=bool(self.eviction.device))

    @property
    def on_host(self) -> int:
        """Bytes of the host's memory that the step takes beside its device: copies of what is evicted, and, where the
        model stays on the host, all that it and the caller have there, and what an optimizer's own `step()` needs."""
        if self.eviction is None:
            return 0
        away = bool(self.eviction.device)
        given = (StorageKind.INPUT, StorageKind.TANGENT) if away else ()  # the caller's, which are not moved
        copied = copied_bytes(self.graph, self.host_size, away=away)
        return copied + self.graph.bytes_of(*given) + self.eviction.updating

    @property
    def on_accelerator(self) -> bool:
        """Whether the step runs on a device beside the host."""
        named = [s.device for s in self.graph.storages if s.planned]
        device = self.eviction.device if self.eviction is not None and self.eviction.device else (*named, "cpu")[0]
        return device.partition(":")[0] not in ("cpu", "meta")

    @cached_property
    def transient(self) -> tuple[int, ...]:
        """The bytes outside the arena while each op (by index) runs: measured, or else what is known before."""
        if self.temporaries is not None:
            return self.temporaries
        return known_transient(self.graph)

    @cached_property
    def outside_profile(self) -> tuple[int, ...]:
        """Bytes allocated outside the arena at each step: the caller's results so far, intermediate results that
        are not in the arena, and the op's transient bytes."""
        return outside_profile(self.graph, self.schedule.order, self.transient)

    @cached_property
    def outside(self) -> Mapping[str, int]:
        """Bytes outside the arena, by kind; "intermediate", "fallbacks" and "temporaries" are the most at any one step.

        "fallbacks" are results of kernels without a true `out=` variant; "temporaries" are other bytes that kernels
        allocate while they run: what is known of attention's until `compile` has measured them.
        """
        g, order = self.graph, self.schedule.order
        intermediate = released_bytes(g, order)
        return MappingProxyType(
            {
                "parameters": g.bytes_of(StorageKind.PARAMETER),
                "optimizer state": g.bytes_of(StorageKind.OPTIMIZER_STATE),
                "inputs": g.bytes_of(StorageKind.INPUT),
                "tangents": g.bytes_of(StorageKind.TANGENT),
                "constants": g.bytes_of(StorageKind.CONSTANT),
                "outputs": g.bytes_of(StorageKind.OUTPUT),
                "gradients": g.bytes_of(StorageKind.GRADIENT)
                - sum(g.storages[s].nbytes for s in g.released if g.storages[s].kind is StorageKind.GRADIENT),
                **({"reserve": self.reserve} if self.reserve else {}),
                **({"intermediate": intermediate} if intermediate else {}),
                "fallbacks": max(functional_transient(g), default=0),
                "temporaries": max(transient_profile(g, order, beside_results(g, self.transient)), default=0),
            }
        )

    @property
    def total(self) -> int:
        """The predicted peak of the whole step, bytes: arena, model, inputs, the peak of `outside_profile`, `reserve`.

        Kernels' temporaries are in it when they were measured: `compile` measures them, `plan` does not; it knows those
        of attention's backward on a GPU.
        """
        outside = outside_bytes(self.graph, self.schedule.order, self.transient)
        return self.arena_size + outside + self.reserve

    @property
    def on_device(self) -> int:
        """Bytes on the device at the peak, which a budget limits.

        It is `total`, or, if the model and the caller's tensors are on the host, only the arena, the kernels' own
        allocations, and `reserve`. On several devices, it is the most that one of them needs.
        """
        if self.devices:
            return max(self.on_section(section) for section in self.devices)
        if self.eviction is None or not self.eviction.device:
            return self.total
        return self.arena_size + max(self.transient, default=0) + self.reserve

    def on_section(self, section: DeviceArena) -> int:
        """Return the bytes on one of several devices at the peak: its arena, its kernels' allocations, `reserve`.

        Args:
            section: one of `devices`.

        Returns:
            The bytes.

        Example:
            >>> [plan.on_section(section) for section in plan.devices]
        """
        return section.size + transient_on(self.graph, self.transient, section.device) + self.reserve

    @property
    def arena_limit(self) -> int | None:
        """The most bytes that the arena may have within the budgets that were asked for; None without a budget.

        Red zones are not counted.
        """
        if self.eviction is None:
            return None
        if self.eviction.budget is None or self.devices:
            return self.eviction.arena_budget
        return min(self.eviction.arena_budget, self.eviction.budget - (self.on_device - self.arena_size))

    def forecast(self, name: str) -> Forecast:
        """Return where a storage is at each step of the schedule, and at which steps it is used.

        Args:
            name: the name of a storage or of one of its values, or the path of the module that made it.

        Returns:
            The forecast; sizes and offsets are bytes, times are steps.

        Raises:
            UnknownName: the plan has no such storage.

        Example:
            >>> forecast = plan.forecast("gelu")
        """
        found: Forecast = later("forecast")(self, name)
        return found

    def report(self, *, optimizer: str = "AdamW") -> Report:
        """Return the figures of this plan, ready to be shown as a table, Markdown, JSON or HTML.

        Args:
            optimizer: What updates the parameters of a training step that shows no update: a class of `torch.optim`
                whose state has the sizes of its parameters, or "none".

        Returns:
            The report; sizes are bytes.

        Example:
            >>> print(plan.report())
        """
        made: Report = later("make_report")(self, optimizer)
        return made

    def to_text(self) -> str:
        """Return the plan as plain text: a table of steps and partitions, as tract prints it.

        Returns:
            The table; for the layout "tstack", also the addresses in use at each step. Sizes are bytes.

        Example:
            >>> print(plan.to_text())
        """
        stack = later("stack_text")(self.problem, self.solution) if self.solution.solver == "tstack" else ""
        text: str = later("partition_table")(self.problem) + stack
        return text

    def to_html(self) -> str:
        """Return the plan as one HTML page that loads nothing: the arena over the step, to zoom into and search.

        Returns:
            The text of the page.

        Example:
            >>> pathlib.Path("plan.html").write_text(plan.to_html())
        """
        page: str = later("picture_html")(later("picture_of_plan")(self))
        return page

    def to_svg(self) -> str:
        """Return the arena over the step as an SVG picture.

        Returns:
            The text of the picture.

        Example:
            >>> pathlib.Path("plan.svg").write_text(plan.to_svg())
        """
        picture: str = later("picture_svg")(later("picture_of_plan")(self))
        return picture

    def to_records(self) -> list[dict[str, Any]]:
        """Return a row of plain columns for each buffer, in the order of first use.

        Returns:
            Dictionaries with the keys `buffer`, `kind`, `device`, `offset` and `nbytes` (bytes, padding included),
            `start` and `end` (steps; alive in [start, end)), `at_peak`, `dtype`, `shape`, and where it is from:
            `module`, `source` ("model.py:12"), `op`.

        Example:
            >>> frame = pandas.DataFrame(plan.to_records())
            >>> frame[frame.at_peak].groupby("module").nbytes.sum()
        """
        records: list[dict[str, Any]] = later("records")(self)
        return records

    def __repr__(self) -> str:
        parts = f"{len(self.graph.ops)} ops, {len(self.problem.buffers)} buffers"
        sizes = f"arena {format_bytes(self.arena_size)}, total {format_bytes(self.total)}"
        return f"<Plan of {self.model or 'a model'}: {parts}, {sizes}, fingerprint {self.fingerprint[:12]}>"

    def __str__(self) -> str:
        """Return the report as plain text."""
        return str(self.report())

    def _repr_html_(self) -> str:
        """Return what notebooks show."""
        fragment: str = later("plan_fragment")(self)
        return fragment

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` as JSON, completely or not at all.

        Args:
            path: the file to write; `memplan.load` reads it.

        Raises:
            UnreadableFile: the file cannot be written.

        Example:
            >>> plan.save("model.plan.json")
        """
        later("save")(self, path)


def as_loaded(plan: Plan) -> Plan:
    """Return the plan of a file after its check, with the bounds that the check did not prove marked as claimed.

    It is a bound of all layouts that is above max live.
    """
    return replace(
        plan,
        solution=replace(plan.solution, claimed=plan.solution.bound > plan.max_live),
    )
