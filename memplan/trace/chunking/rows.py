"""The ops that treat the rows of a tensor independently, and the chains of them around every softmax of a functional
graph.

A tensor of `n` rows is any tensor whose elements, in order, fall into `n` equal runs: a row is what an op does not
cross. The ops listed here have kernels that give a row the same bits whatever other rows they process. Pointwise
kernels of transcendental functions do not: the last elements of a call go through scalar code. Matrix products do not
either: only Inductor's are divided (`fused/row_division.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import fx

from memplan.trace.passes.nodes import tensors_of
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import VIEWS, aten, storage_key, value

COPIES = {aten.clone.default, aten._to_copy.default}
# Correctly rounded (IEEE 754), so that vector and scalar code agree.
_POINTWISE = {
    *(aten.mul.Tensor, aten.div.Tensor, aten.sub.Tensor, aten.add.Tensor, aten.neg.default, aten.abs.default),
    *(aten.mul.Scalar, aten.div.Scalar, aten.relu.default, aten.where.self, aten.maximum.default, aten.minimum.default),
    *(aten.threshold_backward.default, aten.masked_fill.Scalar, aten.gt.Scalar, aten.lt.Scalar, aten.eq.Scalar),
    *(aten.ge.Scalar, aten.le.Scalar, aten.ne.Scalar),
}
SOFTMAX = {aten._softmax.default, aten._log_softmax.default}
SOFTMAX_BACKWARD = {aten._softmax_backward_data.default, aten._log_softmax_backward_data.default}
NLL, NLL_BACKWARD = aten.nll_loss_forward.default, aten.nll_loss_backward.default
SLICE, SLICE_BACKWARD = aten.slice.Tensor, aten.slice_backward.default


@dataclass(frozen=True, slots=True)
class Parts:
    """The part of one op in a chain: which operands come by rows, and whether its result does."""

    rows: tuple[fx.Node, ...]
    result: bool = True


def block_shape(shape: torch.Size, n: int, rows: int) -> list[int]:
    """Return the shape of `rows` of the `n` rows of a tensor: leading dimensions are merged until they hold them."""
    for d in range(1, len(shape) + 1):
        if prod(shape[:d]) % n == 0:
            return [prod(shape[:d]) // n * rows, *shape[d:]]
    raise AssertionError(f"a tensor of shape {list(shape)} has no {n} rows")


def parts(node: fx.Node, n: int) -> Parts | None:
    """Return how `node` takes part in a chain of `n` rows; None if it does not."""
    if node.op != "call_function" or not _is_dense_strided(node):
        return None
    args, target = node.args, node.target
    tensors = tuple(a for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor))
    if target in VIEWS:
        return parts_if(_by_rows(node, n) and _by_rows(tensors[0], n), tensors)
    if target in COPIES:
        rows = has_rows(tensors[0], n) or _has_lead(tensors[0], n)
        return parts_if(rows and _by_rows(node, n) and value(node).device == value(tensors[0]).device, tensors)
    if target in _POINTWISE:
        return _pointwise(node, n, tensors)
    if target in SOFTMAX | SOFTMAX_BACKWARD:
        dim, rank = args[1 if target in SOFTMAX else 2], value(node).dim()
        last = dim in (-1, rank - 1) and rank > 1 and value(node).shape[:-1].numel() % n == 0
        return parts_if(last and all(_by_rows(t, n) for t in (node, *tensors)), tensors)
    if target is NLL or target is NLL_BACKWARD:
        return _loss(node, n)
    if target is SLICE_BACKWARD:
        return parts_if(args[5] == 1 and _has_lead(args[0], n), (args[0],), result=False)  # type: ignore[arg-type]
    return None


def _loss(node: fx.Node, n: int) -> Parts | None:
    """Return the parts of a cross-entropy without weights, over rows of classes."""
    shift = 0 if node.target is NLL else 1
    x, target, weight, reduction = node.args[shift : shift + 4]
    fits = weight is None and reduction in (1, 2) and value(x).dim() == 2  # type: ignore[arg-type]
    by_rows = fits and _by_rows(x, n) and _by_rows(target, n)  # type: ignore[arg-type]
    return parts_if(by_rows, (x, target), result=node.target is NLL_BACKWARD)  # type: ignore[arg-type]


def _pointwise(node: fx.Node, n: int, tensors: tuple[fx.Node, ...]) -> Parts | None:
    """Return the parts of a pointwise op: operands of the result's shape come by rows, numbers come whole."""
    if (len(node.args) > 2 and node.target in (aten.add.Tensor, aten.sub.Tensor)) or node.kwargs:
        return None  # alpha: vector code may round the product and the sum once
    rows = tuple(t for t in tensors if value(t).shape == value(node).shape)
    others = [t for t in tensors if t not in rows]
    fits = rows and all(value(t).dim() == 0 for t in others)
    return parts_if(bool(fits) and _by_rows(node, n) and all(has_rows(t, n) for t in rows), rows)


def parts_if(holds: Any, rows: tuple[fx.Node, ...], *, result: bool = True) -> Parts | None:
    """Return the parts if the condition holds, else None."""
    return Parts(rows, result) if holds else None


def _is_dense_strided(node: fx.Node) -> bool:
    """Return whether everything that a node takes and makes is a dense tensor or no tensor."""
    given = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    flat = [t for v in given for t in (v if isinstance(v, (tuple, list)) else (v,))]
    return all(t is None or isinstance(t, (torch.Tensor, int, float)) for t in flat) and all(
        t.layout is torch.strided and t.numel() for t in flat if isinstance(t, torch.Tensor)
    )


def _by_rows(node: fx.Node, n: int) -> bool:
    """Return whether a node is contiguous and falls into `n` rows."""
    return isinstance(node, fx.Node) and bool(value(node).is_contiguous() and value(node).numel() % n == 0)


def has_rows(node: fx.Node, n: int) -> bool:
    """Return whether a node falls into `n` rows, or has `n` as its first dimension."""
    return _by_rows(node, n) or value(node).shape[:1] == (n,)


def _has_lead(node: fx.Node, n: int) -> bool:
    """Return whether the first dimension, or the first two together, are `n` rows."""
    shape: torch.Size = value(node).shape
    return len(shape) >= 2 and (shape[0] == n or shape[:2].numel() == n)


Box = tuple[int, int]  # rows from, to


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Nodes (in graph order) that can run block by block of `n` rows.

    `lead`: the dimensions that make up the rows of what is not contiguous; a block must be a box of them. `need`: the
    most bytes that one node reads and writes.
    """

    nodes: tuple[fx.Node, ...]
    n: int
    lead: tuple[int, ...]
    need: int

    def parts(self, node: fx.Node) -> Parts:
        """Return how a node of the chain takes part in it."""
        found = parts(node, self.n)
        assert found is not None
        return found

    @property
    def phases(self) -> list[list[fx.Node]]:
        """The chain's nodes of the forward, and those of the backward; a phase without nodes is left out."""
        both = ([n for n in self.nodes if not is_backward(n)], [n for n in self.nodes if is_backward(n)])
        return [part for part in both if part]


def chains(graph: fx.Graph, fits: Callable[[Chain], bool]) -> list[Chain]:
    """Return the maximal chains around the softmaxes of `graph` that `fits` accepts, disjoint, in graph order."""
    found: list[Chain] = []
    taken: set[fx.Node] = set()
    place = {node: i for i, node in enumerate(graph.nodes)}
    for seed in graph.nodes:
        if seed.target in SOFTMAX | SOFTMAX_BACKWARD and seed not in taken:
            chain = _largest_chain(seed, place)
            if chain is not None and chain.n > 1 and not taken & set(chain.nodes) and fits(chain):
                found.append(chain)
                taken.update(chain.nodes)
    return found


def boxes(chain: Chain, blocks: int) -> list[Box]:
    """Return near-equal ranges of rows, each a box of `chain.lead`: whole outer dimensions, or a part of one."""
    outer, inner = chain.lead[0], prod(chain.lead[1:])
    if blocks <= outer:
        return [(a * inner, b * inner) for a, b in _ranges(outer, blocks)]
    each = min(-(-blocks // outer), inner)
    return [(o * inner + a, o * inner + b) for o in range(outer) for a, b in _ranges(inner, each)]


def _ranges(n: int, blocks: int) -> list[Box]:
    """Return `blocks` near-equal ranges of `n` rows."""
    cuts = [n * i // blocks for i in range(blocks + 1)]
    return list(pairwise(cuts))


def _largest_chain(seed: fx.Node, place: dict[fx.Node, int]) -> Chain | None:
    """Return the largest chain around a softmax, or None."""
    n = value(seed).shape[:-1].numel()
    nodes = _trimmed(_reach(seed, n), place)
    if seed not in nodes:
        return None
    lead = {lead for node in nodes for lead in _required_boxes(node, n, nodes)}
    if len(lead) > 1:
        return None
    ordered = tuple(sorted(nodes, key=place.__getitem__))
    return Chain(nodes=ordered, n=n, lead=lead.pop() if lead else (n,), need=max(map(bytes_touched, ordered)))


def _reach(seed: fx.Node, n: int) -> set[fx.Node]:
    """Return all nodes that are joined to the seed by tensors that come by rows."""
    if parts(seed, n) is None:
        return set()
    nodes, todo = {seed}, [seed]
    while todo:
        node = todo.pop()
        own = parts(node, n)
        assert own is not None
        makers = [x for x in own.rows if value(x).numel() > n]
        for near in (*makers, *(node.users if own.result else ())):
            found = parts(near, n)
            connected = found and ((near in own.rows and found.result) or node in found.rows)
            if connected and near not in nodes:
                nodes.add(near)
                todo.append(near)
    return nodes


def _trimmed(nodes: set[fx.Node], place: dict[fx.Node, int]) -> set[fx.Node]:
    """Return the nodes without those that cannot run block by block after all.

    These are views whose users need them whole, and in each phase the nodes that depend on the chain through another
    node.
    """
    while True:
        out = {x for x in nodes if x.target in VIEWS and set(x.users) - nodes}
        for backward in (False, True):
            out |= _indirect_dependents({n for n in nodes if is_backward(n) is backward}, place)
        if not out & nodes:
            return nodes
        nodes = nodes - out


def _indirect_dependents(part: set[fx.Node], place: dict[fx.Node, int]) -> set[fx.Node]:
    """Return the nodes of `part` that depend on another node of `part` through a node that is not in it."""
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


def _required_boxes(node: fx.Node, n: int, nodes: set[fx.Node]) -> Iterator[tuple[int, ...]]:
    """Yield the dimensions that a block of a node must be a box of: where it reads what is not contiguous, or pads
    rows.
    """
    own = parts(node, n)
    assert own is not None
    for x in own.rows:
        if node.target is SLICE_BACKWARD or (x not in nodes and not has_rows(x, n)):
            shape = value(x).shape
            yield (n,) if shape[0] == n else tuple(shape[:2])


def bytes_touched(node: fx.Node) -> int:
    """Return the bytes that a node reads and writes."""
    touched = tensors_of((node, *node.all_input_nodes))
    return sum({storage_key(t): t.numel() * t.itemsize for t in touched}.values())
