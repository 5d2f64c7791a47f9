"""The values and storages of a graph by its fake tensors, the results that are no values, and what leaves the step.

A storage is an alias class of fake tensors. Numbers and None are no values, and neither are random states that one
kernel passes to another: fused attention on CUDA returns its random state for its own backward, in the host's memory
when it runs eagerly, in the device's while a CUDA graph is captured
(aten/src/ATen/native/transformers/cuda/attention.cu, "Seed and Offset"). A copy at a planned address would be neither.
It also returns sizes as numbers, which are known when it is traced.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from memplan.core.graph import Origin, Storage, StorageKind, Value
from memplan.errors import UnsupportedGraph
from memplan.torch_inside.graphs import (
    BufferAOTInput,
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTOutput,
)
from memplan.trace.capture.joint_graph import Captured
from memplan.trace.passes.own_outputs import returned_by
from memplan.trace.passes.rewrite import storage_key
from memplan.trace.traced import Binding, Results, Returned, ReturnKind, Source

_MADE = (StorageKind.ACTIVATION, StorageKind.GRADIENT, StorageKind.OUTPUT)


class AliasClasses:
    """The values and storages found so far, each by its index; `SymbolicAliasClasses` has sizes that vary."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self.start_of: list[int] = []  # by storage: the offset (elements) at which its first value begins
        self._storage_of: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # a storage key is an address, which is reused unless its tensor is kept

    def storage(self, val: torch.Tensor, name: str, kind: StorageKind, *, planned: bool, origin: Origin) -> int:
        """Return the storage of a tensor: a new one, called `name`, if it aliases none of the earlier ones."""
        key = storage_key(val)
        if key not in self._storage_of:
            self._storage_of[key] = len(self.storages)
            # A fake result may begin after the start of its storage, depending on what was traced before.
            self.start_of.append(self.whole(val.storage_offset(), name) if kind in _MADE else 0)
            self._alive.append(val)
            self.storages.append(
                Storage(name=name, nbytes=0, device=str(val.device), kind=kind, planned=planned, origin=origin)
            )
        return self._storage_of[key]

    def value(self, val: torch.Tensor, name: str, storage: int) -> int:
        """Add a value of `storage` and return its index. Raises `UnsupportedGraph` for what is not plain strided
        memory.
        """
        if val.layout is not torch.strided or val.is_conj() or val.is_neg() or val.is_quantized:
            raise UnsupportedGraph(
                name,
                f"a tensor that is not plain strided memory ({val.layout})",
                "use dense real tensors",
                see="strided",
            )
        self.values.append(
            Value(
                name=name,
                storage=storage,
                dtype=str(val.dtype).removeprefix("torch."),
                shape=tuple(self.whole(n, name) for n in val.shape),
                strides=tuple(self.whole(n, name) for n in val.stride()),
                offset=self.whole(val.storage_offset(), name) - self.start_of[storage],
            )
        )
        return len(self.values) - 1

    def whole(self, size: Any, name: str) -> int:
        """Return a size as a number. Raises `UnsupportedGraph` for an unknown one; `name` is the node that has it."""
        if not isinstance(size, int):
            raise UnsupportedGraph(name, "a size that depends on data", "use fixed shapes", see="data-dependent-size")
        return size

    def sized(self) -> tuple[Storage, ...]:
        """Return the storages with the bytes that their values span.

        A fake storage may be larger than its tensor, by an amount that depends on what was traced before.
        """
        spans = [0] * len(self.storages)
        for v in self.values:
            last = sum((n - 1) * s for n, s in zip(v.shape, v.strides, strict=True))
            elements = 0 if 0 in v.shape else v.offset + last + 1
            spans[v.storage] = max(spans[v.storage], elements * getattr(torch, v.dtype).itemsize)
        return tuple(replace(s, nbytes=nbytes) for s, nbytes in zip(self.storages, spans, strict=True))


_STATES = {"philox_seed", "philox_offset", "rng_state", "unused", "seed", "offset"}  # names in schemas of attention


def is_literal(result: Any) -> bool:
    """Return whether a traced result is known already: None, or a number."""
    return result is None or isinstance(result, (bool, int, float))


def is_mixed(node: fx.Node) -> bool:
    """Return whether some results of a node with several are no plain tensors, so that each is read on its own."""
    results = node.meta["val"]
    return isinstance(results, (tuple, list)) and (any(map(is_literal, results)) or bool(opaque_positions(node)))


def opaque_positions(node: fx.Node) -> tuple[int, ...]:
    """Return the positions of those results of a node that are random states, read by backward kernels only."""
    assert isinstance(node.target, OpOverload)
    named = [i for i in range(len(node.target._schema.returns)) if is_random_state(node.target, i)]
    return tuple(i for i in named if isinstance(node.meta["val"][i], torch.Tensor) and all(_read_by(node, i)))


def is_random_state(target: Any, position: int) -> bool:
    """Return whether a result of an op is a random state, as its schema names it."""
    if not isinstance(target, OpOverload) or position >= len(target._schema.returns):
        return False
    return target._schema.returns[position].name in _STATES


def used_positions(node: fx.Node) -> set[Any]:
    """Return the positions of those results of a node that something reads."""
    return {user.args[1] for user in node.users if user.target is operator.getitem and user.users}


def _read_by(node: fx.Node, position: int) -> list[bool]:
    """Return, for each reader of one result, whether it is a backward kernel."""
    items = [user for user in node.users if user.target is operator.getitem and user.args[1] == position]
    readers = [reader for item in items for reader in item.users]
    return [isinstance(r.target, OpOverload) and r.target._opname.endswith("backward") for r in readers]


_Output = tuple[Any, Any]  # what the graph returns (a node or a constant), and its descriptor


def read_results(  # noqa: PLR0917
    graph: fx.Graph,
    value_of: Mapping[fx.Node, int],
    values: Sequence[Value],
    bindings: Sequence[Binding],
    made: set[int],
    captured: Captured,
    needs: Mapping[Any, frozenset[int]],
) -> Results:
    """Return what leaves the graph, sorted by kind; `made` are the storages that its ops write. Raises
    `UnsupportedGraph`.
    """
    _, results, descs = returned_by(graph)
    pairs: list[_Output] = list(zip(results, descs, strict=True))
    outputs = [(n, d) for n, d in pairs if not isinstance(d, GradAOTOutput)]
    gradients = [(n, d) for n, d in pairs if isinstance(d, GradAOTOutput) and isinstance(n, fx.Node)]
    tangents = {
        n.meta["desc"].output: value_of[n] for n in graph.find_nodes(op="placeholder") if n.meta["desc"].is_tangent()
    }
    base_of = {values[b.value].storage: b.value for b in reversed(bindings)}
    plain = [(n, d) for n, d in outputs if isinstance(d, PlainAOTOutput)]
    roots = [pair for pair, view in zip(plain, captured.views, strict=True) if view.of is None]
    fresh = _fresh_outputs(outputs, roots, set(tangents), value_of, values, made - set(base_of))
    unused = [output for output in tangents if output not in {d for _, d in fresh}]
    if unused:
        changed = getattr(getattr(unused[0], "mutated_input", None), "target", None)
        if changed is not None:
            what, hint = (
                f"forward changes {changed} in place, through autograd",
                "change it between steps, under torch.no_grad()",
            )
            raise UnsupportedGraph(
                changed,
                what,
                f"{hint} (max_norm of an embedding: renormalise after optimizer.step())",
                see="in-place-autograd",
            )
        what = f"its outputs need gradients in a way that is not supported ({unused[0]!r})"
        raise UnsupportedGraph("output", what, "return copies instead of several views of one tensor", see="views")
    for node, _ in fresh:
        base_of.setdefault(values[value_of[node]].storage, value_of[node])
    own = {value_of[node] for node, _ in fresh}
    bound = {(b.source, b.name, b.index): i for i, b in enumerate(bindings)}
    returned = tuple(_returned(i, plain, captured, value_of, values, base_of, own) for i in range(len(plain)))
    without_gradient = {value_of[node] for node, d in fresh if d not in tangents}
    lost = [r for r in returned if r.kind is ReturnKind.FRESH and r.value in without_gradient]
    if lost:
        what = "is returned as one of several views of one tensor, in a way that no gradient would reach"
        raise UnsupportedGraph(values[lost[0].value].name, what, "return a copy of it (.clone())", see="views")
    return Results(
        returned=returned,
        leaves=captured.leaves,
        fresh=tuple(value_of[node] for node, _ in fresh),
        tangents=tuple(tangents.get(desc) for _, desc in fresh),
        gradients=tuple(value_of[node] for node, _ in gradients),
        gradient_of=tuple(bound[_key(desc.grad_of)] for _, desc in gradients),
        needs=tuple(needs[desc] for _, desc in gradients),
    )


def _fresh_outputs(  # noqa: PLR0917
    outputs: list[_Output],
    roots: list[_Output],
    differentiable: set[Any],
    value_of: Mapping[fx.Node, int],
    values: Sequence[Value],
    made: set[int],
) -> list[_Output]:
    """Return the outputs that the step itself writes, in order: those with a tangent, and one for each other storage.

    Of outputs that share bytes, those with a tangent are fresh. The others are made outside of the step, as views of
    the first of them that autograd knows, so that gradients through them arrive. `roots` are no views of others.
    """
    nodes = [(n, d) for n, d in outputs if isinstance(n, fx.Node) and n in value_of]
    fresh = [pair for pair in nodes if pair[1] in differentiable and values[value_of[pair[0]]].storage in made]
    seen = {values[value_of[node]].storage for node, _ in fresh}
    for node, desc in [*(pair for pair in roots if pair in nodes), *nodes]:
        storage = values[value_of[node]].storage
        if storage in made and storage not in seen:
            fresh.append((node, desc))
            seen.add(storage)
    return [pair for pair in nodes if pair in fresh]


def _returned(  # noqa: PLR0917
    number: int,
    outputs: Sequence[_Output],
    captured: Captured,
    value_of: Mapping[fx.Node, int],
    values: Sequence[Value],
    base_of: Mapping[int, int],
    own: AbstractSet[int],
) -> Returned:
    """Return how an output of the model is made. `own`: the values that the step itself writes for the caller."""
    node, _ = outputs[number]
    if not isinstance(node, fx.Node):
        return Returned(kind=ReturnKind.CONSTANT, constant=node)
    value, view, differentiable = value_of[node], captured.views[number], captured.differentiable[number]
    base = value if value in own else base_of[values[value].storage]
    if differentiable and values[value].dtype != values[base].dtype:
        what = f"it returns a {values[value].dtype} view of a {values[base].dtype} tensor that requires a gradient"
        raise UnsupportedGraph(node.name, what, "return a copy of it (.clone())", see="views")
    of = view.of
    if of is not None:
        whole = value_of[outputs[of][0]]
        apart = values[whole].storage != values[value].storage or (value in own and value != whole)
        # The gradient of a result that the step computes from is not known outside: its views add nothing to it either.
        cut = differentiable and (captured.views[of].used or not captured.differentiable[of])
        of = None if apart or cut else of
    return Returned(
        kind=ReturnKind.FRESH if base == value and differentiable and of is None else ReturnKind.ALIAS,
        value=value,
        of=base,
        view_of=of,
        detached=view.detached,
        differentiable=differentiable,
    )


def _key(desc: Any) -> tuple[Source, str, int]:
    """Return the source, name and index of the binding that a descriptor stands for."""
    if isinstance(desc, ParamAOTInput):
        return Source.PARAMETER, desc.target, 0
    if isinstance(desc, BufferAOTInput):
        return Source.BUFFER, desc.target, 0
    return Source.INPUT, "", desc.idx
