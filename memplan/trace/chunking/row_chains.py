"""Find chains of ops that treat rows independently, around every softmax of a functional graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from torch import fx

from memplan.trace.chunking.rows import (
    PRODUCTS,
    SLICE,
    SLICE_BACKWARD,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    TRANSPOSE,
    VIEWS,
    Parts,
    has_rows,
    parts,
)
from memplan.trace.passes.aliasing import tensors_of
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import storage_key, value

Box = tuple[int, int]  # rows from, to


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Nodes (in graph order) that can run block by block of `n` rows.

    `lead`: the dimensions that make up the rows of what is not contiguous; a block must be a box of them. `need`: the
    most bytes that one node reads and writes. `sums`: the chain includes matrix products.
    """

    nodes: tuple[fx.Node, ...]
    n: int
    lead: tuple[int, ...]
    need: int
    sums: bool

    def parts(self, node: fx.Node) -> Parts:
        """Return how a node of the chain takes part in it."""
        found = parts(node, self.n, sums=self.sums)
        assert found is not None
        return found

    @property
    def phases(self) -> list[list[fx.Node]]:
        """The chain's nodes of the forward, and those of the backward; a phase without nodes is left out."""
        both = ([n for n in self.nodes if not is_backward(n)], [n for n in self.nodes if is_backward(n)])
        return [part for part in both if part]


def chains(graph: fx.Graph, fits: Callable[[Chain], bool], *, sums: bool) -> list[Chain]:
    """Return the maximal chains around the softmaxes of `graph` that `fits` accepts, disjoint, in graph order.

    `sums`: see `Division`. A chain that does not fit with its matrix products may fit without.
    """
    found: list[Chain] = []
    taken: set[fx.Node] = set()
    place = {node: i for i, node in enumerate(graph.nodes)}
    for seed in graph.nodes:
        if seed.target in SOFTMAX | SOFTMAX_BACKWARD and seed not in taken:
            tried = (_largest_chain(seed, place, sums=True), _largest_chain(seed, place, sums=False))[not sums :]
            new = (c for c in tried if c is not None and c.n > 1 and not taken & set(c.nodes))
            chain = next(filter(fits, new), None)
            if chain is not None:
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


def _largest_chain(seed: fx.Node, place: dict[fx.Node, int], *, sums: bool) -> Chain | None:
    """Return the largest chain around a softmax, or None."""
    n = value(seed).shape[:-1].numel()
    nodes = _trimmed(_reach(seed, n, sums=sums), place)
    if sums:  # a chain that slices off the last token is divided by sequences
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
    lead = {lead for node in nodes for lead in _required_boxes(node, n, nodes, sums=sums)}
    if len(lead) > 1:
        return None
    ordered = tuple(sorted(nodes, key=place.__getitem__))
    return Chain(nodes=ordered, n=n, lead=lead.pop() if lead else (n,), need=max(map(_bytes, ordered)), sums=sums)


def _reach(seed: fx.Node, n: int, *, sums: bool) -> set[fx.Node]:
    """Return all nodes that are joined to the seed by tensors that come by rows; matrix products end a chain."""
    if parts(seed, n, sums=sums) is None:
        return set()
    nodes, todo = {seed}, [seed]
    while todo:
        node = todo.pop()
        own = parts(node, n, sums=sums)
        assert own is not None
        makers = () if node.target in PRODUCTS else [x for x in own.rows if value(x).numel() > n]
        for near in (*makers, *_row_users(node, own)):
            found = parts(near, n, sums=sums)
            connected = found and ((near in own.rows and found.result) or node in found.rows)
            if connected and near not in nodes:
                nodes.add(near)
                if near.target not in PRODUCTS or near in own.rows:
                    todo.append(near)
    return nodes


def _trimmed(nodes: set[fx.Node], place: dict[fx.Node, int]) -> set[fx.Node]:
    """Return the nodes without those that cannot run block by block after all.

    These are views whose users need them whole, and in each phase the nodes that depend on the chain through another
    node.
    """
    while True:
        out = {x for x in nodes if x.target in VIEWS | {SLICE, TRANSPOSE} and set(x.users) - nodes}
        out |= {user for x in out if x.target is TRANSPOSE for user in x.users}
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


def _row_users(node: fx.Node, own: Parts) -> Iterator[fx.Node]:
    """Yield the users that take a node's result by rows."""
    if own.result or node.target is TRANSPOSE:
        yield from node.users


def _required_boxes(node: fx.Node, n: int, nodes: set[fx.Node], *, sums: bool) -> Iterator[tuple[int, ...]]:
    """Yield the dimensions that a block of a node must be a box of: where it reads what is not contiguous, or pads
    rows.
    """
    own = parts(node, n, sums=sums)
    assert own is not None
    for x in own.rows:
        padded = node.target is SLICE_BACKWARD and not sums
        if padded or (x not in nodes and not has_rows(x, n)):
            shape = value(x).shape
            yield (n,) if shape[0] == n else tuple(shape[:2])


def _bytes(node: fx.Node) -> int:
    """Return the bytes that a node reads and writes."""
    touched = tensors_of((node, *node.all_input_nodes))
    return sum({storage_key(t): t.numel() * t.itemsize for t in touched}.values())
