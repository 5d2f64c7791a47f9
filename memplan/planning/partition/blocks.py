"""Groups the ops of a step into units that run on one device: the repeated blocks of a model, and the ops between them.

A block is a module whose path ends in a number ("h.3"). It includes its submodules, their backward and their updates.
Paths are cut at the smallest depth that gives enough units.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memplan.core.evictions import TRANSFERS
from memplan.core.graph import Graph, Op, Phase

_NUMBER = re.compile(r"\d+")
_PER_DEVICE = 3  # units per device, so that devices can be balanced
_DEEPEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The unit of each op: `of[i]` is that of op i, -1 for copies to and from the host, which follow their storage.

    `names` are the module paths of the units in the order of the forward, "" for the ops before the first block and
    after the last.
    """

    of: tuple[int, ...]
    names: tuple[str, ...]


def units_of(graph: Graph, devices: int) -> Units:
    """Return the units of `graph`, whose ops are in schedule order. Without blocks, the units are single modules."""
    found = _cut(graph, 0)
    for depth in range(1, _DEEPEST + 1):
        cut = _cut(graph, depth)
        if len(cut.names) >= 2:
            found = cut
        if len(cut.names) >= _PER_DEVICE * devices:
            return found
    return found if len(found.names) >= devices else _cut(graph, 0)


def _block(module: str, depth: int) -> str:
    """Return the module path up to its `depth`-th number, or to its last number if it has fewer; "" if it has none.

    Depth 0 returns the whole path.
    """
    if not depth:
        return module
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if _NUMBER.fullmatch(part)]
    return ".".join(parts[: numbers[min(depth, len(numbers)) - 1] + 1]) if numbers else ""


def _cut(graph: Graph, depth: int) -> Units:
    names, of = _forward(graph, depth)
    index = {name: i for i, name in enumerate(names) if name}
    home = {op.origin.module: of[i] for i, op in reversed(list(enumerate(graph.ops))) if of[i] >= 0}
    made: dict[int, int] = {}  # storage -> unit of its last writer
    last = 0
    for i, op in enumerate(graph.ops):
        if op.target in TRANSFERS:
            continue
        if of[i] < 0:
            block = index.get(_block(op.origin.module, depth), home.get(op.origin.module, -1))
            of[i] = block if block >= 0 and op.origin.module else _source(graph, op, made, last)
        last = of[i]
        made.update(dict.fromkeys(graph.written(op), last))
    return Units(of=tuple(of), names=tuple(names))


def _forward(graph: Graph, depth: int) -> tuple[list[str], list[int]]:
    """Return the names of the units, and the unit of each op of the forward.

    An op without a block belongs to the block before it, to a first unit before all blocks, or, if it has a module of
    its own, to a last unit after all blocks.
    """
    blocks = {i: _block(op.origin.module, depth) for i, op in enumerate(graph.ops) if _computes_forward(op)}
    last = list(dict.fromkeys(block for block in blocks.values() if block))[-1:]
    names: list[str] = []
    of = [-1] * len(graph.ops)
    current = -1
    for i, block in blocks.items():
        if block and block not in names:
            names.append(block)
        if block:
            current = names.index(block)
        elif current < 0 or (last and last[0] in names and names[-1] and graph.ops[i].origin.module):
            names.append("")
            current = len(names) - 1
        of[i] = current
    return names, of


def _computes_forward(op: Op) -> bool:
    return op.phase is Phase.FORWARD and op.target not in TRANSFERS


def _source(graph: Graph, op: Op, made: dict[int, int], last: int) -> int:
    """Return the unit that wrote the storages that `op` reads.

    If there are several, it is that of the last one; if there are none, `last`.
    """
    found = [made[s] for v in op.reads if (s := graph.values[v].storage) in made]
    return found[-1] if found else last
