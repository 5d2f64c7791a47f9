"""Binds the ops that a plan adds: starts of copies, waits for them, and saves of the random generator's state.

Collectives that a plan starts before it waits for them are bound here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from memplan.core.collectives import WAIT
from memplan.core.evictions import OFFLOAD, RELOAD, SEND
from memplan.core.graph import Graph
from memplan.distributed.ops import StartedCollective
from memplan.errors import InvalidEviction
from memplan.runtime.copies.copies import Copy, Direction
from memplan.runtime.kernels.callables import save_state
from memplan.runtime.kernels.kernel_selection import BoundOp, CallForm
from memplan.runtime.memory.arena import Arena
from memplan.trace.traced import Kernel, KernelCall, Ref, SaveState, Transfer

_DIRECTIONS = {OFFLOAD: Direction.TO_HOST, RELOAD: Direction.TO_DEVICE, SEND: Direction.ACROSS}


def bind_transfers(
    graph: Graph,
    kernels: Sequence[Kernel],
    order: Sequence[int],
    arena: Arena,
    host: torch.Tensor,
) -> tuple[dict[int, BoundOp], tuple[Copy, ...]]:
    """Return the bound op of each transfer and saved generator state (by op index), and the copies as they start.

    `host` is the memory of offloaded bytes. Of a collective that is started and waited for, both ops are bound. Raises
    `InvalidEviction` for a wait without a start.
    """
    bound: dict[int, BoundOp] = {}
    started: list[Copy] = []
    in_flight: dict[tuple[int, int], Copy | StartedCollective] = {}
    for index in order:
        kernel = kernels[index]
        if isinstance(kernel, SaveState):
            bound[index] = _bound(CallForm.IN_PLACE, save_state, Ref(kernel.value))
        if isinstance(kernel, KernelCall) and graph.ops[index].starts:
            collective = arena.collectives.collective(kernel.target)
            (out,) = kernel.outs
            assert out is not None
            in_flight[_storages(graph, graph.ops[index].reads[0], out)] = collective
            bound[index] = BoundOp(
                form=CallForm.START, function=collective.start, args=kernel.args, kwargs={"out": Ref(out)}, outs=()
            )
        if not isinstance(kernel, Transfer):
            continue
        source = kernel.reads[0]
        if kernel.target in _DIRECTIONS:
            (destination,) = kernel.writes
            copy = arena.copies.copy(_DIRECTIONS[kernel.target], host)
            in_flight[_storages(graph, source, destination)] = copy
            started.append(copy)
            bound[index] = _bound(CallForm.START, copy.start, Ref(destination), Ref(source))
        else:
            ended = in_flight.pop(_storages(graph, source, kernel.reads[1]), None)
            if ended is None:
                what = "collective" if kernel.target == WAIT else "copy"
                raise InvalidEviction(f"waits for a {what} that was not started", where=graph.ops[index].name)
            bound[index] = _bound(CallForm.WAIT, ended.wait)
    return bound, tuple(started)


def _storages(graph: Graph, source: int, destination: int) -> tuple[int, int]:
    return graph.values[source].storage, graph.values[destination].storage


def _bound(form: CallForm, function: Callable[..., None], *args: Ref) -> BoundOp:
    return BoundOp(form=form, function=function, args=args, kwargs={}, outs=())
