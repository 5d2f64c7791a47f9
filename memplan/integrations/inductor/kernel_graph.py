"""Makes a `Graph` of the kernels of a lowered forward and backward, for the policies of `memplan.evict`.

An op is what Inductor's scheduler calls at once (a fused kernel, a product, a convolution), a storage one of its
buffers with everything that is written in place there. What the forward saves is the backward's input: one storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from memplan.core.graph import Graph, Op, Origin, Phase, Storage, StorageKind, Value, check_graph
from memplan.core.in_place import with_candidates
from memplan.integrations.inductor.lowering import LoweredStep
from memplan.integrations.inductor.wrapper_lines import storage_bytes

_NOWHERE = Origin()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStep:
    """The kernels of a step as a graph, and the nodes of the joint graph that its storages hold.

    `nodes` has, for a storage (by index) that the forward makes, the names of the nodes that can be saved to have its
    bytes in the backward: those that are saved already, or the one that its kernel computes.
    """

    graph: Graph
    nodes: Mapping[int, tuple[str, ...]]


def kernel_step(lowered: LoweredStep) -> KernelStep:
    """Return the graph of a lowered step.

    Example:
        >>> step = kernel_step(lowered)
        >>> step.graph.ops[0].target
        'fused'
    """
    reader = _SchedulerReader(lowered)
    reader.read()
    return reader.result()


@dataclass(slots=True)
class _Tensors:
    """The buffers of one of both graphs: the variable that owns the memory of each, and what is known of it."""

    graph: GraphLowering
    mark: str
    root: dict[str, str]
    of: dict[str, Any]

    def owner(self, name: str) -> str:
        """Return the name of the buffer whose memory `name` is in."""
        while (found := self.root.get(name, name)) != name:
            name = found
        return name


class _SchedulerReader:
    """Reads both graphs of a step into ops, values and storages."""

    def __init__(self, lowered: LoweredStep) -> None:
        self.lowered = lowered
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self._indices: dict[tuple[str, str], int] = {}
        self._nodes: dict[int, tuple[str, ...]] = {}
        self.forward = self._tensors(lowered.forward, "F")
        self.backward = self._tensors(lowered.backward, "B")
        self._returned = {
            "F": self._outputs(self.forward)[: lowered.results],
            "B": self._outputs(self.backward),
        }
        by_node = dict(zip(lowered.returned, self._outputs(self.forward), strict=True))
        inputs = zip(lowered.taken, lowered.backward.graph_input_names, strict=True)
        self._saved = {name: by_node[node] for node, name in inputs if by_node.get(node) is not None}
        for node, name in by_node.items():
            if name is not None and node in lowered.saved:
                index = self._storage(self.forward, name)
                self._nodes[index] = (*self._nodes.get(index, ()), str(node))

    def read(self) -> None:
        """Read every kernel of both graphs."""
        for tensors, phase in ((self.forward, Phase.FORWARD), (self.backward, Phase.BACKWARD)):
            with V.set_graph_handler(tensors.graph):
                for number, kernel in enumerate(tensors.graph.scheduler.nodes):
                    self._kernel(tensors, phase, number, kernel)

    def result(self) -> KernelStep:
        """Return what was read. Gradients and results are in the arena, and stay there to the end of the step."""
        kept = [(self.forward, name) for name in self._returned["F"]]
        kept += [(self.backward, name) for name in self._returned["B"]]
        made = {self.values[v].storage for op in self.ops for v in op.writes}
        indices = dict.fromkeys(self._storage(tensors, name) for tensors, name in kept if name is not None)
        ends = [self._whole(s) for s in indices if s in made and self.storages[s].planned]
        graph = Graph(
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=tuple(self.storages),
            outputs=(),
            gradients=tuple(ends),
        )
        graph = with_candidates(graph, self._in_place())
        check_graph(graph)
        return KernelStep(graph=graph, nodes=self._nodes)

    # -- buffers -----------------------------------------------------------------------------------------

    def _tensors(self, graph: GraphLowering, mark: str) -> _Tensors:
        """Return the buffers of a graph."""
        found = _Tensors(graph=graph, mark=mark, root={}, of={})
        for name, given in graph.graph_inputs.items():
            found.of[name] = given
        for kernel in graph.scheduler.nodes:
            for buffer in kernel.get_outputs():
                name = buffer.get_name()
                found.of[name] = buffer.node
                others = (*buffer.get_mutations(), *buffer.get_aliases())
                if others:
                    found.root[name] = others[0]
        return found

    @staticmethod
    def _outputs(tensors: _Tensors) -> list[str | None]:
        """Return the buffer that each result of a graph is in."""
        found: list[str | None] = []
        for out in tensors.graph.graph_outputs:
            is_tensor = isinstance(out, ir.IRNode) and out.has_tensor_output()
            found.append(str(out.get_name()) if is_tensor else None)
        return found

    def _storage(self, tensors: _Tensors, name: str) -> int:
        """Return the storage that holds a buffer."""
        owner = tensors.owner(name)
        if tensors.mark == "B" and owner in self._saved:
            return self._storage(self.forward, str(self._saved[owner]))
        key = (tensors.mark, owner)
        if key not in self._indices:
            self._indices[key] = len(self.storages)
            self.storages.append(self._new_storage(tensors, owner))
        return self._indices[key]

    def _new_storage(self, tensors: _Tensors, owner: str) -> Storage:
        """Return the storage of a buffer that owns its memory: an input, a constant, or one that a kernel makes."""
        given = owner in tensors.graph.graph_inputs
        buffer = tensors.of.get(owner)
        with V.set_graph_handler(tensors.graph):
            nbytes = storage_bytes(tensors.graph, buffer) if buffer is not None and not given else 0
        kind = StorageKind.ACTIVATION if tensors.mark == "F" else StorageKind.GRADIENT
        if given or buffer is None:
            kind = StorageKind.TANGENT if tensors.mark == "B" else StorageKind.PARAMETER
        return Storage(
            name=f"{tensors.mark}.{owner}",
            nbytes=nbytes,
            device=_device(buffer),
            kind=kind,
            planned=not given and buffer is not None and nbytes > 0,
            origin=_NOWHERE,
        )

    def _value(self, storage: int, dtype: str, shape: Sequence[int]) -> int:
        """Add a dense value in a storage and return its index."""
        steps = list(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))
        self.values.append(
            Value(
                name=f"v{len(self.values)}",
                storage=storage,
                dtype=dtype,
                shape=tuple(shape),
                strides=tuple(reversed(steps)) if shape else (),
                offset=0,
            )
        )
        return len(self.values) - 1

    def _whole(self, storage: int) -> int:
        """Return a value that is all bytes of a storage."""
        return self._value(storage, "uint8", (self.storages[storage].nbytes,))

    # -- kernels -----------------------------------------------------------------------------------------

    def _kernel(self, tensors: _Tensors, phase: Phase, number: int, kernel: Any) -> None:
        """Add the op of a kernel, unless it touches no memory."""
        removed = tensors.graph.removed_buffers
        own = [name for name in kernel.get_buffer_names() if name not in removed]
        written = dict.fromkeys(self._storage(tensors, name) for name in own)
        changed = {self._storage(tensors, b.get_name()) for b in kernel.get_outputs() if b.get_mutations()}
        outside = [
            dep.name for dep in kernel.read_writes.reads if not isinstance(dep, WeakDep) and dep.name not in removed
        ]
        read = dict.fromkeys(self._storage(tensors, name) for name in outside if name not in own)
        if not written:
            return
        extern = kernel.is_extern()
        shapes = _operands(kernel.node) if extern else {}
        reads = [self._operand(tensors, name, shapes.get(name)) for name in outside if name not in own]
        reads += [self._whole(s) for s in sorted(changed - set(read))]
        self.ops.append(
            Op(
                name=f"{tensors.mark}{number}.{kernel.get_name()}",
                target=_target(kernel.node) if extern else "fused",
                phase=phase,
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(self._result(tensors, s, own) for s in written),
                direct=True,
                random=_draws(kernel),
                origin=_NOWHERE,
            )
        )
        for name in own:
            index = self._storage(tensors, name)
            node = tensors.of[name].get_origin_node() if phase is Phase.FORWARD else None
            if node is not None and index not in self._nodes:
                self._nodes[index] = (node.name,)

    def _operand(self, tensors: _Tensors, name: str, shape: Sequence[int] | None) -> int:
        """Return a value for what a kernel reads, in the shape in which it reads it."""
        node = tensors.of.get(tensors.root.get(name, name), tensors.of.get(name))
        sizes = shape if shape is not None else _sizes(node)
        return self._value(self._storage(tensors, name), _dtype(node), sizes)

    def _result(self, tensors: _Tensors, storage: int, own: Iterable[str]) -> int:
        """Return a value for what a kernel writes into a storage."""
        name = next(name for name in own if self._storage(tensors, name) == storage)
        node = tensors.of[name]
        return self._value(storage, _dtype(node), _sizes(node))

    def _in_place(self) -> list[tuple[int, int]]:
        """Return pairs (storage of a result, storage of an input) where a kernel writes over its input."""
        found = []
        for tensors in (self.forward, self.backward):
            for new, old in tensors.graph.wrapper_code.reuses.items():
                if new in tensors.of and old in tensors.of:
                    found.append((self._storage(tensors, new), self._storage(tensors, old)))
        return found


def _draws(kernel: Any) -> bool:
    """Return whether a kernel draws random numbers. Inductor's masks are computed from seeds, which are drawn once."""
    origins = {origin for one in kernel.get_nodes() if one.node is not None for origin in one.node.get_origins()}
    return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in origins)


def _target(node: Any) -> str:
    """Return the name of the op that a kernel of a library runs, as a cost model knows it."""
    origin = node.get_origin_node()
    name = str(origin.target) if origin is not None else ""
    return name if name.startswith("aten.") else str(getattr(node, "python_kernel_name", None) or "extern")


def _operands(node: Any) -> dict[str, Sequence[int]]:
    """Return the shape in which a kernel of a library reads each of its inputs."""
    found: dict[str, Sequence[int]] = {}
    for one in getattr(node, "inputs", ()):
        if isinstance(one, ir.IRNode) and one.has_tensor_output():
            found[one.get_name()] = tuple(int(n) for n in one.get_size())
    return found


def _sizes(node: Any) -> tuple[int, ...]:
    if node is None or not node.has_tensor_output():
        return ()
    return tuple(int(n) for n in node.get_size())


def _dtype(node: Any) -> str:
    if node is None or not node.has_tensor_output():
        return "uint8"
    return str(node.get_dtype()).removeprefix("torch.")


def _device(node: Any) -> str:
    found = node.get_device() if node is not None and hasattr(node, "get_device") else None
    return str(found or "cpu")
