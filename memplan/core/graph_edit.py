"""Changes a graph: values and storages keep their indices, further ones follow, ops are given in order.

All that inserts, drops or reorders ops, or joins graphs, does it here, so that indices are counted in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from memplan.core.graph import Graph, Op, Storage, Value


class GraphEdit:
    """The graph so far; `finish` returns it.

    What holds indices of the given graph's values and storages stays valid. `sources` has a number for each op that was
    added: where it comes from, -1 for a new one.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values, self.storages = list(graph.values), list(graph.storages)
        self.ops: list[Op] = []
        self.sources: list[int] = []
        self._views: dict[tuple[int, int], int] = {}

    def add(self, op: Op, source: int = -1) -> None:
        """Append an op."""
        self.ops.append(op)
        self.sources.append(source)

    def storage(self, storage: Storage) -> int:
        """Add a storage, and return its index."""
        self.storages.append(storage)
        return len(self.storages) - 1

    def join(
        self, other: Graph, called: Callable[[str], str], storages: Mapping[int, int], values: Mapping[int, int]
    ) -> tuple[int, ...]:
        """Add the storages and values of another graph, and return the index here of each of its values.

        `called` returns the name here of one that is added. `storages` and `values`: those of the other graph that are
        here already, and their indices here.
        """
        home = [
            storages[i] if i in storages else self.storage(replace(s, name=called(s.name)))
            for i, s in enumerate(other.storages)
        ]
        return tuple(
            values[i] if i in values else self._value(replace(v, name=called(v.name), storage=home[v.storage]))
            for i, v in enumerate(other.values)
        )

    def view(self, value: int, storage: int, called: str) -> int:
        """Return the same view of another storage: `value` itself if it is one, else a value of the name `called`."""
        base = self.values[value]
        if base.storage == storage:
            return value
        return self._view((value, storage), replace(base, name=called, storage=storage))

    def whole(self, storage: int, called: str = "bytes") -> int:
        """Return a value of all bytes of a storage, named after it and `called`."""
        s = self.storages[storage]
        name = f"{s.name}:{called}"
        made = Value(name=name, storage=storage, dtype="uint8", shape=(s.nbytes,), strides=(1,), offset=0)
        return self._view((-1, storage), made)

    def finish(self) -> Graph:
        """Return the graph."""
        return replace(self.graph, ops=tuple(self.ops), values=tuple(self.values), storages=tuple(self.storages))

    def _view(self, key: tuple[int, int], made: Value) -> int:
        if key not in self._views:
            self._views[key] = self._value(made)
        return self._views[key]

    def _value(self, made: Value) -> int:
        self.values.append(made)
        return len(self.values) - 1


def in_order(graph: Graph, order: Iterable[int]) -> Graph:
    """Return the graph with these of its ops (by index), in this order."""
    return replace(graph, ops=tuple(graph.ops[i] for i in order))


def with_values(op: Op, new: Callable[[int], int]) -> Op:
    """Return an op with other values in the place of its own."""
    return replace(
        op,
        reads=tuple(map(new, op.reads)),
        writes=tuple(map(new, op.writes)),
        inplace_candidates=tuple((new(result), new(read)) for result, read in op.inplace_candidates),
        unrelated=tuple((new(result), new(read)) for result, read in op.unrelated),
    )
