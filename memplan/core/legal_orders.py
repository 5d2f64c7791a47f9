"""The legal orders of a graph: the dependencies between ops, and the checks of an order.

`require_legal` compares an order with the one in which the graph was traced, and would keep a fault of the trace too.
`require_written_first` shares no code with it, nor with the passes that make graphs: it follows writes and reads, op by
op. What the model, the optimizer or the caller holds has its value when the step begins; the gradients that come in
have theirs when the backward begins. Every other storage has one from the first op on that writes it: an op that read
it before that would compute from what an earlier step left there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from memplan.core.collectives import is_collective
from memplan.core.graph import Graph, Op, Phase, Storage, StorageKind
from memplan.errors import InvalidPlan

if TYPE_CHECKING:
    from networkx import DiGraph


def predecessors(graph: Graph) -> tuple[frozenset[int], ...]:
    """Return, for each op (by index), the ops that must run directly before it.

    Two ops that touch one storage keep their traced order if one of them writes it. Random ops keep their order, so
    that a seed gives the same numbers; so do collectives, which all ranks must start in the same order. An op that
    only raises runs before those traced after it that use results of the op that it checks, that change storages which
    outlive the step, or that are random: as in eager, they do not run if it raises.
    """
    writer: dict[int, int] = {}
    checked: dict[int, int] = {}  # storage -> the op that checks the op that wrote it
    readers: dict[int, list[int]] = {}
    last: dict[str, int] = {}  # chain -> the last op of it; ops of one chain keep their order
    found: list[frozenset[int]] = []
    for index, op in enumerate(graph.ops):
        before: set[int] = set()
        written = set(graph.written(op))
        for storage in graph.touched(op):
            if storage in writer:
                before.add(writer[storage])
            if storage in checked:
                before.add(checked[storage])
            if storage in written:
                before.update(readers.get(storage, ()))
                writer[storage], readers[storage] = index, []
            else:
                readers.setdefault(storage, []).append(index)
        if op.only_raises:
            written_with = (s for v in op.reads for s in _made_with(graph, writer, graph.values[v].storage))
            checked.update(dict.fromkeys(written_with, index))
        elif "check" in last and any(_outlives(graph.storages[s]) for s in written):
            before.add(last["check"])
        for chain in _chains(op):
            if chain in last:
                before.add(last[chain])
            last[chain] = index
        found.append(frozenset(before))
    return tuple(found)


def _made_with(graph: Graph, writer: Mapping[int, int], storage: int) -> tuple[int, ...]:
    """Return all storages written by the op that wrote `storage` last."""
    return graph.written(graph.ops[writer[storage]]) if storage in writer else ()


def _outlives(storage: Storage) -> bool:
    """Return whether the storage belongs to the model, the optimizer or the caller, and existed before the step."""
    return not storage.planned and storage.kind not in (StorageKind.OUTPUT, StorageKind.GRADIENT)


def _chains(op: Op) -> Iterator[str]:
    if op.random or op.only_raises:
        yield "random"
    if op.only_raises:
        yield "check"
    if is_collective(op.target):
        yield f"collective {op.group}"


def to_networkx(graph: Graph) -> DiGraph:
    """The networkx graph of `Graph.to_networkx`: an edge for each direct predecessor of an op."""
    import networkx

    made = networkx.DiGraph()
    for index, op in enumerate(graph.ops):
        nbytes = sum(graph.storages[s].nbytes for s in graph.written(op) if graph.storages[s].planned)
        about = {"module": op.origin.module, "source": op.origin.source, "nbytes": nbytes}
        made.add_node(index, name=op.name, target=op.target, phase=op.phase.value, **about)
    touched = [graph.touched(op) for op in graph.ops]
    for index, before in enumerate(predecessors(graph)):
        for other in sorted(before):
            common = tuple(graph.storages[s].name for s in touched[other] if s in touched[index])
            made.add_edge(other, index, storages=common)
    return made


def require_legal(graph: Graph, order: tuple[int, ...]) -> None:
    """Raise `InvalidPlan` naming the first fault unless `order` runs every op once, after its predecessors.

    Forward ops must come before backward ops: the caller computes the loss in between.
    """
    if sorted(order) != list(range(len(graph.ops))):
        raise InvalidPlan("is not an order of the graph's ops", where="schedule.order")
    before = predecessors(graph)
    done: set[int] = set()
    backward = False
    for step, index in enumerate(order):
        op = graph.ops[index]
        missing = before[index] - done
        if missing:
            first = graph.ops[min(missing)].name
            raise InvalidPlan(f"runs {op.name!r} before {first!r}, which it needs", where=f"schedule.order[{step}]")
        if backward and op.phase is Phase.FORWARD:
            raise InvalidPlan(f"runs {op.name!r} of the forward in the backward", where=f"schedule.order[{step}]")
        backward = backward or op.phase is Phase.BACKWARD
        done.add(index)


_HELD = {StorageKind.INPUT, StorageKind.PARAMETER, StorageKind.CONSTANT, StorageKind.OPTIMIZER_STATE}


def require_written_first(graph: Graph, order: Sequence[int]) -> None:
    """Raise `InvalidPlan` naming the first read, by an op of `order` or by the caller, of what nothing has written."""
    known = {i for i, s in enumerate(graph.storages) if not s.planned and s.kind in _HELD}
    coming = {i for i, s in enumerate(graph.storages) if not s.planned and s.kind is StorageKind.TANGENT}
    phase = Phase.FORWARD
    for step, op in enumerate(graph.ops[index] for index in order):
        if phase is not op.phase:
            _require(graph, graph.outputs, known, "the caller", "outputs")
            known, phase = known | coming, op.phase
        _require(graph, op.reads, known, op.name, f"schedule.order[{step}]")
        known.update(graph.values[v].storage for v in op.writes)
    _require(graph, graph.outputs, known, "the caller", "outputs")
    _require(graph, graph.gradients, known | coming, "autograd", "gradients")


def _require(graph: Graph, read: Sequence[int], known: set[int], who: str, where: str) -> None:
    for v in read:
        storage = graph.values[v].storage
        if storage not in known and graph.storages[storage].nbytes:
            what = f"{who} reads {graph.storages[storage].name!r} before anything has written it"
            raise InvalidPlan(what, where=where)
