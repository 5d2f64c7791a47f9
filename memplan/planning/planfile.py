"""Reads and writes plans as JSON files. Reading is strict; writing is all or nothing.

`schema_version` comes first, then `fingerprint` (of the graph) and `checksum` (of everything after it, as compact JSON
with sorted keys): a file that was changed by accident is refused. The checksum does not protect against intended
changes, so every part of a file is also checked against the others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from memplan.core import lifetimes
from memplan.core.evictions import DeviceArena, check_record
from memplan.core.files import write_atomic
from memplan.core.graph import Graph, check_graph
from memplan.core.happens_before import require_no_races
from memplan.core.jsonio import from_json, read_json, show, to_json
from memplan.core.legal_orders import require_legal, require_written_first
from memplan.core.plan import SCHEMA_VERSION, Plan, as_loaded
from memplan.core.problem import Solution, Status
from memplan.core.schedule import Schedule, live_bytes, working_set_bound
from memplan.core.validate import validate
from memplan.errors import InvalidPlan, located
from memplan.schedule.policies import require_evidence


def check_consistency(plan: Plan) -> None:
    """Raise `InvalidPlan` or `InvalidSolution` unless every part of `plan` follows from its graph.

    It runs on every plan read from a file. It does not prove bounds of layouts above max live, which `as_loaded` marks
    as claimed.
    """
    check_graph(plan.graph)
    require_legal(plan.graph, plan.schedule.order)
    require_written_first(plan.graph, plan.schedule.order)
    _check_schedule(plan.graph, plan.schedule)
    if plan.alignment < 1 or plan.redzone < 0 or plan.redzone % plan.alignment:
        raise InvalidPlan(f"alignment {plan.alignment}, red zone {plan.redzone}", where="alignment")
    if plan.problem != lifetimes.problem(plan.graph, plan.schedule, alignment=plan.alignment, redzone=plan.redzone):
        raise InvalidPlan("does not follow from the graph and the schedule", where="problem")
    if plan.temporaries is not None and (
        len(plan.temporaries) != len(plan.graph.ops) or min(plan.temporaries, default=0) < 0
    ):
        raise InvalidPlan("needs one number of bytes per op", where="temporaries")
    if plan.solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
        raise InvalidPlan(f"is {plan.solution.status.name.lower()}", where="solution.status")
    if plan.reserve < 0:
        raise InvalidPlan(f"{plan.reserve} bytes are less than none", where="reserve")
    validate(plan.problem, plan.solution)
    if plan.eviction is not None:
        check_record(plan.graph, plan.eviction)
        validate(lifetimes.host_problem(plan.graph, plan.schedule, alignment=plan.alignment), plan.eviction.host)
        check_sections(plan)
        require_budget(plan)
    require_no_races(plan)


def check_sections(plan: Plan) -> None:
    """Raise `InvalidPlan` or `InvalidSolution` unless the arenas of several devices are contiguous, and each has its
    stated size and exactly the buffers of its device."""
    planned = {s.device for s in plan.graph.storages if s.planned}
    if not plan.devices:
        if len(planned) > 1:
            raise InvalidPlan(f"has no arena for each of {', '.join(sorted(planned))}", where="eviction.sections")
        return
    start = 0
    for i, section in enumerate(plan.devices):
        where = f"eviction.sections[{i}]"
        if section.start != start or section.device in {s.device for s in plan.devices[:i]}:
            raise InvalidPlan("does not start where the one before it ends, or is of the same device", where=where)
        start += section.size
        part = lifetimes.device_problem(plan.problem, plan.graph, section.device)
        if section.max_live != part.max_live or not _keeps(plan, section):
            raise InvalidPlan(f"has not {section.max_live} bytes alive, or more than its budget", where=where)
        offsets = {b.id: plan.solution.offsets[b.id] - section.start for b in part.buffers}
        low = part.max_live if plan.solution.status is Status.OPTIMAL else 0
        status = Status.OPTIMAL if low == section.size else Status.FEASIBLE
        validate(
            part, Solution(offsets=offsets, arena_size=section.size, status=status, bound=low, solver="", seconds=0.0)
        )
    if start != plan.arena_size or planned - {section.device for section in plan.devices}:
        raise InvalidPlan("do not hold the whole plan", where="eviction.sections")


def require_budget(plan: Plan) -> None:
    """Raise `InvalidPlan` if the plan exceeds one of its budgets. Plans with red zones, which are for tests, may."""
    if plan.eviction is None or plan.redzone:
        return
    kept = plan.eviction
    budget = None if plan.devices else kept.budget  # those of several devices are checked one by one
    for name, part, nbytes, limit in (
        ("arena_budget", "the arena", plan.arena_size, kept.arena_budget),
        ("budget", "the total", plan.on_device, budget),
        ("host_budget", "what is copied to the host", plan.host_size, kept.host_budget),
        ("pinned_budget", "what is locked for that", plan.host_size if plan.pinned else 0, kept.pinned_budget),
    ):
        if limit is not None and nbytes > limit:
            raise InvalidPlan(
                f"{part} of {nbytes} bytes is larger than its budget of {limit}", where=f"eviction.{name}"
            )


def _keeps(plan: Plan, section: DeviceArena) -> bool:
    """Return whether the arena of one of several devices, and all that is on that device, keep their budgets."""
    within = section.budget is None or plan.on_section(section) <= section.budget
    return bool(plan.redzone) or (section.size <= section.arena_budget and within)


def _check_schedule(graph: Graph, schedule: Schedule) -> None:
    measured = max(live_bytes(graph, schedule.order), default=0)
    if schedule.max_live != measured:
        raise InvalidPlan(f"says {schedule.max_live}, its order has {measured}", where="schedule.max_live")
    if not working_set_bound(graph) <= schedule.bound <= measured:
        raise InvalidPlan(
            f"{schedule.bound} is not between the largest working set and max live", where="schedule.bound"
        )
    require_evidence(graph, schedule)


_READERS = {"schema_version": "read it with memplan.load", "symbolic_version": "read it with memplan.load_symbolic"}


class OfGraph(Protocol):
    """The contents of a plan file, which belong to one graph."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the graph."""
        ...


_Held = TypeVar("_Held", bound=OfGraph)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat(Generic[_Held]):
    """A kind of plan file: a head (version, fingerprint, checksum), followed by the JSON of a `holds`.

    `called` and `version_of` name the kind and its version in errors, `root` begins the paths in errors. `check` raises
    unless all parts of the contents agree; `mark` marks as claimed the bounds that `check` did not prove; `hint` tells
    the user how to make such a file.
    """

    holds: type[_Held]
    called: str
    version_of: str
    version: int
    root: str
    check: Callable[[_Held], None]
    mark: Callable[[_Held], _Held]
    hint: str

    @property
    def key(self) -> str:
        """The key of the version in the head."""
        return f"{self.version_of}_version"

    def text(self, held: _Held) -> str:
        """Return the text of a file. Equal contents give equal bytes."""
        body = to_json(held)
        head = {self.key: self.version, "fingerprint": held.fingerprint, "checksum": checksum(body)}
        return json.dumps({**head, **body}, separators=(",", ":"), allow_nan=False) + "\n"

    def write(self, held: _Held, path: str | os.PathLike[str]) -> None:
        """Write the file in one step. Raises `UnreadableFile` if it cannot be written."""
        write_atomic(path, self.text(held))

    def read(self, path: str | os.PathLike[str]) -> _Held:
        """Read the contents of a file. Errors name the file and the next step; they are those of `load`."""
        data, where = read_json(path, self.hint), os.fspath(path)
        if not isinstance(data, dict):
            raise InvalidPlan("is not a plan: the top level is not an object", where=where, hint=self.hint)
        with located(where, self.hint):
            return self._made(data)

    def _made(self, data: dict[str, Any]) -> _Held:
        """Make the contents from parsed JSON and check that all parts agree. Removes the head from `data`."""
        version, fingerprint, said = (data.pop(key, None) for key in (self.key, "fingerprint", "checksum"))
        if type(version) is not int:
            hint = next((hint for key, hint in _READERS.items() if key in data), None)
            raise InvalidPlan(f"is not a {self.called}: it has no {self.key}", hint=hint)
        if version != self.version:
            raise InvalidPlan(f"has {self.version_of} version {show(version)}, this memplan reads {self.version}")
        held = from_json(self.holds, data, self.root)
        if said != checksum(data):
            raise InvalidPlan("the file was changed or damaged after it was written", where=f"{self.root}.checksum")
        self.check(held)
        if fingerprint != held.fingerprint:
            raise InvalidPlan("does not belong to the graph of this file", where=f"{self.root}.fingerprint")
        return self.mark(held)


_PLAN = FileFormat(
    holds=Plan,
    called="plan",
    version_of="schema",
    version=SCHEMA_VERSION,
    root="plan",
    check=check_consistency,
    mark=as_loaded,
    hint="make the plan anew: memplan.plan(model, example_inputs).save(path)",
)


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write `plan` to `path` as JSON in one step. Raises `UnreadableFile` if the file cannot be written."""
    _PLAN.write(plan, path)


def to_text(plan: Plan) -> str:
    """Return the text of the plan file of `plan`."""
    return _PLAN.text(plan)


def checksum(body: dict[str, Any]) -> str:
    """SHA-256 (hex) of a plan's JSON without its head; independent of whitespace and of the order of keys."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a saved plan and check it against its own graph and with the independent validator.

    Bounds in the file that loading does not prove again are marked as claimed (see `Plan`).

    Args:
        path: a file written by `Plan.save`.

    Returns:
        The plan, equal to the one that was saved.

    Raises:
        UnreadableFile: the file cannot be read or is not JSON.
        InvalidPlan: the content is not a plan of this schema version; names the path of the first fault.
        InvalidSolution: the offsets are invalid.

    Example:
        >>> plan = memplan.load("model.plan.json")
        >>> module = memplan.compile(model, example_inputs, plan=plan)
    """
    return _PLAN.read(path)
