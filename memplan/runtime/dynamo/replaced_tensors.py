"""Finds the programs of a model whose tensors were replaced, and which nothing else has any more.

Programs refer to parameters and buffers, as their addresses are in the code. Where a model gets other ones (a mask that
is pruned once more, an adapter that is loaded), dynamo traces it again; the program of before would keep its tensors as
long as its graph is known.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memplan.runtime.dynamo.planned_graph import GraphInstance

_WHILE_COUNTED = 3  # references to a tensor that are those of who counts them: a list, a name, an argument


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
        for tensor in instance.module.tensors():
            if sys.getrefcount(tensor) <= known[id(tensor)] + _WHILE_COUNTED:
                found.append(instance)
                break
    return found
