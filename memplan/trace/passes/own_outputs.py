"""Give every gradient and write-back that leaves the graph bytes of its own.

AOTAutograd returns aliases freely (the gradient of a bias may *be* the tangent; two gradients may be one tensor).
Autograd may keep a gradient as `.grad` without copying, so two that share bytes would be silently wrong later. Here
each returned tensor that does not own its bytes becomes an explicit copy, and each mutated input an explicit `copy_` at
the end of the forward. These are ordinary ops, planned like all others.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memplan.errors import UnsupportedGraph
from memplan.torch_inside.graphs import (
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTOutput,
)
from memplan.trace.passes.nodes import is_check, is_fixed, keys_of, may_overlap, written_in
from memplan.trace.passes.rewrite import MEMORY_ONLY, Rewriter, aten, fake_mode_of, storage_key, value

_PIECES = (
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int),
    *(aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default),
)


def own_outputs(graph: fx.Graph, *, copy_gradients: bool = False) -> None:
    """Insert copies so that what is returned shares no bytes with anything else that outlives the step.

    A gradient is copied if it aliases an input, an output or another gradient, or if it was made in the forward; an
    output with a tangent is copied as `_with_separate_outputs` says. `copy_gradients`: every gradient of a parameter is
    copied as soon as it is complete, so that a program can add it to a `.grad` there instead.
    """
    _zero_unwritten(graph)
    output, results, descs = returned_by(graph)
    mode = fake_mode_of(graph)
    tangents = {n.meta["desc"].output for n in graph.nodes if n.op == "placeholder" and n.meta["desc"].is_tangent()}
    boundary = _first_backward(graph) or output
    results = _with_separate_outputs(graph, results, [desc in tangents for desc in descs], boundary)
    lasting = [n for n in graph.nodes if _is_tensor(n) and (n.op != "call_function" or not is_backward(n))]
    taken = {storage_key(value(n)) for n in lasting}
    for i, (node, desc) in enumerate(zip(results, descs, strict=True)):
        if isinstance(desc, GradAOTOutput) and isinstance(node, fx.Node):
            if copy_gradients and isinstance(desc.grad_of, ParamAOTInput):
                complete = after_last(graph, touching(graph, node))
                results[i] = _copied(Rewriter(graph, mode, node, before=complete), "is_backward")
            elif storage_key(value(node)) in taken:
                results[i] = _copied(Rewriter(graph, mode, node, before=output), "is_backward")
            taken.add(storage_key(value(results[i])))
    output.args = (tuple(results),)


def _with_separate_outputs(
    graph: fx.Graph, results: Sequence[Any], with_tangent: Sequence[bool], boundary: fx.Node
) -> list[Any]:
    """Return `results` with copies of those outputs with a tangent that share bytes with an input or with one another.

    Pieces of one tensor (`_PIECES`) share no element: they stay in its bytes, with eager's strides. An input belongs to
    the caller: it is copied as a whole, and its outputs become views of the copy.
    """
    mode, found = fake_mode_of(graph), list(results)
    given = [n for n in graph.find_nodes(op="placeholder") if _is_tensor(n) and not n.meta["desc"].is_tangent()]
    placeholders = {storage_key(value(n)): n for n in reversed(given)}
    first: dict[int, fx.Node] = {}  # storage -> the first output in it
    copies: dict[fx.Node, fx.Node] = {}  # input -> its copy
    for i, node in enumerate(results):
        if not with_tangent[i]:
            continue
        key = storage_key(value(node))
        rewriter = Rewriter(graph, mode, node, before=boundary)
        if key in placeholders and _fills_its_bytes(value(placeholders[key])):
            base = placeholders[key]
            if base not in copies:
                copies[base] = _copied(Rewriter(graph, mode, base, before=boundary), "is_forward")
            found[i] = _same_view(rewriter, base, copies[base])
        elif key in placeholders or (key in first and not _are_pieces(first[key], node)):
            found[i] = _copied(rewriter, "is_forward")
        first.setdefault(key, node)
    return found


def _fills_its_bytes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements neither overlap nor have gaps, so that memory like it has the same strides."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return is_fixed(tensor) and extent == tensor.numel() and not may_overlap(tensor.shape, tensor.stride())


def _same_view(rewriter: Rewriter, base: fx.Node, copy: fx.Node) -> fx.Node:
    """Return the rewriter's node, a view of `base`, as a view of a `copy` with the strides of `base`."""
    v, start = value(rewriter.node), value(base).storage_offset()
    view = rewriter.call(aten.as_strided.default, copy, list(v.shape), list(v.stride()), v.storage_offset() - start)
    view.meta["partitioner_tag"] = "is_forward"
    return view


def _are_pieces(one: fx.Node, two: fx.Node) -> bool:
    """Return whether both nodes are pieces that one op cuts a tensor into, which share no element."""
    if one is two or one.target is not operator.getitem or two.target is not operator.getitem:
        return False
    whole = one.args[0]
    return whole is two.args[0] and isinstance(whole, fx.Node) and whole.target in _PIECES


def _zero_unwritten(graph: fx.Graph) -> None:
    """Fill returned memory that nothing writes (`torch.empty`) with zeros, so that an op makes it."""
    returned = keys_of([n for n in returned_by(graph)[1] if isinstance(n, fx.Node)])
    bare = returned - written_in(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in MEMORY_ONLY and not bare.isdisjoint(keys_of(node)):
            write = Rewriter(graph, fake_mode_of(graph), node, before=node.next).call(aten.zero_.default, node)
            write.meta["partitioner_tag"] = "is_forward"


def _copied(rewriter: Rewriter, phase: str) -> fx.Node:
    """Return a copy of the rewriter's node in dense memory of its own."""
    v = value(rewriter.node)
    with rewriter.mode:
        dense = v if _fills_its_bytes(v) else torch.empty_like(v)  # contiguous for an expanded tensor
    copy = rewriter.scratch(dense)
    write = rewriter.call(aten.copy_.default, copy, rewriter.node)
    copy.meta["partitioner_tag"] = write.meta["partitioner_tag"] = phase
    return copy


def tangents_needed(graph: fx.Graph) -> dict[Any, frozenset[int]]:
    """Return, for each gradient (by descriptor), the tangents (numbered in order) that it depends on.

    They are read off the functional graph, before any pass. If none of them arrives, the gradient is None.
    """
    needs: dict[fx.Node, frozenset[int]] = {}
    count = 0
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["desc"].is_tangent():
            needs[node] = frozenset({count})
            count += 1
        else:
            needs[node] = frozenset().union(*(needs[n] for n in node.all_input_nodes))
    _, results, descs = returned_by(graph)
    pairs = zip(results, descs, strict=True)
    return {d: needs[n] for n, d in pairs if isinstance(d, GradAOTOutput) and isinstance(n, fx.Node)}


def return_new_values(graph: fx.Graph) -> None:
    """Return the new values of inputs that the forward changes, in place of the `copy_` ops at the end of the graph.

    AOTAutograd tags those of the backward, where there is one. They stay ops. Without a backward, a changed input that
    is a result is returned as such an op.
    """
    output, results, descs = returned_by(graph)
    training = any(n.meta["desc"].is_tangent() for n in graph.find_nodes(op="placeholder"))
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, new = write.args
        late = (training and is_backward(write)) or target.meta["desc"].is_tangent()
        if not late and write.users.keys() <= {output}:
            results = [new if result is write else result for result in results]
            results.insert(0, new)
            descs.insert(0, InputMutationAOTOutput(target.meta["desc"]))
            output.args = (tuple(results),)
            graph.erase_node(write)
    output.meta["desc"] = descs


def write_back_mutations(graph: fx.Graph, alias_of: Sequence[int | None], *, at_once: bool = False) -> None:
    """Turn the returned new values of mutated inputs into `copy_` ops at the end of the forward.

    A result that eager returns as (a view of) a mutated input is returned as that again. `alias_of` gives, for each
    leaf of the result, the position of the placeholder that it is a view of. `at_once`: inputs are written as soon as
    nothing reads their old values, so that the new ones (running statistics of batch norms) live no longer.
    """
    output, results, descs = returned_by(graph)
    inputs = {n.meta["desc"]: n for n in graph.nodes if n.op == "placeholder"}
    mutations = [
        (inputs[desc.mutated_input], node)
        for node, desc in zip(results, descs, strict=True)
        if isinstance(desc, InputMutationAOTOutput)
    ]
    kept = [(n, d) for n, d in zip(results, descs, strict=True) if not isinstance(d, InputMutationAOTOutput)]
    output.args = (tuple(n for n, _ in kept),)
    output.meta["desc"] = [d for _, d in kept]
    boundary = _first_backward(graph) or output
    nodes = list(graph.nodes)
    backward = frozenset(nodes[nodes.index(boundary) :])
    aliases = _by_storage(nodes)
    for target, new in mutations:
        if value(target).shape != value(new).shape or value(target).dtype != value(new).dtype:
            raise UnsupportedGraph(
                target.name, "an input is resized in place", "write to a tensor of the final shape", see="resized-input"
            )
        if is_fixed(value(target)) and may_overlap(value(target).shape, value(target).stride()):
            what = "an input whose elements share bytes (expand, unfold) is changed in place"
            raise UnsupportedGraph(target.name, what, "pass a dense copy of it (.contiguous())", see="resized-input")
        if new in backward and is_backward(new):
            what = "an input is changed in place, through autograd, in forward and backward"
            raise UnsupportedGraph(target.name, what, "change it under torch.no_grad()", see="old-value")
        old = aliases[storage_key(value(target))]
        again = [u for u in target.users if u in backward and u.target is aten.copy_.default and u.args[0] is target]
        _refuse_old_value(target, old, backward.difference(again))
        before = _free_from(old, new, boundary) if at_once else boundary
        rewriter = Rewriter(graph, fake_mode_of(graph), new, before=before)
        write = rewriter.call(aten.copy_.default, target, new)
        write.meta["partitioner_tag"] = "is_forward"
        if again:
            _read_again(target, new, aliases[storage_key(value(new))], backward, boundary)
    late = [n.args[0] for n in backward if n.target is aten.copy_.default]
    _return_inputs(graph, {**dict.fromkeys(late), **dict(mutations)}, alias_of)


def _read_again(
    target: fx.Node, new: fx.Node, aliases: Iterable[fx.Node], backward: Collection[fx.Node], boundary: fx.Node
) -> None:
    """Let the backward, which writes `target` too, read it instead of what the forward wrote there, `new`.

    Eager reads what is there by then: another forward, or another backward, may have written it.
    """
    for node in aliases:
        late = [user for user in node.users if user in backward and user.op != "output"]
        if not late or node in backward:
            continue
        rewriter = Rewriter(target.graph, fake_mode_of(target.graph), node, before=boundary)
        now = target if node is new else _same_view(rewriter, new, target)
        for user in late:
            user.replace_input_with(node, now)


def _by_storage(nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    """Return the nodes that are one tensor, by its storage."""
    found = defaultdict[int, list[fx.Node]](list)
    for node in nodes:
        if _is_tensor(node):
            found[storage_key(value(node))].append(node)
    return found


def _free_from(old: Iterable[fx.Node], new: fx.Node, boundary: fx.Node) -> fx.Node:
    """Return the first node before which an input can be set to a new value: nothing reads the `old` one from there on.

    `old` are the input and its aliases. At the latest that is `boundary`, the end of the forward. No check comes after
    it. Another op that raises in between leaves what eager leaves.
    """
    used = {new, *old, *(user for node in old for user in node.users)}
    found = boundary
    while found.prev.op not in {"root", "placeholder"} and found.prev not in used and not is_check(found.prev.target):
        found = found.prev
    return found


def _return_inputs(graph: fx.Graph, mutated: Mapping[Any, Any], alias_of: Sequence[int | None]) -> None:
    """Return mutated inputs (with their new values), and views of them, as what they are instead."""
    output, results, descs = returned_by(graph)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for i, (node, desc) in enumerate(zip(results, descs, strict=True)):
        base = alias_of[desc.idx] if isinstance(desc, PlainAOTOutput) else None
        if base is None or placeholders[base] not in mutated or node is placeholders[base]:
            continue
        if mutated[placeholders[base]] is node:
            results[i] = placeholders[base]
        else:
            v = value(node)
            rewriter = Rewriter(graph, fake_mode_of(graph), node, before=output)
            where = (list(v.shape), list(v.stride()), v.storage_offset())
            results[i] = rewriter.call(aten.as_strided.default, placeholders[base], *where)
    output.args = (tuple(results),)


def _refuse_old_value(target: fx.Node, old: Iterable[fx.Node], backward: Collection[fx.Node]) -> None:
    """Raise `UnsupportedGraph` if the backward reads the old value of a changed input, `old` with its aliases.

    Eager autograd refuses this too: "modified by an inplace operation".
    """
    late = next((user for node in old for user in node.users if user in backward and user.op != "output"), None)
    if late is not None:
        name = getattr(target.meta["desc"], "target", target.name)
        reason = f"{name} is changed in place, but its old value is needed for a gradient (by {late.name})"
        raise UnsupportedGraph(target.name, reason, "change a copy, or do it after the backward", see="old-value")


def returned_by(graph: fx.Graph) -> tuple[fx.Node, list[Any], list[Any]]:
    """Return the output node, what it returns, and a descriptor for each of these."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    results: Any = output.args[0]
    return output, list(results), list(output.meta["desc"])


def is_backward(node: fx.Node) -> bool:
    """Return whether a node belongs to the backward (as tagged by AOTAutograd)."""
    return node.meta.get("partitioner_tag") in {"is_backward", "must_be_in_backward"}


def tag_backward(graph: fx.Graph) -> None:
    """Tag the nodes of the backward that AOTAutograd left untagged (the ops of a user's `torch.autograd.Function`).

    AOTAutograd tags all that it has traced when the forward ends. What comes after that is the backward, whatever it
    reads: a buffer's old value depends on no gradient that comes in.
    """
    if not any(n.meta["desc"].is_tangent() for n in graph.find_nodes(op="placeholder")):
        return
    for node in reversed(graph.nodes):
        if node.meta.get("partitioner_tag") == "is_forward":
            break
        if node.op == "call_function" and node.meta.get("partitioner_tag") is None:
            node.meta["partitioner_tag"] = "is_backward"


def touching(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Return the node, its aliases, and everything that reads or writes one of them."""
    key = storage_key(value(node))
    aliases = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor) and storage_key(value(n)) == key]
    return aliases + [user for alias in aliases for user in alias.users if user.op != "output"]


def after_last(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    """Return the node before which a node can be inserted so that it comes after all of `nodes`."""
    wanted = set(nodes)
    last = next(n for n in reversed(graph.nodes) if n in wanted)
    following: fx.Node = last.next
    while following.op != "output" and not (following.op == "call_function" and is_backward(following)):
        following = following.next
    return following


def _first_backward(graph: fx.Graph) -> fx.Node | None:
    """Return the first op of the backward, or None."""
    return next((n for n in graph.nodes if n.op == "call_function" and is_backward(n)), None)


def _is_tensor(node: fx.Node) -> bool:
    """Return whether a node is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)
