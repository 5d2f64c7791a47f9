"""Random small graphs, schedules and plans for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from memplan.core.graph import Graph, Op, Origin, Phase, Storage, StorageKind, Value
from memplan.core.in_place import with_inplace_candidates
from memplan.core.legal_orders import predecessors
from memplan.core.plan import Plan
from memplan.core.schedule import Schedule, make_schedule
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions
from memplan.schedule import traced

NOWHERE = Origin()


class GraphBuilder:
    """Collects storages, values and ops; every storage has one whole-size value of bytes, plus views."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.values: list[Value] = []
        self.ops: list[Op] = []

    def storage(self, kind: StorageKind, nbytes: int, *, planned: bool, origin: Origin = NOWHERE) -> int:
        """Add a storage; returns the index of its value."""
        name = f"{kind.value}_{len(self.storages)}"
        self.storages.append(Storage(name=name, nbytes=nbytes, device="cpu", kind=kind, planned=planned, origin=origin))
        return self.view(len(self.storages) - 1, nbytes)

    def view(self, storage: int, nbytes: int) -> int:
        """Add a value of the first `nbytes` bytes of `storage`; returns its index."""
        name = f"v{len(self.values)}"
        value = Value(name=name, storage=storage, dtype="uint8", shape=(nbytes,), strides=(1,), offset=0)
        self.values.append(value)
        return len(self.values) - 1

    def op(
        self,
        phase: Phase,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        *,
        direct: bool = True,
        random: bool = False,
        target: str = "aten.op",
        origin: Origin = NOWHERE,
    ) -> None:
        name = f"op{len(self.ops)}"
        self.ops.append(
            Op(
                name=name,
                target=target,
                phase=phase,
                reads=reads,
                writes=writes,
                direct=direct,
                random=random,
                origin=origin,
            )
        )

    def graph(self, outputs: tuple[int, ...] = (), gradients: tuple[int, ...] = ()) -> Graph:
        return Graph(
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=tuple(self.storages),
            outputs=outputs,
            gradients=gradients,
        )


origins = st.builds(
    Origin,
    module=st.sampled_from(["", "h.0.attn", "layers[3].mlp", "encoder|x"]),
    source=st.sampled_from(["", "model.py:12"]),
    op=st.sampled_from(["", "aten.mm"]),
    node=st.just("n"),
)
_SIZES = st.sampled_from([64, 64, 128]) | st.integers(0, 300)  # often equal, so that results can lie in inputs


@st.composite
def graphs(draw: st.DrawFn, max_ops: int = 10) -> Graph:
    """Forward, then backward; results in planned activations or in what the caller keeps; some in place."""
    b = GraphBuilder()
    for kind in draw(st.lists(st.sampled_from([StorageKind.INPUT, StorageKind.PARAMETER]), min_size=1, max_size=3)):
        b.storage(kind, draw(_SIZES), planned=False)
    kept: dict[StorageKind, list[int]] = {StorageKind.OUTPUT: [], StorageKind.GRADIENT: []}
    count = draw(st.integers(0, max_ops))
    forward = draw(st.integers(0, count))
    for i in range(count):
        reads = tuple(draw(st.lists(st.integers(0, len(b.values) - 1), max_size=3)))
        caller = StorageKind.OUTPUT if i < forward else StorageKind.GRADIENT
        writes = [_written(draw, b, kept, caller) for _ in range(draw(st.integers(1, 2)))]
        b.op(
            Phase.FORWARD if i < forward else Phase.BACKWARD,
            reads,
            tuple(writes),
            direct=draw(st.booleans()),
            random=draw(st.booleans()),
            target=draw(st.sampled_from(["aten.mm", "aten.add.Tensor"])),
            origin=draw(origins),
        )
    graph = b.graph(tuple(kept[StorageKind.OUTPUT]), tuple(kept[StorageKind.GRADIENT]))
    return with_inplace_candidates(graph) if draw(st.booleans()) else graph


def _written(draw: st.DrawFn, b: GraphBuilder, kept: dict[StorageKind, list[int]], caller: StorageKind) -> int:
    """A value to write: mostly a new planned activation, else one of the caller's, a view, or one in place."""
    how = draw(st.sampled_from(["new", "new", "new", "caller", "view", "in place"]))
    planned = [i for i, s in enumerate(b.storages) if s.planned]
    if how == "caller":
        value = b.storage(caller, draw(_SIZES), planned=False, origin=draw(origins))
        kept[caller].append(value)
        return value
    if how in ("view", "in place") and planned:
        storage = draw(st.sampled_from(planned))
        return b.view(storage, draw(st.integers(0, b.storages[storage].nbytes)))
    return b.storage(StorageKind.ACTIVATION, draw(_SIZES), planned=True, origin=draw(origins))


@st.composite
def schedules(draw: st.DrawFn, graph: Graph) -> Schedule:
    """A random legal order of `graph`: forward first, every op after what it needs."""
    before = predecessors(graph)
    order: list[int] = []
    for phase in Phase:
        left = [i for i, op in enumerate(graph.ops) if op.phase is phase]
        while left:
            ready = [i for i in left if before[i] <= set(order)]
            order.append(draw(st.sampled_from(ready)))
            left.remove(order[-1])
    return make_schedule(graph, tuple(order), "random")


@st.composite
def plans(draw: st.DrawFn, max_ops: int = 8) -> Plan:
    """A validated plan of a random graph, with and without red zones and measured temporaries."""
    graph = draw(graphs(max_ops))
    alignment = draw(st.sampled_from([1, 8, 64]))
    plan = make_plan(
        ScheduledGraph(
            model=draw(st.sampled_from(["gpt2", "", "a|b [x]"])),
            graph=graph,
            schedule=draw(st.one_of(st.just(traced(graph)), schedules(graph))),
            alignment=alignment,
            redzone=draw(st.sampled_from([0, alignment])),
            versions={"memplan": "0.1.0"},
        ),
        PlanOptions(solver=draw(st.sampled_from(["greedy", "naive", "partition"]))),
    )
    if draw(st.booleans()):
        return plan
    sizes = draw(st.lists(_SIZES, min_size=len(graph.ops), max_size=len(graph.ops)))
    return Plan(
        model=plan.model,
        graph=graph,
        schedule=plan.schedule,
        problem=plan.problem,
        solution=plan.solution,
        alignment=plan.alignment,
        redzone=plan.redzone,
        versions=plan.versions,
        temporaries=tuple(sizes),
    )
