"""The bytes that a step needs beside its arena: the model and its inputs, and what is allocated at each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from memplan.core.collectives import may_run_again, waited_for
from memplan.core.graph import Graph, Op, StorageKind
from memplan.core.schedule import live_bytes, storage_intervals

MODEL_KINDS = (
    StorageKind.PARAMETER,
    StorageKind.OPTIMIZER_STATE,
    StorageKind.CONSTANT,
    StorageKind.INPUT,
    StorageKind.TANGENT,
)


_COPIED = (StorageKind.PARAMETER, StorageKind.CONSTANT, StorageKind.OPTIMIZER_STATE)
_RESULTS = (StorageKind.OUTPUT, StorageKind.GRADIENT)
_ACCUMULATING = ("_cudnn_attention_backward", "_flash_attention_backward")
_QUERY = 1  # where the backward of attention reads the query: after the gradient of its result


def copied_bytes(graph: Graph, host_size: int, *, away: bool) -> int:
    """Return the bytes of the host that a step copies from and to: its host arena of `host_size` bytes, and, if the
    model and the caller are on the host (`away`), what it copies from there and the results that it copies there.
    """
    kinds = (*_COPIED, *_RESULTS) if away else ()
    return host_size + sum(s.nbytes for s in graph.storages if s.kind in kinds and not s.planned)


def outside_profile(graph: Graph, order: tuple[int, ...], transient: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes allocated outside the arena at each step: the caller's results so far, intermediate results
    that are not in the arena, and transient bytes.

    `transient` are the bytes that each op (by index) allocates outside the arena only while it runs; a collective that
    is started runs until it is waited for.
    """
    beside = transient_profile(graph, order, transient)
    change = [0] * (len(order) + 1)
    for index, live in storage_intervals(graph, order).items():
        storage = graph.storages[index]
        if not storage.planned and storage.kind not in (*MODEL_KINDS, StorageKind.HOST):
            change[live.start] += storage.nbytes
            change[live.end] -= storage.nbytes  # what the caller keeps is alive to the end
    kept, profile = 0, []
    for step, nbytes in enumerate(beside):
        kept += change[step]
        profile.append(kept + nbytes)
    return tuple(profile)


def transient_profile(graph: Graph, order: tuple[int, ...], transient: Sequence[int]) -> list[int]:
    """Return the transient bytes at each step: those of its op, and of collectives that run beside it."""
    found = [transient[op] for op in order]
    for start, wait in waited_for(graph, order).items():
        for step in range(start + 1, wait + 1):
            found[step] += transient[order[start]]
    return found


def gathered_profile(graph: Graph, order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bytes at each step of parameters that are gathered from all ranks and not given up again."""
    wholes = {s for op in graph.ops if may_run_again(op.target) for s in graph.written(op)}
    only = tuple(replace(s, planned=i in wholes) for i, s in enumerate(graph.storages))
    return tuple(live_bytes(replace(graph, storages=only), order))


def outside_bytes(graph: Graph, order: tuple[int, ...], transient: Sequence[int], *, away: bool = False) -> int:
    """Return the bytes that the device holds beside the arena at the peak.

    `away`: the model and the caller's tensors are on the host, and only transient bytes are outside the arena.
    """
    if away:
        return max(transient, default=0)
    return graph.bytes_of(*MODEL_KINDS) + max(outside_profile(graph, order, transient), default=0)


def released_bytes(graph: Graph, order: tuple[int, ...]) -> int:
    """Return the most bytes that intermediate results outside the arena take at one step."""
    kept = tuple(replace(s, planned=i in graph.released) for i, s in enumerate(graph.storages))
    return max(live_bytes(replace(graph, storages=kept), order), default=0)


def functional_transient(graph: Graph) -> tuple[int, ...]:
    """Return the bytes of each op's fresh results, which are copied into the arena."""
    return tuple(graph.functional_bytes(op) for op in graph.ops)


def known_transient(graph: Graph) -> tuple[int, ...]:
    """Return the transient bytes of each op that are known before anything ran: fresh results, and accumulators.

    The backward of attention adds up the gradient of the query in 32 bits on a GPU of NVIDIA: flash attention by its
    source (torch's flash_api.cpp), cuDNN's as measured on an H200 (torch 2.11, 2026-11-27: 63, 42 and 84 MB a call of
    GPT-2, BERT-large and Llama 1B, results included, are 4 bytes an element of the query beside them).
    """
    return tuple(graph.functional_bytes(op) + _accumulated(graph, op) for op in graph.ops)


def _accumulated(graph: Graph, op: Op) -> int:
    """Return the bytes in which an op adds up what it returns in a narrower type."""
    if not any(name in op.target for name in _ACCUMULATING):
        return 0
    return 4 * prod(graph.values[op.reads[_QUERY]].shape)


def beside_results(graph: Graph, transient: Sequence[int]) -> tuple[int, ...]:
    """Return the transient bytes of each op beside its fresh results: what its kernel allocates for itself."""
    return tuple(max(t - r, 0) for t, r in zip(transient, functional_transient(graph), strict=True))


def transient_on(graph: Graph, transient: Sequence[int], device: str) -> int:
    """Return the most transient bytes of an op that runs on `device`, one of several."""
    on = (t for op, t in zip(graph.ops, transient, strict=True) if _runs_on(graph, op, device))
    return max(on, default=0)


def _runs_on(graph: Graph, op: Op, device: str) -> bool:
    return any(graph.storages[s].device == device for s in graph.touched(op))
