"""Chains of ops that treat the rows of a tensor independently, found around every softmax of a functional graph.

A tensor of `n` rows is any tensor whose elements, in order, fall into `n` equal runs: the row is what an op keeps to.
Listed are ops whose kernels give a row the same bits whatever other rows they are given. Pointwise kernels of
transcendental functions do not: the last elements of a call go through scalar code. Matrix products do not either:
they are divided only on demand (`sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import fx

from memplan.trace.returns import is_backward
from memplan.trace.rewrite import aten, storage_key, value

VIEWS = {aten.view.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default}
COPIES = {aten.clone.default, aten._to_copy.default}
# Correctly rounded (IEEE 754), so that vector and scalar code agree.
_POINTWISE = {
    *(aten.mul.Tensor, aten.div.Tensor, aten.sub.Tensor, aten.add.Tensor, aten.neg.default, aten.abs.default),
    *(aten.mul.Scalar, aten.div.Scalar, aten.relu.default, aten.where.self, aten.maximum.default, aten.minimum.default),
    *(aten.threshold_backward.default, aten.masked_fill.Scalar, aten.gt.Scalar, aten.lt.Scalar, aten.eq.Scalar),
    *(aten.ge.Scalar, aten.le.Scalar, aten.ne.Scalar),
}
_SOFTMAX = {aten._softmax.default, aten._log_softmax.default}
_SOFTMAX_BACKWARD = {aten._softmax_backward_data.default, aten._log_softmax_backward_data.default}
NLL, NLL_BACKWARD = aten.nll_loss_forward.default, aten.nll_loss_backward.default
SLICE, SLICE_BACKWARD, TRANSPOSE = aten.slice.Tensor, aten.slice_backward.default, aten.t.default
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}  # and which argument has the rows
SUM = aten.sum.dim_IntList


Box = tuple[int, int]  # rows from, to


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Nodes (in graph order) that can run block by block of `n` rows. `lead`: dimensions that make up the rows of
    what is not contiguous; a block must be a box of them. `need`: bytes of the hungriest node. `sums`: with matrix
    products."""

    nodes: tuple[fx.Node, ...]
    n: int
    lead: tuple[int, ...]
    need: int
    sums: bool


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one op: which operands come by rows, and whether its result does."""

    rows: tuple[fx.Node, ...]
    result: bool = True


def chains(graph: fx.Graph, fits: Callable[[Chain], bool], *, sums: bool) -> list[Chain]:
    """The maximal chains around the softmaxes of `graph` that `fits` accepts, disjoint, in graph order.

    `sums`: see `Division`; a chain that does not fit with its matrix products may fit without.
    """
    found: list[Chain] = []
    taken: set[fx.Node] = set()
    place = {node: i for i, node in enumerate(graph.nodes)}
    for seed in graph.nodes:
        if seed.target in _SOFTMAX | _SOFTMAX_BACKWARD and seed not in taken:
            tried = (_grown(seed, place, sums=True), _grown(seed, place, sums=False))[not sums :]
            new = (c for c in tried if c is not None and c.n > 1 and not taken & set(c.nodes))
            chain = next(filter(fits, new), None)
            if chain is not None:
                found.append(chain)
                taken.update(chain.nodes)
    return found


def boxes(chain: Chain, blocks: int) -> list[Box]:
    """Near-equal ranges of rows, each a box of `chain.lead`: whole outer dimensions, or a part of one of them."""
    outer, inner = chain.lead[0], prod(chain.lead[1:])
    if blocks <= outer:
        return [(a * inner, b * inner) for a, b in _ranges(outer, blocks)]
    each = min(-(-blocks // outer), inner)
    return [(o * inner + a, o * inner + b) for o in range(outer) for a, b in _ranges(inner, each)]


def _ranges(n: int, blocks: int) -> list[Box]:
    cuts = [n * i // blocks for i in range(blocks + 1)]
    return list(pairwise(cuts))


def block_shape(shape: torch.Size, n: int, rows: int) -> list[int]:
    """The shape of `rows` of the `n` rows of a tensor: leading dimensions merged until they hold them."""
    for d in range(1, len(shape) + 1):
        if prod(shape[:d]) % n == 0:
            return [prod(shape[:d]) // n * rows, *shape[d:]]
    raise AssertionError(f"a tensor of shape {list(shape)} has no {n} rows")


def parts(node: fx.Node, n: int, *, sums: bool) -> Parts | None:
    """How `node` takes part in a chain of `n` rows; None: it does not."""
    if node.op != "call_function" or not _plain(node):
        return None
    args, target = node.args, node.target
    tensors = tuple(a for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor))
    if target in VIEWS:
        return _if(_by_rows(node, n) and _by_rows(tensors[0], n), tensors)
    if target in COPIES:
        rows = _has_rows(tensors[0], n) or _has_lead(tensors[0], n)
        return _if(rows and _by_rows(node, n) and value(node).device == value(tensors[0]).device, tensors)
    if target in _POINTWISE:
        return _pointwise(node, n, tensors)
    if target in _SOFTMAX | _SOFTMAX_BACKWARD:
        dim, rank = args[1 if target in _SOFTMAX else 2], value(node).dim()
        last = dim in (-1, rank - 1) and rank > 1 and value(node).shape[:-1].numel() % n == 0
        return _if(last and all(_by_rows(t, n) for t in (node, *tensors)), tensors)
    if target is NLL or target is NLL_BACKWARD:
        return _loss(node, n)
    return _at_the_end(node, n, sums=sums)


def _loss(node: fx.Node, n: int) -> Parts | None:
    """Without weights, over rows of classes."""
    shift = 0 if node.target is NLL else 1
    x, target, weight, reduction = node.args[shift : shift + 4]
    fits = weight is None and reduction in (1, 2) and value(x).dim() == 2  # type: ignore[arg-type]
    by_rows = fits and _by_rows(x, n) and _by_rows(target, n)  # type: ignore[arg-type]
    return _if(by_rows, (x, target), result=node.target is NLL_BACKWARD)  # type: ignore[arg-type]


def _at_the_end(node: fx.Node, n: int, *, sums: bool) -> Parts | None:
    """What cuts rows off and pads them again; with `sums`, products and sums over rows."""
    args, target = node.args, node.target
    if target is SLICE_BACKWARD:
        grad, sizes, dim, _, _, step = args
        if sums:
            return _if(dim >= 1 and sizes[0] == n and _by_rows(grad, n), (grad,))  # type: ignore[arg-type, operator, index]
        return _if(step == 1 and _has_lead(grad, n), (grad,), result=False)  # type: ignore[arg-type]
    if not sums:
        return None
    if target is SLICE:
        x, dim = args[0], args[1] if len(args) > 1 else 0
        return _if(dim >= 1 and value(x).shape[0] == n and _by_rows(x, n), (x,))  # type: ignore[arg-type, operator]
    if target is TRANSPOSE:
        return _if(_by_rows(args[0], n) and value(args[0]).shape[0] % n == 0, (args[0],), result=False)  # type: ignore[arg-type]
    if target is SUM:
        fits = args[1] == [0] and not node.kwargs and value(args[0]).shape[0] % n == 0  # type: ignore[arg-type]
        return _if(fits and _by_rows(args[0], n), (args[0],), result=False)  # type: ignore[arg-type]
    if target in PRODUCTS and (len(args) == 2 + PRODUCTS[target] and not node.kwargs):
        x, y = args[-2:]
        if x.target is TRANSPOSE and parts(x, n, sums=True) and _by_rows(y, n):  # type: ignore[union-attr, arg-type]
            whole = target is aten.mm.default and value(y).shape[0] % n == 0  # type: ignore[arg-type]
            return _if(whole, (x, y), result=False)  # type: ignore[arg-type]
        return _if(_by_rows(x, n) and _by_rows(node, n) and value(x).shape[0] % n == 0, (x,))  # type: ignore[arg-type]
    return None


def _pointwise(node: fx.Node, n: int, tensors: tuple[fx.Node, ...]) -> Parts | None:
    """Operands of the result's shape come by rows; numbers come whole."""
    if (len(node.args) > 2 and node.target in (aten.add.Tensor, aten.sub.Tensor)) or node.kwargs:
        return None  # alpha: a product and a sum, which vector code may round once
    rows = tuple(t for t in tensors if value(t).shape == value(node).shape)
    others = [t for t in tensors if t not in rows]
    fits = rows and all(value(t).dim() == 0 for t in others)
    return _if(bool(fits) and _by_rows(node, n) and all(_has_rows(t, n) for t in rows), rows)


def _if(holds: Any, rows: tuple[fx.Node, ...], *, result: bool = True) -> Parts | None:
    return Parts(rows, result) if holds else None


def _plain(node: fx.Node) -> bool:
    """Whether everything that it takes and gives is a dense tensor, or no tensor."""
    given = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    flat = [t for v in given for t in (v if isinstance(v, (tuple, list)) else (v,))]
    return all(t is None or isinstance(t, (torch.Tensor, int, float)) for t in flat) and all(
        t.layout is torch.strided and t.numel() for t in flat if isinstance(t, torch.Tensor)
    )


def _by_rows(node: fx.Node, n: int) -> bool:
    return isinstance(node, fx.Node) and bool(value(node).is_contiguous() and value(node).numel() % n == 0)


def _has_rows(node: fx.Node, n: int) -> bool:
    return _by_rows(node, n) or value(node).shape[:1] == (n,)


def _has_lead(node: fx.Node, n: int) -> bool:
    shape: torch.Size = value(node).shape
    return len(shape) >= 2 and (shape[0] == n or shape[:2].numel() == n)


def _grown(seed: fx.Node, place: dict[fx.Node, int], *, sums: bool) -> Chain | None:
    n = value(seed).shape[:-1].numel()
    nodes = _trimmed(_reach(seed, n, sums=sums), place)
    if sums:  # a sequence that loses its last token on the way is divided by sequences
        shorter = [
            value(x).shape[0]
            for node in nodes
            for x in (*node.all_input_nodes, *node.users)
            if x.target in (SLICE, SLICE_BACKWARD) and value(x).dim() == 3
        ]
        if shorter and shorter[0] < n:
            n = shorter[0]
            nodes = _trimmed(_reach(seed, n, sums=True), place)
    if seed not in nodes:
        return None
    lead = {lead for node in nodes for lead in _leads(node, n, nodes, sums=sums)}
    if len(lead) > 1:
        return None
    ordered = tuple(sorted(nodes, key=place.__getitem__))
    return Chain(nodes=ordered, n=n, lead=lead.pop() if lead else (n,), need=max(map(_bytes, ordered)), sums=sums)


def _reach(seed: fx.Node, n: int, *, sums: bool) -> set[fx.Node]:
    """All nodes that are joined to the seed by tensors that come by rows; matrix products end a chain."""
    if parts(seed, n, sums=sums) is None:
        return set()
    nodes, todo = {seed}, [seed]
    while todo:
        node = todo.pop()
        own = parts(node, n, sums=sums)
        assert own is not None
        makers = () if node.target in PRODUCTS else [x for x in own.rows if value(x).numel() > n]
        for near in (*makers, *_takers(node, own)):
            found = parts(near, n, sums=sums)
            joined = found and ((near in own.rows and found.result) or node in found.rows)
            if joined and near not in nodes:
                nodes.add(near)
                if near.target not in PRODUCTS or near in own.rows:
                    todo.append(near)
    return nodes


def _trimmed(nodes: set[fx.Node], place: dict[fx.Node, int]) -> set[fx.Node]:
    """Without what cannot run block by block after all.

    That is views whose users want them whole, and in each phase what depends on the chain by way of something else.
    """
    while True:
        out = {x for x in nodes if x.target in VIEWS | {SLICE, TRANSPOSE} and set(x.users) - nodes}
        out |= {user for x in out if x.target is TRANSPOSE for user in x.users}
        for backward in (False, True):
            out |= _detours({n for n in nodes if is_backward(n) is backward}, place)
        if not out & nodes:
            return nodes
        nodes = nodes - out


def _detours(part: set[fx.Node], place: dict[fx.Node, int]) -> set[fx.Node]:
    """Nodes of `part` that need what needs a node of `part` and is not of it."""
    found: set[fx.Node] = set()
    others: set[fx.Node] = set()
    last = max((place[n] for n in part), default=-1)
    todo = sorted({user for n in part for user in n.users} - part, key=place.__getitem__)
    while todo:
        other = todo.pop()
        if other in others or place[other] > last:
            continue
        others.add(other)
        found |= part & set(other.users)
        todo.extend(set(other.users) - part)
    return found


def _takers(node: fx.Node, own: Parts) -> Iterator[fx.Node]:
    if own.result or node.target is TRANSPOSE:
        yield from node.users


def _leads(node: fx.Node, n: int, nodes: set[fx.Node], *, sums: bool) -> Iterator[tuple[int, ...]]:
    """The boxes that it asks for: where it reads something that is not contiguous, or pads rows."""
    own = parts(node, n, sums=sums)
    assert own is not None
    for x in own.rows:
        padded = node.target is SLICE_BACKWARD and not sums
        if padded or (x not in nodes and not _has_rows(x, n)):
            shape = value(x).shape
            yield (n,) if shape[0] == n else tuple(shape[:2])


def _bytes(node: fx.Node) -> int:
    touched = [t for n in (node, *node.all_input_nodes) for t in tensors_of(n)]
    return sum({storage_key(t): t.numel() * t.itemsize for t in touched}.values())


def tensors_of(node: Any) -> list[torch.Tensor]:
    if isinstance(node, (list, tuple)):
        return [t for one in node for t in tensors_of(one)]
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    flat = val if isinstance(val, (tuple, list)) else (val,)
    return [t for t in flat if isinstance(t, torch.Tensor)]
