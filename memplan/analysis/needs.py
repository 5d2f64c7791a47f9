"""Computes what a step needs with an optimizer, by the parts that people know, beside what eager needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from memplan.analysis.buffers import homes
from memplan.core.arguments import require_kind
from memplan.core.gpus import find_gpu
from memplan.core.graph import StorageKind
from memplan.core.plan import Plan
from memplan.core.totals import beside_results
from memplan.errors import InvalidModel, UnsupportedDevice

OPTIMIZER = "AdamW"  # unless the user names another one
# Tensors like a parameter that each optimizer keeps of it, with its defaults in torch.optim.
_KEPT = {"SGD": 0, "RMSprop": 1, "Adagrad": 1, "Adadelta": 2, "Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "none": 0}
STATES: Mapping[str, int] = MappingProxyType(_KEPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The bytes that a step needs at its peak; `parts` add up to `total`.

    `optimizer` is the name of one that the step itself does not show ("": there is none, or the step has it), and
    `state` what it keeps beside `Plan.total`: 0 where `reserve=` set bytes aside for it. `eager` is the predicted need
    of eager with the same optimizer; None where it is not known, as for fused kernels.
    """

    optimizer: str
    state: int
    total: int
    eager: int | None
    parts: Mapping[str, int]


def named_optimizer(name: str) -> str:
    """Return the name of an optimizer as torch writes it. Raises `InvalidModel` for one that is not in `STATES`."""
    require_kind(name, str, "optimizer", 'name it: "SGD"')
    found = {known.lower(): known for known in STATES}.get(name.strip().lower())
    if found is None:
        hint = f"name one of {', '.join(STATES)}; `memplan fits` takes any other of torch.optim"
        raise InvalidModel(f"what {name!r} keeps is not known without running it", where="optimizer", hint=hint)
    return found


def set_aside(plan: Plan) -> int:
    """Return the bytes that the user set aside: `Plan.reserve` without the workspaces of a target."""
    target, workspace = plan.versions.get("target"), 0
    if target:
        with suppress(UnsupportedDevice):  # one that this version does not know
            workspace = find_gpu(target, quiet=True).workspace
    return max(plan.reserve - workspace, 0)


def state_beside(plan: Plan, optimizer: str = OPTIMIZER) -> int:
    """Return what an optimizer keeps beside a plan's total: nothing where the plan has an update or set bytes aside."""
    return 0 if set_aside(plan) else _state(plan, named_optimizer(optimizer))


def _state(plan: Plan, name: str) -> int:
    """Return what an optimizer keeps of the parameters whose gradients a plan returns; 0 where they are elsewhere.

    A gradient is a parameter's if it is as large as one; the gradients of inputs are not.
    """
    graph = plan.graph
    left = Counter(s.nbytes for s in graph.storages if s.kind is StorageKind.PARAMETER)
    gradients = Counter(graph.storages[s].nbytes for s in {graph.values[v].storage for v in graph.gradients})
    trained = sum(nbytes * min(count, left[nbytes]) for nbytes, count in gradients.items())
    return 0 if _away(plan) else STATES[name] * trained


def _away(plan: Plan) -> bool:
    """Return whether the model is on the host, and the step runs elsewhere."""
    return plan.eviction is not None and bool(plan.eviction.device or plan.eviction.sections)


def needed(plan: Plan, optimizer: str = OPTIMIZER) -> Needed:
    """Return what a plan needs with an optimizer, if it is one of a training step that has no update of its own."""
    graph, name = plan.graph, named_optimizer(optimizer)
    aside, state, full = set_aside(plan), state_beside(plan, name), _state(plan, name)
    from memplan.planning.base_graph import eager_total, without_evictions  # it imports the search

    inside, during = _gradients_at_peak(plan), max(plan.outside_profile, default=0)
    beside = min(plan.outside["gradients"], during)
    eager = None
    if not (_away(plan) or plan.sections or graph.is_generated):
        measured = plan.temporaries if plan.eviction is None else None
        own = () if measured is None else beside_results(graph, measured)
        eager = eager_total(without_evictions(plan).graph, own) + plan.reserve + state
    return Needed(
        optimizer=name if graph.gradients and not _away(plan) and (full == aside > 0 or not aside) else "",
        state=state,
        total=plan.total + state,
        eager=eager,
        parts={
            "parameters": graph.bytes_of(StorageKind.PARAMETER, StorageKind.CONSTANT),
            "gradients": inside + beside,
            "optimizer": graph.bytes_of(StorageKind.OPTIMIZER_STATE) + state + aside,
            "activations": plan.arena_size - inside,
            "inputs": graph.bytes_of(StorageKind.INPUT, StorageKind.TANGENT),
            "results and temporaries": during - beside + plan.reserve - aside,
        },
    )


def _gradients_at_peak(plan: Plan) -> int:
    """Return the bytes of the arena that hold parameters' gradients where the step peaks."""
    lie, names = homes(plan), {plan.graph.storages[s].name for s in plan.graph.gradients_in_arena}
    held = {lie.get(name, name) for name in names}
    alive = plan.problem.alive_at(plan.problem.peak_step) if held else ()
    return sum(buffer.size for buffer in alive if buffer.id in held)
