"""The graph of a traced training step, without torch: its ops, values and storages.

An `Op` is one kernel launch, a `Value` a strided view of a `Storage`, and a `Storage` the bytes of one alias class.
View ops are not in the graph: the views that they make are values. Ops are in traced order, which is one legal
order; the storages that they touch decide which other orders are legal.
"""

from __future__ import annotations

import enum
import hashlib
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from memplan.core.later import later
from memplan.errors import InvalidPlan, PlanMismatch

if TYPE_CHECKING:
    from networkx import DiGraph

GIVEN = "constant"  # the op of a constant's origin that no op made


class StorageKind(enum.StrEnum):
    """The purpose of a storage's bytes."""

    INPUT = "input"
    PARAMETER = "parameter"
    CONSTANT = "constant"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OUTPUT = "output"
    TANGENT = "tangent"
    OPTIMIZER_STATE = "optimizer state"
    HOST = "host copy"
    RNG_STATE = "generator state"


class Phase(enum.StrEnum):
    """The part of the training step in which an op runs: the call of the model, or `backward`."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The place in the user's model that an op or storage comes from.

    `module` is a module path ("h.0.attn"), `source` a line of the user's code ("model.py:12"), `op` the ATen op and
    `node` the node of the traced graph.
    """

    module: str = ""
    source: str = ""
    op: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The bytes of one alias class. With `planned` they are in the arena; otherwise the model, the caller or autograd
    owns them, or the step allocates them (`Graph.released`)."""

    name: str
    nbytes: int
    device: str
    kind: StorageKind
    planned: bool
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A strided view of `storage` (an index into `Graph.storages`). `offset` and `strides` are in elements."""

    name: str
    storage: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def itemsize(self) -> int:
        """The bytes of one element: 2 for "bfloat16", 1 for "float8_e4m3fn" and "bool"."""
        bits = re.search(r"\d+", self.dtype)
        return int(bits.group()) // 8 if bits else 1

    @property
    def dense(self) -> bool:
        """Whether the elements are contiguous in memory in some order of dimensions, each stored once.

        An expanded value is not dense.
        """
        expected = 1
        for stride, n in sorted((s, n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1):
            if stride != expected:
                return False
            expected *= n
        return True

    @property
    def is_contiguous(self) -> bool:
        """Whether the strides are exactly those of a contiguous tensor, in dimensions of size 1 too."""
        return self.strides == tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kernel call. `reads` and `writes` are value indices; a value in both is changed in place.

    With `direct`, the kernel writes its results to the given addresses (a true `out=` kernel). Otherwise it returns
    fresh tensors, which are copied to their planned place; their bytes are outside the arena while the op runs.

    `inplace_candidates` are pairs (result, input) of value indices: the result may take the bytes of the input's
    storage in every order in which nothing touches that storage after this op. `unrelated` are pairs (result, input)
    where the result does not depend on the input, although the kernel reads it.

    `checkpoint` is the number (from 1) of the activation checkpoint (`torch.utils.checkpoint`) whose backward computes
    the results again; 0: none, or eager keeps the results. `within` are the checkpoints around that one, from the
    outermost: its inputs are made again with what is around it.

    `group` names the process group of a collective; "" for other ops. `starts`: it returns before its result is there,
    and another op waits for it (`memplan.core.collectives.WAIT`), which touches what it reads and writes.

    `on_host`: all that it reads and writes is on the host, where it runs beside the device's lanes, after all that was
    launched before it; the end of the step waits for it.
    """

    name: str
    target: str
    phase: Phase
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    direct: bool
    random: bool
    origin: Origin
    inplace_candidates: tuple[tuple[int, int], ...] = ()
    unrelated: tuple[tuple[int, int], ...] = ()
    checkpoint: int = 0
    within: tuple[int, ...] = ()
    group: str = ""
    starts: bool = False
    on_host: bool = False

    @property
    def only_raises(self) -> bool:
        """Whether the op writes nothing: it only raises an error if the values that it reads report a failure."""
        return not self.writes


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A traced training step: ops in traced order (forward first), and the values and storages that they touch.

    `outputs` are the values returned to the caller, `gradients` those returned to autograd (gradients of parameters
    and inputs); both are value indices.
    """

    ops: tuple[Op, ...] = ()
    values: tuple[Value, ...] = ()
    storages: tuple[Storage, ...] = ()
    outputs: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()

    def touched(self, op: Op) -> tuple[int, ...]:
        """Return the indices of the storages that `op` reads or writes, each once, in order of appearance."""
        return tuple(dict.fromkeys(self.values[v].storage for v in (*op.reads, *op.writes)))

    def written(self, op: Op) -> tuple[int, ...]:
        """Return the indices of the storages that `op` writes, each once."""
        return tuple(dict.fromkeys(self.values[v].storage for v in op.writes))

    @cached_property
    def gradients_in_arena(self) -> frozenset[int]:
        """The storages of gradients that stay in the arena to the end of the step."""
        returned = {self.values[v].storage for v in self.gradients}
        return frozenset(s for s in returned if self.storages[s].planned)

    @cached_property
    def updated_on_host(self) -> int:
        """The bytes of parameters and optimizer state that ops of the host change (`Op.on_host`)."""
        changed = {s for op in self.ops if op.on_host for s in self.written(op)}
        kinds = (StorageKind.PARAMETER, StorageKind.OPTIMIZER_STATE)
        return sum(self.storages[s].nbytes for s in changed if self.storages[s].kind in kinds)

    @cached_property
    def released(self) -> frozenset[int]:
        """The storages of intermediate results outside the arena, which take bytes from the first use to the last."""
        returned = {self.values[v].storage for v in (*self.outputs, *self.gradients)}
        kinds = (StorageKind.ACTIVATION, StorageKind.GRADIENT)
        found = (i for i, s in enumerate(self.storages) if not s.planned and s.kind in kinds)
        return frozenset(found) - returned

    def with_outside(self, storages: Collection[int]) -> Graph:
        """Return the graph with these planned storages (by index) outside the arena.

        A result takes the bytes of an input in place only if both are in the arena.
        """
        moved = tuple(replace(s, planned=False) if i in storages else s for i, s in enumerate(self.storages))

        def is_planned(value: int) -> bool:
            return moved[self.values[value].storage].planned

        def kept(op: Op) -> tuple[tuple[int, int], ...]:
            return tuple(pair for pair in op.inplace_candidates if is_planned(pair[0]) and is_planned(pair[1]))

        return replace(self, storages=moved, ops=tuple(replace(op, inplace_candidates=kept(op)) for op in self.ops))

    def saved_state(self, op: Op) -> int | None:
        """Return the value of the generator state with which `op` draws random numbers again; None: it does not.

        It is the last of `op.reads`, and its storage is written by an op that saves the state.
        """
        last = op.reads[-1] if op.reads else None
        if last is None or self.storages[self.values[last].storage].kind is not StorageKind.RNG_STATE:
            return None
        return last

    @cached_property
    def forward_ops(self) -> int:
        """The number of ops in the forward; they come first."""
        return sum(op.phase is Phase.FORWARD for op in self.ops)

    @property
    def is_generated(self) -> bool:
        """Whether Inductor generated any of its kernels."""
        return any(op.target.startswith("inductor.") for op in self.ops)

    def bytes_of(self, *kinds: StorageKind, planned: bool = False) -> int:
        """Total bytes of the storages of these kinds whose `planned` equals the argument."""
        return sum(s.nbytes for s in self.storages if s.kind in kinds and s.planned == planned)

    def functional_bytes(self, op: Op) -> int:
        """Return the bytes that `op` returns in fresh tensors before they are copied to their planned place (0 if
        direct).
        """
        if op.direct:
            return 0
        return sum(self.storages[s].nbytes for s in self.written(op) if self.storages[s].planned)

    def to_networkx(self) -> DiGraph:
        """Return the ops and what must run before what as a networkx graph.

        Every topological order of it that puts the forward before the backward computes the same results.

        Returns:
            A `networkx.DiGraph` whose nodes are positions in `ops`, as in `Schedule.order`. A node has the attributes
            `name`, `target`, `phase` ("forward" or "backward"), `module`, `source` and `nbytes`: the bytes of the
            planned storages that the op writes. An edge goes from an op to one that must run after it; its attribute
            `storages` names the storages that both touch, and is empty where the order is kept for another reason
            (random numbers, collectives).

        Example:
            >>> graph = memplan.load("plan.json").graph.to_networkx()
            >>> [graph.nodes[op]["name"] for op in networkx.dag_longest_path(graph)]
        """
        made: DiGraph = later("to_networkx")(self)
        return made

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over every op, value and storage, but not over origins (file names, lines)."""
        digest = hashlib.sha256()
        for line in self.signature():
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    def signature(self) -> Iterator[str]:
        """One line per storage and op. Graphs with equal lines are equal; `require_same` names the first difference."""
        for s in self.storages:
            yield f"storage {s.name}: {s.kind} {s.nbytes} bytes on {s.device}{' planned' if s.planned else ''}"
        for op in self.ops:
            reads = ", ".join(self._describe(v) for v in op.reads)
            writes = ", ".join(self._describe(v) for v in op.writes)
            inplace_candidates = "".join(f" or in {self.values[i].name}" for _, i in op.inplace_candidates)
            random = " random" if op.random else ""
            unrelated = "".join(f", {self.values[o].name} not of {self.values[i].name}" for o, i in op.unrelated)
            others = unrelated + (f" in group {op.group}" if op.group else "") + (" started" if op.starts else "")
            yield f"op {op.name}: {op.phase} {op.target}({reads}) -> {writes}{inplace_candidates}{random}{others}"
        yield f"outputs: {', '.join(self._describe(v) for v in self.outputs)}"
        yield f"gradients: {', '.join(self._describe(v) for v in self.gradients)}"

    def _describe(self, index: int) -> str:
        v = self.values[index]
        shape, strides = ("x".join(map(str, numbers)) for numbers in (v.shape, v.strides))
        return f"{v.name}[{v.dtype} {shape} / {strides} + {v.offset} of {self.storages[v.storage].name}]"


def require_same(planned: Graph, traced: Graph) -> None:
    """Raise `PlanMismatch` naming the first line in which a plan's graph and a newly traced graph differ."""
    if planned.fingerprint == traced.fingerprint:
        return
    hint = "make the plan anew: memplan.plan(model, example_inputs).save(path)"
    theirs, ours = list(planned.signature()), list(traced.signature())
    for one, two in zip(theirs, ours, strict=False):
        if one != two:
            raise PlanMismatch(f"the plan was made for another graph\n  plan:  {one}\n  model: {two}", hint=hint)
    longer = theirs if len(theirs) > len(ours) else ours
    raise PlanMismatch(
        f"the plan was made for another graph; only one has {longer[min(len(theirs), len(ours))]!r}", hint=hint
    )


def check_graph(graph: Graph) -> None:
    """Raise `InvalidPlan` naming the first invalid index, size or op order in `graph`."""
    _check_storages(graph)
    for i, value in enumerate(graph.values):
        if not 0 <= value.storage < len(graph.storages):
            raise InvalidPlan(f"names storage {value.storage}", where=f"graph.values[{i}].storage")
        if len(value.shape) != len(value.strides) or min((*value.shape, *value.strides, value.offset)) < 0:
            raise InvalidPlan("is not a valid view: shape, strides and offset disagree", where=f"graph.values[{i}]")
    references = [
        (f"ops[{i}].{field}", getattr(op, field)) for i, op in enumerate(graph.ops) for field in ("reads", "writes")
    ]
    references += [("outputs", graph.outputs), ("gradients", graph.gradients)]
    for where, indices in references:
        for index in indices:
            if not 0 <= index < len(graph.values):
                raise InvalidPlan(f"names value {index}", where=f"graph.{where}")
    for i, op in enumerate(graph.ops):
        if op.phase is Phase.FORWARD and i >= graph.forward_ops:
            raise InvalidPlan("is an op of the forward after an op of the backward", where=f"graph.ops[{i}].phase")
    _check_inplace_candidates(graph)


def _check_inplace_candidates(graph: Graph) -> None:
    """Raise `InvalidPlan` for the first pair of `unrelated` or `inplace_candidates` that its op cannot have.

    For an in-place candidate, both storages must be in the arena, or both outside, equal in size and device and not
    returned to the caller; the op must be the first to write the one and must read the other.
    """
    kept = {graph.values[v].storage for v in (*graph.outputs, *graph.gradients)}
    made: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        for storage in graph.touched(op):
            made.setdefault(storage, i)
        for k, (result, read) in enumerate(op.unrelated):
            if result not in op.writes or read not in op.reads:
                where = f"graph.ops[{i}].unrelated[{k}]"
                raise InvalidPlan("is not a result and an input of its op", where=where)
        for k, (result, read) in enumerate(op.inplace_candidates):
            where = f"graph.ops[{i}].inplace_candidates[{k}]"
            if result not in op.writes or read not in op.reads:
                raise InvalidPlan("is not a result and an input of its op", where=where)
            born, donor = (graph.values[v].storage for v in (result, read))
            one, two = graph.storages[born], graph.storages[donor]
            if born in kept or donor in kept or donor in graph.written(op) or made[born] != i:
                raise InvalidPlan("cannot be: the bytes are not free, or the result is not new", where=where)
            if one.planned != two.planned or (one.nbytes, one.device) != (two.nbytes, two.device):
                raise InvalidPlan("is between storages that do not fit each other", where=where)


def _check_storages(graph: Graph) -> None:
    names: set[str] = set()
    for i, storage in enumerate(graph.storages):
        if storage.nbytes < 0:
            raise InvalidPlan(f"negative size {storage.nbytes}", where=f"graph.storages[{i}].nbytes")
        if storage.name in names:
            raise InvalidPlan(f"a storage before it has this name: {storage.name!r}", where=f"graph.storages[{i}].name")
        names.add(storage.name)
