"""`plan_memory`, an entry for `MemoryPlanningAlgorithmSuite` of ExecuTorch: its tensors placed by memplan's solver.

    from executorch.exir.passes import MemoryPlanningPass
    MemoryPlanningPass(memory_planning_algo=MemoryPlanningAlgorithmSuite([greedy, plan_memory]))

The suite takes the result with the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from memplan.core.arguments import require_library
from memplan.core.problem import Buffer, Interval, Problem
from memplan.errors import InvalidProblem
from memplan.solvers import solve


def plan_memory(
    alignment: int, specs: Collection[Any], graph_module: Any, graph_signature: Any, extra_padding: int = 0
) -> Any:
    """Return an offset for each tensor of an ExecuTorch program, as its memory planning algorithms do.

    Tensors of one memory (`mem_id`) share an arena. The same program gets the same offsets.

    Args:
        alignment: Of every tensor, bytes.
        specs: The `TensorSpec`s to place; their lifetimes are inclusive.
        graph_module: The graph; `input_mem_buffer_sizes` of it are bytes in use before its own.
        graph_signature: Not used.
        extra_padding: Bytes added to each memory.

    Returns:
        ExecuTorch's `MemoryAlgoResult`.

    Raises:
        InvalidProblem: A tensor has no lifetime, or lies in another one that has no place.
        LibraryNotInstalled: ExecuTorch is not installed.

    Example:
        ```python
        suite = MemoryPlanningAlgorithmSuite([plan_memory])
        program = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(suite)))
        ```
    """
    require_library("executorch", where=__name__, install="pip install executorch")
    from executorch.exir.memory_planning import MemoryAlgoResult, SpecAllocResult

    ordered = _in_order(specs, graph_module)
    for spec in ordered:
        spec.realign(alignment)
    memories: dict[int, list[Any]] = {}
    for spec in ordered:
        if spec.storage_base is None:
            memories.setdefault(1 if spec.mem_id is None else int(spec.mem_id), []).append(spec)
    before = getattr(graph_module, "input_mem_buffer_sizes", None) or []
    sizes = [0] * (max(memories, default=1) + 1)
    places: dict[Any, Any] = {}
    for memory, own in sorted(memories.items()):
        first = before[memory] if memory < len(before) else 0
        problem = Problem(buffers=tuple(_buffer(i, spec, alignment) for i, spec in enumerate(own)))
        solution = solve(problem)
        for number, spec in enumerate(own):
            places[spec] = SpecAllocResult(memory, number, first + solution.offsets[str(number)])
        sizes[memory] = first + solution.arena_size + extra_padding
    inside = [spec for spec in ordered if spec.storage_base is not None]
    for spec in inside:
        places[spec] = _inside(spec, places, SpecAllocResult, len(inside))
    return MemoryAlgoResult(places, sizes)


def _in_order(specs: Collection[Any], graph_module: Any) -> list[Any]:
    """Return the specs in the order in which the graph makes them: a set has another one in each process."""
    made: dict[int, int] = {}
    for node in graph_module.graph.nodes:
        found = node.meta.get("spec")
        for spec in found if isinstance(found, (list, tuple)) else (found,):
            made.setdefault(id(spec), len(made))
    return sorted(specs, key=lambda spec: (made.get(id(spec), len(made)), list(spec.lifetime), spec.allocated_memory))


def _buffer(number: int, spec: Any, alignment: int) -> Buffer:
    """Return a tensor as a buffer. Raises `InvalidProblem` where it has no lifetime."""
    first, last = spec.lifetime
    if first is None or last is None:
        hint = "run ExecuTorch's update_all_tensors_lifetime before it"
        raise InvalidProblem("has no lifetime", where=f"specs[{number}]", hint=hint)
    return Buffer(id=str(number), size=spec.allocated_memory, live=Interval(first, last + 1), alignment=alignment)


def _inside(spec: Any, places: Mapping[Any, Any], place: Any, most: int) -> Any:
    """Return the place of a tensor that lies in another one, at most `most` deep. Raises `InvalidProblem`."""
    base, offset = spec, 0
    for _ in range(most + 1):
        if base.storage_base is None:
            break
        offset += base.storage_base_offset
        base = base.storage_base
    found = places.get(base)
    if base.storage_base is not None or found is None:
        raise InvalidProblem("lies in a tensor that has no place of its own", where="storage_base")
    return place(found.mem_id, found.mem_obj_id, found.mem_offset + offset)
