"""Chains of row-independent ops in a functional graph, and their ops block by block of rows.

A tensor of `n` rows has a first dimension that is a multiple of `n`, or is contiguous and falls into `n` equal runs of
elements: a row is what an op does not cross. Which ops there are differs: `chunk.py` knows those of eager's kernels,
`fused/row_parts.py` those of Inductor's decompositions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from memplan.core.division import Division
from memplan.errors import InvalidSize
from memplan.trace.passes.nodes import keys_of, tensors_of, written_in
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import VIEWS, Rewriter, aten, fake_mode_of, storage_key, value

SLICE, FULL = aten.slice.Tensor, aten.full.default
Box = tuple[int, int]  # rows from, to
_ROWS = "_rows"
FIRST_ROWS = f"{_ROWS}0"  # in the name of a node: it computes the first block of rows
_FEWEST = 2  # rows of a chain
_PART = 2  # a tensor is wide if it has at least one in so many of the elements of the first op of its chain


@dataclass(frozen=True, slots=True)
class Parts:
    """The part of one op in a chain: which operands come by rows, and whether its result does."""

    rows: tuple[fx.Node, ...]
    result: bool = True


PartOf = Callable[[fx.Node, int], Parts | None]  # returns how an op can run on a block of so many rows; None: it cannot


def parts_if(holds: Any, rows: tuple[fx.Node, ...], *, result: bool = True) -> Parts | None:
    """Return the parts if the condition holds, else None."""
    return Parts(rows, result) if holds else None


def has_rows(node: Any, n: int) -> bool:
    """Return whether a node is a tensor whose first dimension is a multiple of `n`."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(val, torch.Tensor) and val.dim() > 0 and val.numel() > 0 and val.shape[0] % n == 0


def is_plain(node: fx.Node) -> bool:
    """Return whether everything that a node takes and makes is a dense tensor or no tensor."""
    given = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    flat = [t for val in given for t in (val if isinstance(val, (tuple, list)) else (val,))]
    return all(t is None or isinstance(t, (torch.Tensor, int, float)) for t in flat) and all(
        t.layout is torch.strided and t.numel() for t in flat if isinstance(t, torch.Tensor)
    )


def is_transpose(node: Any) -> bool:
    """Return whether a node is the transpose of a matrix."""
    return isinstance(node, fx.Node) and node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Nodes in graph order that run block by block of `n` rows. `wide`: the elements of a wide tensor of theirs.

    `need`: the most bytes that one of them reads and writes.
    """

    nodes: tuple[fx.Node, ...]
    n: int
    wide: int
    need: int
    part_of: PartOf

    def part(self, node: fx.Node) -> Parts:
        """Return how a node of the chain takes part in it."""
        found = self.part_of(node, self.n)
        assert found is not None
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Finder:
    """Finds the chains of a graph: each begins with a seed, and goes on through tensors that come by rows.

    What a wide tensor is made from joins its chain, if that is wide too. `ends` are the ops that end one. `trims`:
    views whose users need them whole do not join. `trained`: only chains that reach the backward are wanted.
    """

    part_of: PartOf
    ends: Collection[object] = ()
    trims: Collection[object] = ()
    trained: bool = False

    def chains(self, graph: fx.Graph, seeds: Iterable[fx.Node]) -> Iterator[Chain]:
        """Yield chains that can be divided, disjoint, those with the widest seeds first."""
        place = {node: i for i, node in enumerate(graph.nodes)}
        written = written_in(graph)
        taken: set[fx.Node] = set()
        for seed in sorted(seeds, key=lambda node: (-value(node).numel(), place[node])):
            if seed in taken:
                continue
            nodes, n = self._reach(seed, value(seed).shape[:-1].numel())
            changed = any(written & keys_of([node, *node.all_input_nodes]) for node in nodes)
            left_out = changed or (self.trained and not any(map(is_backward, nodes)))
            if n < _FEWEST or seed not in nodes or nodes & taken or left_out:
                continue
            taken |= nodes
            ordered = tuple(sorted(nodes, key=place.__getitem__))
            need, wide = max(map(bytes_touched, ordered)), value(seed).numel() // _PART
            yield Chain(nodes=ordered, n=n, wide=wide, need=need, part_of=self.part_of)

    def _reach(self, seed: fx.Node, n: int) -> tuple[set[fx.Node], int]:
        """Return all nodes that are joined to a seed by tensors of `n` rows, or of fewer if wide ones have fewer."""
        while n > 1:
            found = self._reach_with(seed, n)
            if isinstance(found, int):
                n = found
                continue
            while out := {x for x in found if x.target in self.trims and set(x.users) - found}:
                found -= out
            return found, n
        return set(), 1

    def _reach_with(self, seed: fx.Node, n: int) -> set[fx.Node] | int:
        """Return the nodes of a chain of `n` rows, or a smaller number of rows, with which it goes further."""
        if self.part_of(seed, n) is None:
            return set()
        wide = value(seed).numel() // _PART
        nodes, todo = {seed}, [seed]
        while todo:
            node = todo.pop()
            own = self.part_of(node, n)
            assert own is not None
            for near in users_of(node) if own.result else ():
                found = self.part_of(near, n)
                if found is None or node not in found.rows:
                    sizes = (val.shape[0] for val in tensors_of((near,)) if val.numel() >= wide and val.dim())
                    fewer = math.gcd(n, *sizes)
                    if fewer < n and (other := self.part_of(near, fewer)) is not None and node in other.rows:
                        return fewer
                elif near not in nodes:
                    nodes.add(near)
                    if near.target not in self.ends:
                        todo.append(near)
            for near in () if node.target in self.ends else own.rows:
                made = self.part_of(near, n) if value(near).numel() >= wide else None
                if made is not None and made.result and near not in nodes:
                    nodes.add(near)
                    todo.append(near)
        return nodes


def users_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a node, and in place of its transpose the products of that."""
    for user in node.users:
        if is_transpose(user):
            yield from user.users
        else:
            yield user


def bytes_touched(node: fx.Node) -> int:
    """Return the bytes that a node reads and writes."""
    touched = tensors_of((node, *node.all_input_nodes))
    return sum({storage_key(t): t.numel() * t.itemsize for t in touched}.values())


def chosen(division: Division, found: Collection[Chain]) -> tuple[list[Chain], int]:
    """Return the chains to divide, and the bytes over which they are: those of the largest need, if none are given."""
    over = division.over
    if over is None:
        over = max((chain.need for chain in found), default=0) - 1
    return [chain for chain in found if chain.need > over], over


def blocks_of(division: Division) -> int:
    """Return the number of blocks of a division. Raises `InvalidSize` if none was chosen."""
    if division.blocks is None:
        raise InvalidSize("no number of blocks was chosen", where="divide", hint="pass one")
    return division.blocks


class BlockRewriter:
    """Rewrites one chain. `made[node, box]` is a block of a node's result, `whole[node]` the whole of it.

    A chain of fewer rows than blocks has one for each row. Nodes are added before `anchor`, in a phase of the step
    (None: that of the node that they replace).
    """

    phase: str | None = None
    anchor: fx.Node

    def __init__(self, graph: fx.Graph, chain: Chain, blocks: int) -> None:
        self.graph, self.chain = graph, chain
        self.mode = fake_mode_of(graph)
        self.members = set(chain.nodes)
        blocks = min(blocks, chain.n)
        self.boxes: list[Box] = list(pairwise(chain.n * i // blocks for i in range(blocks + 1)))
        self.made: dict[tuple[fx.Node, Box], fx.Node] = {}
        self.whole: dict[fx.Node, fx.Node] = {}

    def leaves(self, node: fx.Node) -> bool:
        """Return whether something needs the whole result of a node."""
        if not self.chain.part(node).result:
            return True
        users = list(users_of(node))
        return any(u not in self.members or node not in self.chain.part(u).rows for u in users)

    def writer(self, node: fx.Node, box: Box | None) -> Rewriter:
        """Return a rewriter for a node, at the current position, whose nodes belong to one block of rows, if any."""
        writer = Rewriter(self.graph, self.mode, node, before=self.anchor)
        writer.phase = self.phase
        if box is not None:
            writer.label = f"{node.name}{_ROWS}{self.boxes.index(box)}"
        return writer

    def block(self, node: Any, box: Box) -> fx.Node:
        """Return the rows `box` of a node's result: computed if the node is of the chain, else sliced."""
        key = node, box
        if key not in self.made:
            inside = node in self.members and self.chain.part(node).result
            self.made[key] = self.computed(node, box) if inside else self.sliced(node, box)
        return self.made[key]

    def sliced(self, node: fx.Node, box: Box) -> fx.Node:
        """Return a view of the rows of a whole tensor, whose leading dimensions are merged until they hold them."""
        whole, shape, writer = self.whole.get(node, node), self.shape(node, (0, self.chain.n)), self.writer(node, box)
        if shape != list(value(node).shape):
            whole = writer.call(aten.view.default, whole, shape)
        each = shape[0] // self.chain.n
        return writer.call(SLICE, whole, 0, box[0] * each, box[1] * each)

    def computed(self, node: fx.Node, box: Box) -> fx.Node:
        """Run a node of the chain on a block."""
        return self.writer(node, box).call(node.target, *self.arguments(node, box), **node.kwargs)

    def arguments(self, node: fx.Node, box: Box) -> tuple[Any, ...]:
        """Return the arguments of a node for a block."""
        own = self.chain.part(node)

        def argument(arg: Any) -> Any:
            if not isinstance(arg, fx.Node):
                return arg
            return self.block(arg, box) if arg in own.rows else self.whole.get(arg, arg)

        args = tuple(map(argument, node.args))
        if node.target in VIEWS and len(args) > 1:
            return args[0], self.shape(node, box)
        return (self.shape(node, box), *args[1:]) if node.target is FULL else args

    def shape(self, node: fx.Node, box: Box) -> list[int]:
        """Return the shape of a block of a node's result."""
        shape = value(node).shape
        for d in range(1, len(shape) + 1):
            rows = math.prod(shape[:d])
            if rows % self.chain.n == 0:
                return [rows // self.chain.n * (box[1] - box[0]), *shape[d:]]
        raise AssertionError(f"a tensor of shape {list(shape)} has no {self.chain.n} rows")
