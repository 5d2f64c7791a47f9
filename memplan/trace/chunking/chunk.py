"""Divide by rows: a chain of row-independent ops runs block by block, so that its tensors never exist whole.

In the forward, what the chain reads is sliced, each op runs on a block, and what leaves the chain is written into its
rows. In the backward, the blocks that the forward did not keep are recomputed from what the chain reads, one block at a
time. Where the gradient that leaves is laid out like the tensor that the chain starts from, and nothing else reads
that, its rows overwrite the rows of that tensor: logits and their gradient are one storage.

The mean or sum of a cross-entropy is taken by the same kernel over the same rows, each of which has its loss as its
only class. It adds in the same order, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from memplan.core.division import Division
from memplan.errors import InvalidSize
from memplan.trace.chunking.chunk_rewrite import ChunkRewriter
from memplan.trace.chunking.row_chains import Chain, chains
from memplan.trace.passes.aliasing import has_effects, keys_of, written_in


def divide(graph: fx.Graph, division: Division) -> Division:
    """Divide the chains of a functional graph, in place, and return the division with `over` settled, to repeat it.

    Chains whose order allows no division are left as they are. Raises `InvalidSize` without a number of blocks.
    """
    if division.blocks is None:
        raise InvalidSize("no number of blocks was chosen", where="divide", hint="pass one")
    if division.blocks == 1:
        raise InvalidSize(
            "one block is for Inductor's kernels", where="divide", hint="pass 2 or more, or kernels='inductor'"
        )
    written = written_in(graph)
    found = chains(graph, lambda chain: _can_move(chain, written) is not None, sums=division.sums)
    over = division.over
    if over is None:
        over = max((c.need for c in found), default=0) - 1
    for chain in found:
        if chain.need > over and (sunk := _can_move(chain, written_in(graph))) is not None:
            ChunkRewriter(graph, chain, division.blocks).run(sunk)
    return replace(division, over=over)


def _can_move(chain: Chain, written: set[int]) -> list[list[fx.Node]] | None:
    """Return, by phase, the nodes between those of the chain that must run after the chain's part in that phase.

    Returns None if a part cannot run at one point of the program, or if what it reads is one of the storages `written`.
    """
    members = set(chain.nodes)
    if any(written & keys_of(node.all_input_nodes) for node in chain.nodes):
        return None
    moved: list[list[fx.Node]] = []
    for part in chain.phases:
        late: list[fx.Node] = []
        behind = set(part)
        for node in _between(part[0], part[-1]):
            if node in members:
                if set(node.all_input_nodes) & set(late):
                    return None
            elif set(node.all_input_nodes) & behind:
                if node.op != "call_function" or has_effects(node):
                    return None
                late.append(node)
                behind.add(node)
        moved.append(late)
    return moved


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes from `first` to `last`."""
    node = first
    while node is not last:
        yield node
        node = node.next
    yield last
