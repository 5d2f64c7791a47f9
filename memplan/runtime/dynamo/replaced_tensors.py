"""Finds the programs of a model whose tensors were replaced, and which nothing else has any more.

Programs refer to parameters and buffers, as their addresses are in the code. Where a model gets other ones (a mask that
is pruned once more, an adapter that is loaded), dynamo traces it again; the program of before would keep its tensors as
long as its graph is known.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplan.runtime.dynamo.planned_graph import GraphInstance


def with_replaced_tensors(instances: Iterable[GraphInstance]) -> list[GraphInstance]:
    """Return the instances that have a parameter or buffer to which only these instances refer.

    A program that is dropped by mistake, for a tensor that code in C++ has, is made again when it is called.

    Args:
        instances: All instances that may refer to the same tensors.
    """
    instances = list(instances)
    known = Counter(id(tensor) for instance in instances for tensor in instance.references())
    found = []
    for instance in instances:
        tensors = instance.module.tensors()
        if any(count <= known[id(tensor)] for count, tensor in zip(_references(tensors), tensors, strict=True)):
            found.append(instance)
    return found


def _references(objects: list[Any]) -> list[int]:
    """Return how many references each object has, but for that of the list, and those of who counts."""
    counts, (own,) = ([sys.getrefcount(each) for each in counted] for counted in (objects, [object()]))
    return [count - own for count in counts]
