"""Makes a graph that was traced with DTensors one of this rank's parts, and its collectives ops of a plan.

AOTAutograd gives each DTensor two inputs, the part and the mesh, and writes torch's functional collectives between
the ops that compute with parts: one op that starts a collective, and one that waits for it. They become one op, which a
plan may divide again. A gradient that torch's optimizer would sum over the ranks is summed as soon as it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from memplan.distributed.local import PlacedParameter
from memplan.errors import UnsupportedGraph
from memplan.torch_inside.graphs import (
    GradAOTOutput,
    ParamAOTInput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from memplan.trace.capture.origins import origin_of, place_of
from memplan.trace.passes.own_outputs import after_last, returned_by
from memplan.trace.passes.rewrite import Rewriter, aten, fake_mode_of, replace_by, value

_PART = "_local_tensor"  # the attribute of a DTensor; all others are no tensors
_ops = torch.ops.memplan_distributed
_SEE = "ranks-refused"


def with_parts(joint: Any, placed: Mapping[str, PlacedParameter]) -> None:
    """Change AOTAutograd's result to a graph of this rank's parts of the parameters.

    Raises `UnsupportedGraph` for DTensors that are no parameters, and collectives that a plan cannot have.
    """
    graph = joint.graph_module.graph
    found = dict(_placements_of_gradients(joint))
    join_collectives(graph)
    output, results, descs = returned_by(graph)
    kept = []
    for i, (node, desc) in enumerate(zip(results, descs, strict=True)):
        if not isinstance(desc, SubclassGetAttrAOTOutput):
            kept.append((node, desc))
            continue
        base = desc.base
        if not isinstance(base, GradAOTOutput) or not isinstance(base.grad_of, ParamAOTInput):
            what = "a result is a DTensor, of which each rank has a part"
            hint = "return what .full_tensor() or .to_local() makes of it"
            raise UnsupportedGraph("the step", what, hint, see=_SEE)
        if desc.attr == _PART:
            kept.append((_as_placed(graph, node, found.get(i), placed[base.grad_of.target]), base))
    output.args = (tuple(node for node, _ in kept),)
    output.meta["desc"] = [desc for _, desc in kept]
    for node in list(graph.find_nodes(op="placeholder")):
        desc = node.meta["desc"]
        if not isinstance(desc, SubclassGetAttrAOTInput):
            continue
        if not isinstance(desc.base, ParamAOTInput):
            what = "an input is a DTensor, of which each rank has a part"
            raise UnsupportedGraph(place_of(node), what, "pass this rank's part (.to_local())", see=_SEE)
        if desc.attr == _PART:
            node.meta["desc"] = desc.base
        else:
            graph.erase_node(node)


def join_collectives(graph: fx.Graph) -> None:
    """Replace each of torch's functional collectives, with the wait for it, by one op of memplan."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    for node in list(graph.nodes):
        target = _OF_TORCHS.get(node.target) if node.op == "call_function" else None
        if target is None:
            continue
        given, *others = node.args
        rw = Rewriter(graph, fake_mode_of(graph), node)
        if not value(given).is_contiguous():
            given = rw.call(aten.clone.default, given, memory_format=torch.contiguous_format)
        module = origin_of(node).module.replace(".", "_")
        rw.label = "_".join(filter(None, (target._opname, module)))
        made = rw.call(target, given, *others[:-1], _name_of(graph, others[-1]))
        for user in list(node.users):
            if user.target is wait:
                replace_by(graph, user, made)
        if not node.users:
            graph.erase_node(node)


def _name_of(graph: fx.Graph, group: Any) -> str:
    """Return the name of the process group that a collective has among its arguments."""
    if isinstance(group, fx.Node):
        group = getattr(graph.owning_module, str(group.target)) if group.op == "get_attr" else value(group)
    return str(getattr(group, "group_name", group))


def _placements_of_gradients(joint: Any) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield the position of each returned part of a gradient, and how torch has placed that gradient."""
    about = joint._aot_graph_capture.maybe_subclass_meta
    metas = list(getattr(about, "grad_input_metas", None) or ())
    sizes = [getattr(meta, "arg_count", 1) for meta in metas]
    _, results, _ = returned_by(joint.graph_module.graph)
    at = len(results) - sum(sizes)  # gradients come last
    for meta, size in zip(metas, sizes, strict=True):
        if hasattr(meta, "meta"):  # of a subclass; from torch 2.14 on, a plain tensor has a count too
            yield at, tuple(getattr(meta.meta[0], "placements", meta.meta[0]))  # torch 2.11 has a DTensorSpec there
        at += size


def _as_placed(
    graph: fx.Graph, gradient: Any, placements: tuple[Any, ...] | None, parameter: PlacedParameter
) -> fx.Node | None:
    """Return a gradient that is placed as its parameter is."""
    if not isinstance(gradient, fx.Node) or placements == parameter.placements:
        return gradient if isinstance(gradient, fx.Node) else None
    (placement,) = placements or (None,)
    rw = Rewriter(graph, fake_mode_of(graph), gradient, before=after_last(graph, [gradient]))
    rw.phase = "is_backward"
    if placement is not None and placement.is_replicate() and parameter.dim is not None:
        end = parameter.start + parameter.local[parameter.dim]
        return rw.call(aten.slice.Tensor, gradient, parameter.dim, parameter.start, end)
    summed = placement is not None and placement.is_partial() and placement.reduce_op == "sum"
    if not summed or parameter.dim is not None:
        what = f"its gradient is placed as {placements}, and it as {parameter.placements}"
        hint = "place the parameter as its gradient, or train without memplan"
        raise UnsupportedGraph(parameter.name, what, hint, see=_SEE)
    if not value(gradient).is_contiguous():
        gradient = rw.call(aten.clone.default, gradient, memory_format=torch.contiguous_format)
    rw.label = f"reduce_{parameter.name.replace('.', '_')}"
    return rw.call(_ops.all_reduce.default, gradient, "sum", parameter.group)


def _of_torchs() -> dict[Any, Any]:
    """Return the op of memplan for each of torch's functional collectives that a plan can have."""
    torchs = torch.ops._c10d_functional
    return {
        torchs.all_reduce.default: _ops.all_reduce.default,
        torchs.all_gather_into_tensor.default: _ops.all_gather.default,
        torchs.reduce_scatter_tensor.default: _ops.reduce_scatter.default,
    }


_OF_TORCHS = _of_torchs()
