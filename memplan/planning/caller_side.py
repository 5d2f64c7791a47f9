"""Puts what the caller of a step allocates and frees around it into the step, so that it counts at the peak.

Between forward and backward, a loss outside of the module allocates what no plan has. A caller that takes only the loss
out of a result frees the rest before the backward; one that keeps the result has that of the step before as well until
the forward returns the next. Eager's peak and that of a plan are compared on the same graph, in which three more ops
stand for the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from memplan.core.graph import Graph, Op, Origin, Phase, Storage, StorageKind, Value
from memplan.core.plan import Plan
from memplan.core.problem import Buffer, Interval

CALLER = "memplan.caller"  # the target of the ops that stand for the caller
_HELD = "gradients of the step before"
_ELEMENTWISE = frozenset({"aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerSide:
    """The memory that the caller of a step allocates and frees around it.

    Attributes:
        loss: The most bytes that it has at once between forward and backward, beside the outputs that it keeps and the
            gradients that it passes to the backward; outputs that it drops count as long as it needs them.
        dropped: The names of the storages of outputs that it has freed when the step is over. They count until the
            forward returns, and as long as the loss and the backward need them.
        missing: The names of the storages of gradients of outputs that it never passes. A plan has zeros for them
            (one element, if they are `read_by_elements`), and eager nothing.
        held: The bytes of gradients of the step before that it frees after the forward (`zero_grad()` between the
            forward and `backward()`).
    """

    loss: int = 0
    held: int = 0
    dropped: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()


def eager_with_caller(graph: Graph, side: CallerSide, *, earlier: bool = True) -> Graph:
    """Return `graph_with_caller` as eager runs it: without the gradients that the caller does not pass.

    Ops that need such a gradient alone, which eager does not run, still count.
    `earlier`: the caller has what it keeps of the step before while the forward runs. Without, it may have freed that.
    """
    made = graph_with_caller(graph, side, earlier=earlier)
    storages = (replace(s, nbytes=0) if s.name in side.missing else s for s in made.storages)
    return replace(made, storages=tuple(storages)) if side.missing else made


def graph_with_caller(graph: Graph, side: CallerSide, *, earlier: bool = True) -> Graph:
    """Return the graph with ops for the caller; unchanged if it has no backward.

    The first op of the forward makes what the caller keeps of the step before, gradients that it still has among them,
    and the last one frees it. The first op of the backward makes the gradients that the backward gets. All these, and
    outputs that the caller drops, are intermediate results outside the arena: they take bytes from their first use to
    the last. Without `earlier`, the caller keeps no result of the step before.
    """
    at = graph.forward_ops
    if at == len(graph.ops):
        return graph
    storage_of = [v.storage for v in graph.values]
    returned = {storage_of[v] for v in graph.outputs}
    outputs = [i for i, s in enumerate(graph.storages) if i in returned and _is_output(s)]
    dropped = {i for i in outputs if graph.storages[i].name in side.dropped}
    kept = [i for i in outputs if i not in dropped] if earlier else []
    tangents = {i for i, s in enumerate(graph.storages) if s.kind is StorageKind.TANGENT and not s.planned}
    first_of = {storage_of[v]: graph.values[v] for v in reversed(graph.outputs)}
    before = range(len(graph.values), len(graph.values) + len(kept) + bool(side.held))
    results = tuple(dict.fromkeys(graph.outputs))
    began = _op("earlier results", Phase.FORWARD, writes=before)
    received = _op("results", Phase.FORWARD, reads=(*before, *results))
    loss = _op("loss", Phase.BACKWARD, writes=(v for v, storage in enumerate(storage_of) if storage in tangents))
    passing = tangents | dropped
    missing = {i for i in tangents if graph.storages[i].name in side.missing}
    whole = {storage: v for v, storage in reversed(list(enumerate(storage_of))) if storage in missing}
    small = {storage_of[v] for v in read_by_elements(graph, whole.values())}
    storages = [replace(s, kind=StorageKind.ACTIVATION) if i in passing else s for i, s in enumerate(graph.storages)]
    storages = [replace(s, nbytes=0) if i in small else s for i, s in enumerate(storages)]
    storages += [
        replace(graph.storages[i], name=f"{graph.storages[i].name} of the step before", kind=StorageKind.ACTIVATION)
        for i in kept
    ]
    copies = [replace(first_of[i], storage=len(graph.storages) + n) for n, i in enumerate(kept)]
    if side.held:
        copies.append(_bytes_in(len(storages), side.held))
        storages.append(_held(graph, side.held))
    return replace(
        graph,
        ops=(began, *graph.ops[:at], received, loss, *graph.ops[at:]),
        values=(*graph.values, *copies),
        storages=tuple(storages),
        outputs=tuple(v for v in graph.outputs if storage_of[v] not in dropped),
    )


def read_by_elements(graph: Graph, given: Iterable[int]) -> frozenset[int]:
    """Return those of the values whose elements may all be at one address: only elementwise ops read them, and no view.

    The other operands and the results of these ops are contiguous and of their shape: torch gives results the layout of
    the operands, and one without a layout of its own must not change it.

    Args:
        graph: The graph.
        given: Values of the whole of different storages.
    """
    of = {graph.values[v].storage: v for v in given}
    uses = ((op, of[storage]) for op in graph.ops for storage in graph.touched(op) if storage in of)
    others = {v for op, v in uses if not _spreads(graph, op, v)}
    return frozenset(of.values()) - others


def _spreads(graph: Graph, op: Op, given: int) -> bool:
    """Return whether an op takes a value by its elements alone, and has the same results for any strides of it."""
    whole, touched = graph.values[given], [graph.values[v] for v in (*op.reads, *op.writes)]
    return (
        op.target in _ELEMENTWISE
        and given not in op.writes
        and all(v is whole for v in touched if v.storage == whole.storage)
        and all(v.shape == whole.shape and v.is_contiguous for v in touched)
    )


def transient_with_caller(graph: Graph, transient: Sequence[int], side: CallerSide) -> tuple[int, ...]:
    """Return the bytes that each op of `graph_with_caller` allocates for itself; `transient` are those of `graph`."""
    at = graph.forward_ops
    return tuple(transient) if at == len(graph.ops) else (0, *transient[:at], 0, side.loss, *transient[at:])


def plan_with_caller(plan: Plan, side: CallerSide, *, earlier: bool = True) -> Plan:
    """Return the plan with `graph_with_caller`, with the same offsets; it is for comparisons, and nothing runs by it.

    Args:
        plan: A plan on one device.
        side: What the caller does.
        earlier: As in `graph_with_caller`.
    """
    graph = graph_with_caller(plan.graph, side, earlier=earlier)
    if graph is plan.graph:
        return plan
    at, eviction = plan.graph.forward_ops, plan.eviction
    later = [op + (1 if op < at else 3) for op in plan.schedule.order]  # the forward comes first in every order
    order = (0, *later[:at], at + 1, at + 2, *later[at:])
    if eviction is not None:
        eviction = replace(eviction, sources=(-1, *eviction.sources[:at], -1, -1, *eviction.sources[at:]))
    return replace(
        plan,
        graph=graph,
        schedule=replace(plan.schedule, order=order),
        problem=replace(plan.problem, buffers=tuple(_later(b, at) for b in plan.problem.buffers)),
        temporaries=transient_with_caller(plan.graph, plan.transient, side),
        eviction=eviction,
    )


def _op(name: str, phase: Phase, *, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> Op:
    return Op(
        name=f"{CALLER}: {name}",
        target=CALLER,
        phase=phase,
        reads=tuple(reads),
        writes=tuple(writes),
        direct=True,
        random=False,
        origin=Origin(op=CALLER),
    )


def _held(graph: Graph, nbytes: int) -> Storage:
    """Return the storage of gradients that the caller still has of the step before."""
    device = next(graph.storages[graph.values[v].storage].device for v in (*graph.gradients, *graph.outputs))
    kind, origin = StorageKind.ACTIVATION, Origin(op=CALLER)
    return Storage(name=_HELD, nbytes=nbytes, device=device, kind=kind, planned=False, origin=origin)


def _bytes_in(storage: int, nbytes: int) -> Value:
    """Return the value that is all bytes of a storage."""
    return Value(name=_HELD, storage=storage, dtype="uint8", shape=(nbytes,), strides=(1,), offset=0)


def _is_output(storage: Storage) -> bool:
    return storage.kind is StorageKind.OUTPUT and not storage.planned


def _later(buffer: Buffer, forward: int) -> Buffer:
    """Return a buffer whose live interval has one step more before it, and two after the forward's steps."""

    def moved(live: Interval) -> Interval:
        return Interval(live.start + (1 if live.start < forward else 3), live.end + (1 if live.end <= forward else 3))

    return replace(buffer, live=moved(buffer.live), gaps=tuple(map(moved, buffer.gaps)))
