"""The collectives of a plan: ops that every rank of a process group runs in the same order.

A collective is known by its target. memplan's own are one op each, which has its result when it returns, or, with
`Op.starts`, two: the op starts it, and another one waits for it. Torch's functional ones, whose results arrive later,
appear only in graphs that memplan does not run itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memplan.core.graph import Graph, Op

NAMESPACE = "memplan_distributed"
GATHER = f"{NAMESPACE}.gather_parameter.default"
ALL_REDUCE = f"{NAMESPACE}.all_reduce.default"
WAIT = "memplan.collective_wait"  # waits for a collective that an op with `Op.starts` has started
_OTHERS = ("_c10d_functional.", "_c10d_functional_autograd.", "c10d.", "c10d_functional.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a plan, as it runs at `step` of the schedule, or from there until `waited`.

    `kind` is "gather_parameter", "reduce_scatter", "all_reduce" and the like; `group` names its process group. `shape`
    and `dtype` are those of its result, `nbytes` the bytes of what it reads or of its result, whichever is more.
    `name` names what it is of ("gather_h_0_weight"), and `again` says that the same ran before in the step.
    """

    step: int
    waited: int
    kind: str
    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    again: bool

    @property
    def gathers(self) -> bool:
        """Whether it gathers a parameter, which a budget may repeat."""
        return may_run_again(f"{NAMESPACE}.{self.kind}.default")

    @property
    def sent(self) -> int:
        """The bytes that go over the link of a rank for it, each way, of many ranks: the whole of what is divided.

        A sum that all ranks get is divided among them first, and gathered then.
        """
        return 2 * self.nbytes if self.kind == "all_reduce" else self.nbytes

    @property
    def early(self) -> bool:
        """Whether it is started before its result is needed, and waited for later."""
        return self.waited > self.step

    @property
    def line(self) -> str:
        """The collective in one line, equal on all ranks that run the same."""
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.kind} {self.name} ({self.dtype} {shape})"


def is_collective(target: str) -> bool:
    """Return whether ops of this target need the other ranks.

    Example:
        >>> is_collective("aten.add.Tensor")
        False
    """
    return target.startswith((f"{NAMESPACE}.", *_OTHERS))


def may_run_again(target: str) -> bool:
    """Return whether an op of this target, a collective, may run again in a step: the gather of a parameter may."""
    return target == GATHER


def collectives_of(graph: Graph, order: Sequence[int]) -> tuple[Collective, ...]:
    """Return the collectives of a graph in the order in which they run."""
    known: set[str] = set()
    waits = waited_for(graph, order)
    found = []
    for step, index in enumerate(order):
        op = graph.ops[index]
        if not is_collective(op.target):
            continue
        result = graph.values[(*op.writes, *op.reads)[0]]
        found.append(
            Collective(
                step=step,
                waited=waits.get(step, step),
                kind=op.target.split(".")[1],
                group=op.group,
                name=op.origin.node,
                dtype=result.dtype,
                shape=result.shape,
                nbytes=max(graph.storages[s].nbytes for s in graph.touched(op)),
                again=op.origin.node in known,
            )
        )
        known.add(op.origin.node)
    return tuple(found)


def wait_for(op: Op) -> Op:
    """Return the op that waits for a collective which `op` starts: it touches what that reads and writes."""
    return Op(
        name=f"wait:{op.name}",
        target=WAIT,
        phase=op.phase,
        reads=(*op.reads, *op.writes),
        writes=op.writes,
        direct=True,
        random=False,
        origin=op.origin,
        group=op.group,
    )


def waited_for(graph: Graph, order: Sequence[int]) -> dict[int, int]:
    """Return the step at which each collective is waited for, by the step that starts it."""
    started: dict[tuple[int, int], int] = {}
    found: dict[int, int] = {}
    for step, index in enumerate(order):
        op = graph.ops[index]
        if op.starts:
            started[op.reads[0], op.writes[0]] = step
        elif op.target == WAIT and op.reads in started:
            found[started.pop((op.reads[0], op.reads[1]))] = step
    return found


def in_one_piece(graph: Graph, order: Sequence[int]) -> Iterator[int]:
    """Yield the ops of an order without the waits for collectives.

    Each collective is where it keeps its bytes for less time: a gather where it is waited for, others where they start.
    """
    started: dict[tuple[int, ...], int] = {}
    for index in order:
        op = graph.ops[index]
        if op.starts and may_run_again(op.target):
            started[*op.reads, *op.writes] = index
        elif op.target == WAIT:
            yield from (started.pop(op.reads),) if op.reads in started else ()
        else:
            yield index
