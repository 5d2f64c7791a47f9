"""Ops without results, which change nothing: those that only raise, and one that only allocates.

`torch.linalg.inv` and similar functions check the error code of their kernel by one that raises.

AOTAutograd orders these ops by tokens, which they take and return. Here they become ordinary ops without results. The
module of legal orders says which ops have to wait for them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import GradAOTOutput
from torch._higher_order_ops.effects import with_effects
from torch._ops import OpOverload

from memplan.trace.passes.rewrite import INHERITED, aten

_library: Any = torch.library.Library("memplan_update", "DEF")  # type: ignore[no-untyped-call]
_library.define("allocate(Tensor[] gradients, int nbytes) -> ()")
ALLOCATE = torch.ops.memplan_update.allocate.default
CHECKS = frozenset({aten._linalg_check_errors.default, ALLOCATE})


def _allocate(gradients: list[torch.Tensor], nbytes: int) -> None:
    """Allocate bytes, and free them: where they would be too many, the step fails here, before the update."""
    torch.empty(nbytes, dtype=torch.uint8, device=gradients[0].device)


_library.impl("allocate", _allocate, "CompositeExplicitAutograd")


def is_check(target: Any) -> bool:
    """Return whether an op returns nothing and changes nothing: it runs only to raise, or to allocate."""
    return target in CHECKS


def allocate_at_end(graph: fx.Graph, nbytes: int) -> None:
    """Add an op that allocates as many bytes as an optimizer will, while all gradients are there; they then count."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    pairs = zip(output.args[0], output.meta["desc"], strict=True)
    gradients = [n for n, d in pairs if isinstance(d, GradAOTOutput) and isinstance(n, fx.Node)]
    if gradients and nbytes:
        with graph.inserting_before(output):
            call = graph.call_function(ALLOCATE, (gradients, nbytes))
        call.meta.update(val=None, partitioner_tag="is_backward")


def order_checks(graph: fx.Graph) -> None:
    """Call checks directly instead of through tokens, in place, and erase tokens that nothing needs any more."""
    for node in list(graph.find_nodes(op="call_function", target=with_effects)):
        token, check, *args = node.args
        if not is_check(check):
            continue
        assert isinstance(check, OpOverload)
        with graph.inserting_before(node):
            call = graph.create_node("call_function", check, tuple(args), dict(node.kwargs), name=f"{node.name}_check")
        call.meta.update({key: node.meta[key] for key in INHERITED if key in node.meta}, val=None)
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(token)
            graph.erase_node(user)
        graph.erase_node(node)
    _drop_tokens(graph)


def _drop_tokens(graph: fx.Graph) -> None:
    """Erase tokens that are only passed through."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    idle = {n for n in graph.nodes if n.op == "placeholder" and _is_token(n.meta["desc"]) and {*n.users} <= {output}}
    results: Any = output.args[0]
    descs = output.meta["desc"]
    kept = [(n, d) for n, d in zip(results, descs, strict=True) if not (isinstance(n, fx.Node) and n in idle)]
    output.args = (tuple(n for n, _ in kept),)
    output.meta["desc"] = [d for _, d in kept]
    for token in idle:
        graph.erase_node(token)


def _is_token(desc: Any) -> bool:
    """Return whether a descriptor is of a token."""
    return "Token" in type(desc).__name__
