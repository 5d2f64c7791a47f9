"""Add an optimizer's update to a step of Inductor's kernels.

Inductor's code has the forward and the backward. Its gradients are the inputs of a graph that holds the update alone,
which the functions make that add updates to a captured graph of ATen ops. The ops of that graph join those of the step,
each as soon as it may run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from memplan.core.graph import Graph, Op, Phase, Storage, Value
from memplan.core.graph_edit import with_values
from memplan.torch_inside.graphs import GradAOTOutput, ParamAOTInput, PlainAOTInput
from memplan.trace.capture.joint_graph import Captured
from memplan.trace.graph.build import build
from memplan.trace.passes.own_outputs import returned_by
from memplan.trace.passes.rewrite import INHERITED, fake_mode_of
from memplan.trace.traced import Kernel, KernelCall, OpaqueResult, Ref, Source, TracedGraph


def with_updates(step: TracedGraph, captured: Captured, append: Callable[[fx.Graph], None]) -> TracedGraph:
    """Return a step that ends with updates of its parameters instead of returning their gradients.

    Args:
        step: Forward and backward; its results are the loss and the gradients, which no caller holds.
        captured: The joint graph that the step was made from.
        append: Replaces the gradients that a graph returns by updates, as `append_updates` does.
    """
    return _without_dead(_Join(step, _update_alone(step, captured, append)).joined())


def _without_dead(step: TracedGraph) -> TracedGraph:
    """Return the step without ops of the backward whose results nothing reads: gradients that no update takes."""
    graph = step.graph
    needed = {graph.values[v].storage for v in graph.outputs}
    needed |= {i for i, storage in enumerate(graph.storages) if not storage.planned}
    kept: list[_Call] = []
    for op, kernel in reversed(list(zip(graph.ops, step.kernels, strict=True))):
        if op.phase is Phase.FORWARD or op.random or op.only_raises or needed & set(graph.written(op)):
            needed |= set(graph.touched(op))
            kept.insert(0, (op, kernel))
    ops, kernels = zip(*kept, strict=True)
    return replace(step, graph=replace(graph, ops=ops), kernels=kernels)


def _update_alone(step: TracedGraph, captured: Captured, append: Callable[[fx.Graph], None]) -> TracedGraph:
    """Return the graph of the update: its inputs are the gradients, in the order of `step.results.gradients`."""
    joint = captured.graph_module.graph
    mode, graph = fake_mode_of(joint), fx.Graph()
    _, results, descs = returned_by(joint)
    gradients = ((d.grad_of, n) for n, d in zip(results, descs, strict=True) if isinstance(d, GradAOTOutput))
    source = {of.target: n for of, n in gradients if isinstance(of, ParamAOTInput)}
    for node in joint.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], ParamAOTInput):
            graph.placeholder(node.name).meta.update(val=node.meta["val"], desc=node.meta["desc"])
    inputs: list[torch.Tensor] = []
    returned: list[fx.Node] = []
    returned_as: list[GradAOTOutput] = []
    for index, of in zip(step.results.gradients, step.results.gradient_of, strict=True):
        value, binding = step.graph.values[index], step.bindings[of]
        with mode:
            inputs.append(_like(value, step.graph.storages[value.storage]))
        if binding.source is not Source.PARAMETER:
            continue
        node = graph.placeholder(value.name.replace(":", "_"))
        node.meta.update({key: source[binding.name].meta[key] for key in INHERITED if key in source[binding.name].meta})
        node.meta.update(val=inputs[-1], desc=PlainAOTInput(idx=len(inputs) - 1))
        returned.append(node)
        returned_as.append(GradAOTOutput(grad_of=ParamAOTInput(target=binding.name)))
    graph.output(tuple(returned)).meta["desc"] = returned_as
    append(graph)
    alone = replace(
        captured,
        graph_module=fx.GraphModule({}, graph),
        inputs=tuple(inputs),
        differentiable=(),
        alias_of=(),
        leaves=(),
        views=(),
        readings=(),
    )
    return build(alone, step.model, {})


def _like(value: Value, storage: Storage) -> torch.Tensor:
    """Return a tensor that is laid out like a value, in a storage of its own."""
    dtype = getattr(torch, value.dtype)
    whole = torch.empty(-(-storage.nbytes // dtype.itemsize), dtype=dtype, device=storage.device)
    return whole.as_strided(value.shape, value.strides, value.offset)


class _Join:
    """Joins a step and the graph of its update."""

    def __init__(self, step: TracedGraph, update: TracedGraph) -> None:
        self.step, self.update = step, update
        self.storages = list(step.graph.storages)
        self.values = list(step.graph.values)
        self.bindings = list(step.bindings)
        self.value_of: dict[int, int] = {}  # of the update's values: their number in the joined graph
        self.storage_of: dict[int, int] = {}
        self._names = {s.name for s in self.storages} | {v.name for v in self.values}
        self._op_names = {op.name for op in step.graph.ops}

    def joined(self) -> TracedGraph:
        """Return the step with its update, without gradients among its results."""
        step, update = self.step, self.update
        self._bind()
        self._add_values()
        ops = [self._op(op) for op in update.graph.ops]
        pairs = list(zip(step.graph.ops, step.kernels, strict=True))
        added = list(zip(ops, map(self._kernel, update.kernels), strict=True))
        found = _interleaved(pairs, added, self.values)
        made = {self.values[v].storage for op, _ in found for v in op.writes}
        return replace(
            step,
            graph=Graph(
                ops=tuple(op for op, _ in found),
                values=tuple(self.values),
                storages=tuple(self.storages),
                outputs=step.graph.outputs,
                gradients=(),
            ),
            kernels=tuple(kernel for _, kernel in found),
            bindings=tuple(replace(b, written=self.values[b.value].storage in made) for b in self.bindings),
            results=replace(step.results, gradients=(), gradient_of=(), needs=()),
        )

    def _bind(self) -> None:
        """Find what the update is given in the step, and add the optimizer's state."""
        values, parameters = self.update.graph.values, {b.name: b.value for b in self.step.bound(Source.PARAMETER)}
        for binding in self.update.bindings:
            given = -1
            if binding.source is Source.PARAMETER:
                given = parameters[binding.name]
            elif binding.source is Source.INPUT:
                given = self.step.results.gradients[binding.index]
            if given >= 0:
                self.value_of[binding.value] = given
                self.storage_of[values[binding.value].storage] = self.values[given].storage

    def _add_values(self) -> None:
        """Add the storages and values of the update, and the bindings of state and constants."""
        graph = self.update.graph
        for i, storage in enumerate(graph.storages):
            if i not in self.storage_of:
                self.storage_of[i] = len(self.storages)
                self.storages.append(replace(storage, name=_unused(storage.name, self._names)))
        for i, value in enumerate(graph.values):
            if i not in self.value_of:
                self.value_of[i] = len(self.values)
                held = self.storage_of[value.storage]
                self.values.append(replace(value, name=_unused(value.name, self._names), storage=held))
        for binding in self.update.bindings:
            if binding.source not in (Source.PARAMETER, Source.INPUT):
                self.bindings.append(replace(binding, value=self.value_of[binding.value]))

    def _op(self, op: Op) -> Op:
        """Return an op of the update on the joined graph's values."""
        moved = with_values(op, self.value_of.__getitem__)
        moved = replace(moved, reads=tuple(dict.fromkeys(moved.reads)), writes=tuple(dict.fromkeys(moved.writes)))
        name = _unused(op.name, self._op_names)
        self._op_names.add(name)
        return replace(moved, name=name, phase=Phase.BACKWARD)

    def _kernel(self, kernel: Kernel) -> KernelCall:
        """Return a kernel call of the update on the joined graph's values."""
        assert isinstance(kernel, KernelCall)
        opaque = self.step.opaque_count

        def moved(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return Ref(self.value_of[leaf.value])
            return OpaqueResult(leaf.number + opaque) if isinstance(leaf, OpaqueResult) else leaf

        args, kwargs = pytree.tree_map(moved, (kernel.args, kernel.kwargs))
        return replace(
            kernel,
            args=args,
            kwargs=kwargs,
            outs=tuple(None if out is None else self.value_of[out] for out in kernel.outs),
            opaque_results=tuple((i, n + opaque) for i, n in kernel.opaque_results),
        )


def _unused(name: str, taken: set[str]) -> str:
    """Return a name that begins like `name` and is not taken."""
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


_Call = tuple[Op, Kernel]


def _interleaved(step: Sequence[_Call], update: Sequence[_Call], values: Sequence[Value]) -> list[_Call]:
    """Return the ops of both, each of the update behind the last op that it has to wait for."""
    last = max((i for i, (op, _) in enumerate(step) if op.phase is Phase.FORWARD), default=-1)
    touched: dict[int, int] = {}  # storage -> the place of the last op that touches it
    written: dict[int, int] = {}
    for i, (op, _) in enumerate(step):
        _note(op, i, values, touched, written)
    behind: dict[int, list[_Call]] = {}
    for op, kernel in update:
        reads, writes = ({values[v].storage for v in some} for some in (op.reads, op.writes))
        place = max([last, *(written.get(s, last) for s in reads), *(touched.get(s, last) for s in writes)])
        place = len(step) - 1 if op.random or op.only_raises else place
        _note(op, place, values, touched, written)
        behind.setdefault(place, []).append((op, kernel))
    found = list(behind.get(-1, []))
    for i, one in enumerate(step):
        found += [one, *behind.get(i, [])]
    return found


def _note(op: Op, place: int, values: Sequence[Value], touched: dict[int, int], written: dict[int, int]) -> None:
    """Store the place of an op as that of the last one that touches or writes its storages."""
    for v in op.writes:
        storage = values[v].storage
        written[storage] = max(place, written.get(storage, place))
    for v in (*op.reads, *op.writes):
        storage = values[v].storage
        touched[storage] = max(place, touched.get(storage, place))
