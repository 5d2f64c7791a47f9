"""Returns memory that an op has allocated instead of a copy of it, where nothing else uses that memory any more."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from memplan.core.graph import Value
from memplan.runtime.codegen.step_ir import Call, Empty, Layout, Line, View, refs, same_layout


def without_needless_copies(lines: Sequence[Line], layout: Layout, kept: Collection[int]) -> list[Line]:
    """Return the lines of a function without copies of memory that dies with them.

    A program that adds gradients to those of the steps before has an op for each that copies it out of the arena. Where
    the gradient was made outside of the arena, that is as large a tensor once more, for nothing.

    Args:
        lines: The lines in order.
        layout: Says which storages ops allocate.
        kept: The values that the function returns, or leaves to another one.

    Returns:
        The lines. A copy into new memory, of all bytes of memory that a line before has allocated and that no line
        after it uses, is a view instead.
    """
    values = layout.graph.values
    last = {values[v].storage: i for i, line in enumerate(lines) for v in (*line.makes, *line.uses)}
    last |= dict.fromkeys((values[v].storage for v in kept), len(lines))
    own = {values[v].storage for line in lines if isinstance(line, Call | Empty) for v in line.makes}
    empty = {line.value: i for i, line in enumerate(lines) if isinstance(line, Empty)}
    found = list[Line | None](lines)
    for i, line in enumerate(lines):
        if not isinstance(line, Call) or line.bound.function is not torch.Tensor.copy_ or line.bound.kwargs:
            continue
        copied = refs(line.bound.args)
        if len(copied) != 2 or copied[0] not in empty:
            continue
        target, source = copied
        place = values[source].storage
        used = any(target in (*between.makes, *between.uses) for between in lines[empty[target] + 1 : i])
        if place in own and last[place] == i and not used and _can_take(layout, values[target], values[source]):
            found[empty[target]], found[i] = None, View(base=source, value=target)
    return [line for line in found if line is not None]


def _can_take(layout: Layout, target: Value, source: Value) -> bool:
    """Return whether a value can have the memory of another one, of which it is a copy, as its own."""
    one, two = (layout.graph.storages[v.storage] for v in (target, source))
    same_place = (one.nbytes, one.device) == (two.nbytes, two.device)
    return source.storage in layout.fresh_storages and same_place and same_layout(target, source)
