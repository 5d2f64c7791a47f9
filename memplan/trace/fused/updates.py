"""Add an optimizer's update to a step of Inductor's kernels.

Inductor's code has the forward and the backward. Its gradients are the inputs of a graph that holds the update alone,
which the functions make that add updates to a captured graph of ATen ops. The ops of that graph join those of the step,
each as soon as it may run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from memplan.core.graph import Op, Phase, Storage, Value
from memplan.core.graph_edit import GraphEdit, in_order, with_values
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
    return _without_dead(_joined(step, _update_alone(step, captured, append)))


def _without_dead(step: TracedGraph) -> TracedGraph:
    """Return the step without ops of the backward whose results nothing reads: gradients that no update takes."""
    graph = step.graph
    needed = {graph.values[v].storage for v in graph.outputs}
    needed |= {i for i, storage in enumerate(graph.storages) if not storage.planned}
    kept: list[int] = []
    for i, op in reversed(list(enumerate(graph.ops))):
        if op.phase is Phase.FORWARD or op.random or op.only_raises or needed & set(graph.written(op)):
            needed |= set(graph.touched(op))
            kept.insert(0, i)
    return replace(step, graph=in_order(graph, kept), kernels=tuple(step.kernels[i] for i in kept))


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


def _joined(step: TracedGraph, update: TracedGraph) -> TracedGraph:
    """Return the step with its update, without gradients among its results."""
    names = {s.name for s in step.graph.storages} | {v.name for v in step.graph.values}
    op_names = {op.name for op in step.graph.ops}
    given = _given(step, update)
    homes = {update.graph.values[v].storage: step.graph.values[at].storage for v, at in given.items()}
    edit = GraphEdit(step.graph)
    value_of = edit.join(update.graph, lambda name: _unused(name, names), homes, given)
    added: list[Op] = []
    for op in update.graph.ops:
        moved = with_values(op, value_of.__getitem__)
        reads, writes = tuple(dict.fromkeys(moved.reads)), tuple(dict.fromkeys(moved.writes))
        name = _unused(op.name, op_names)
        op_names.add(name)
        added.append(replace(moved, reads=reads, writes=writes, name=name, phase=Phase.BACKWARD))
    for op, source in _interleaved(step.graph.ops, added, edit.values):
        edit.add(op, source)
    bindings = [
        *step.bindings,
        *(replace(b, value=value_of[b.value]) for b in update.bindings if b.value not in given),
    ]
    made = {edit.values[v].storage for op in edit.ops for v in op.writes}
    return replace(
        step,
        graph=replace(edit.finish(), gradients=()),
        kernels=tuple(
            step.kernels[i] if i >= 0 else _moved(update.kernels[~i], value_of, step.opaque_count) for i in edit.sources
        ),
        bindings=tuple(replace(b, written=edit.values[b.value].storage in made) for b in bindings),
        results=replace(step.results, gradients=(), gradient_of=(), needs=()),
    )


def _given(step: TracedGraph, update: TracedGraph) -> dict[int, int]:
    """Return what the update is given by the step, parameters and gradients: its values, and those of the step."""
    parameters = {b.name: b.value for b in step.bound(Source.PARAMETER)}
    return {
        b.value: parameters[b.name] if b.source is Source.PARAMETER else step.results.gradients[b.index]
        for b in (*update.bound(Source.PARAMETER), *update.bound(Source.INPUT))
    }


def _moved(kernel: Kernel, value_of: Sequence[int], opaque: int) -> KernelCall:
    """Return a kernel call of the update on the joined graph's values, whose opaque results begin with a number."""
    assert isinstance(kernel, KernelCall)

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return Ref(value_of[leaf.value])
        return OpaqueResult(leaf.number + opaque) if isinstance(leaf, OpaqueResult) else leaf

    args, kwargs = pytree.tree_map(moved, (kernel.args, kernel.kwargs))
    return replace(
        kernel,
        args=args,
        kwargs=kwargs,
        outs=tuple(None if out is None else value_of[out] for out in kernel.outs),
        opaque_results=tuple((i, n + opaque) for i, n in kernel.opaque_results),
    )


def _unused(name: str, taken: set[str]) -> str:
    """Return a name that begins like `name` and is not taken."""
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def _interleaved(step: Sequence[Op], update: Sequence[Op], values: Sequence[Value]) -> Iterator[tuple[Op, int]]:
    """Yield the ops of both, each of the update behind the last op that it has to wait for.

    With each comes its number among those of the step, or ~number among those of the update.
    """
    last = max((i for i, op in enumerate(step) if op.phase is Phase.FORWARD), default=-1)
    touched: dict[int, int] = {}  # storage -> the place of the last op that touches it
    written: dict[int, int] = {}
    for i, op in enumerate(step):
        _note(op, i, values, touched, written)
    behind: dict[int, list[tuple[Op, int]]] = {}
    for i, op in enumerate(update):
        reads, writes = ({values[v].storage for v in some} for some in (op.reads, op.writes))
        place = max([last, *(written.get(s, last) for s in reads), *(touched.get(s, last) for s in writes)])
        place = len(step) - 1 if op.random or op.only_raises else place
        _note(op, place, values, touched, written)
        behind.setdefault(place, []).append((op, ~i))
    yield from behind.get(-1, ())
    for i, op in enumerate(step):
        yield op, i
        yield from behind.get(i, ())


def _note(op: Op, place: int, values: Sequence[Value], touched: dict[int, int], written: dict[int, int]) -> None:
    """Store the place of an op as that of the last one that touches or writes its storages."""
    for v in op.writes:
        storage = values[v].storage
        written[storage] = max(place, written.get(storage, place))
    for v in (*op.reads, *op.writes):
        storage = values[v].storage
        touched[storage] = max(place, touched.get(storage, place))
