"""Read what leaves the step, and how the module's result is made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

from memplan.core.graph import Value
from memplan.errors import UnsupportedGraph
from memplan.trace.capture.joint_graph import Captured
from memplan.trace.passes.own_outputs import returned_by
from memplan.trace.traced import Binding, Results, Returned, ReturnKind, Source

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
    tangents = {n.meta["desc"].output: value_of[n] for n in graph.nodes if _is_tangent(n)}
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


def _is_tangent(node: fx.Node) -> bool:
    """Return whether a node is a tangent: a gradient that comes in."""
    return node.op == "placeholder" and isinstance(node.meta["desc"], TangentAOTInput)
