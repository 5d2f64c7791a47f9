"""Fold constants: what constants alone determine is computed once, when the step is traced.

Examples are masks, position ids, buckets of relative positions and scales: ops that read only numbers written in the
program and draw no random numbers. Their results become constants of the program, where they need no kernel, but bytes
that stay allocated. So only small results are folded; for a larger one, what it is computed from. What the caller is
returned, and what an op writes, stays as it is. So does what depends on a tensor that the model holds: its owner may
change it in place.

Which ops are folded depends on the graph alone, never on numbers: a plan from fake tensors is the same as the real one.
"""

from __future__ import annotations

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import OpOverload

from memplan.devices.kinds import is_available
from memplan.torch_inside.graphs import FakeTensor, unset_fake_temporarily
from memplan.trace.passes.nodes import has_effects, is_fixed, keys_of, span, written_in
from memplan.trace.passes.own_outputs import returned_by
from memplan.trace.passes.rewrite import INHERITED, OWN, aten, replace_by, storage_key, value

SMALL = 64  # bytes of a result that may stay: with what alignment adds, as many as one number takes
FOLDED = "folded"  # in a node's meta: the op that its numbers come from
_WORK = 1 << 20  # bytes of a result that is computed on the way
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LITERAL = aten.lift_fresh_copy.default  # copies a tensor literal, which forward makes in each call


def fold(module: fx.GraphModule) -> None:
    """Replace small results of ops on constants by constants, in place. `module`: a functional graph, before lowering.

    These ops run once, on tensors of at most 1 MiB, if there are numbers to compute with.
    """
    graph = module.graph
    constant = _shared(graph, _constants(graph))
    kept = _kept(constant)
    with unset_fake_temporarily():
        numbers = _numbers(module, constant, kept)
    for node in reversed(constant):
        if node in kept:
            _put(module, node, numbers.get(node, value(node)))
        if not node.users:
            literals = [n for n in node.all_input_nodes if n.op == "get_attr"]
            graph.erase_node(node)
            for literal in literals:
                if not literal.users:
                    graph.erase_node(literal)


def _constants(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that constants alone determine, in order; tensors that the model holds are no constants."""
    bound = keys_of(returned_by(graph)[1]) | written_in(graph)
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        literal = node.target is _LITERAL and node.all_input_nodes[0].op == "get_attr"
        known = literal or all(n in found for n in node.all_input_nodes)
        if known and _is_plain(node) and not keys_of(node) & bound:
            found[node] = None
    return list(found)


def _is_plain(node: fx.Node) -> bool:
    """Return whether a node is an ATen op with one result that its arguments determine, none of which is a symbol."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or has_effects(node):
        return False
    val = node.meta.get("val")
    if node.target.namespace != "aten" or "empty" in node.target._opname or not isinstance(val, torch.Tensor):
        return False
    symbols = any(isinstance(leaf, _SYMBOLIC) for leaf in pytree.tree_leaves((node.args, node.kwargs)))
    return not symbols and is_fixed(val) and span(val) <= _WORK


def _shared(graph: fx.Graph, constant: list[fx.Node]) -> list[fx.Node]:
    """Return the constant nodes that remain when each is computed once."""
    known: dict[str, fx.Node] = {}
    for node in constant:
        first = known.setdefault(str((node.target, node.args, node.kwargs)), node)
        if first is not node:
            replace_by(graph, node, first)
    return list(known.values())


def _kept(constant: list[fx.Node]) -> set[fx.Node]:
    """Return the ops whose results are to stay: small ones that an op reads which is not folded."""
    groups: dict[int, list[fx.Node]] = {}  # by storage: the op that makes it, then views
    for node in constant:
        groups.setdefault(storage_key(value(node)), []).append(node)
    folded, kept = set(constant), set[fx.Node]()
    for base, *views in reversed(groups.values()):
        if any(user not in folded for node in (base, *views) for user in node.users):
            if span(value(base)) <= SMALL:
                kept.add(base)
            else:
                folded -= {base, *views}
    return kept


def _numbers(module: fx.GraphModule, constant: list[fx.Node], kept: set[fx.Node]) -> dict[fx.Node, torch.Tensor]:
    """Return the results of `kept`, laid out as traced, without those that come from a tensor without numbers."""
    needed = set(kept)
    for node in reversed(constant):
        if node in needed:
            needed.update(node.all_input_nodes)
    made: dict[fx.Node, torch.Tensor] = {}
    with torch.no_grad(), torch._C._DisableAutocast():
        for node in constant:
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    made[source] = getattr(module, str(source.target))
            there = is_available(value(node).device.type)
            if node in needed and there and all(_has_numbers(made.get(n)) for n in node.all_input_nodes):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
                made[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return {node: _laid_out(made[node], value(node)) for node in kept if node in made}


def _laid_out(tensor: torch.Tensor, val: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, laid out as `val`."""
    empty = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
    return empty.copy_(tensor)


def _has_numbers(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor holds numbers: it is neither fake nor on the meta device."""
    return tensor is not None and not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _put(module: fx.GraphModule, node: fx.Node, tensor: torch.Tensor) -> None:
    """Replace a node by a constant."""
    name = f"{node.name}_{FOLDED}"
    setattr(module, name, tensor)
    with module.graph.inserting_before(node):
        constant = module.graph.create_node("get_attr", name, name=name)
    constant.meta.update({key: node.meta[key] for key in INHERITED if key in node.meta})
    constant.meta.update({"val": value(node), FOLDED: str(node.target), OWN: True})
    node.replace_all_uses_with(constant)
