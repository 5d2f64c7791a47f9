"""The policy of a partitioner: which results of the forward are saved for the backward, and which it computes again.

A partition has no copies, drops only what the forward made, at the forward's end, and computes it again at most once.
The search is that of the default policy (`auto.py`), with these decisions alone.
"""

from __future__ import annotations

from memplan.evict.policies.auto import EXPONENTS, improve
from memplan.evict.search import DecisionSearch, Move, descend, descents, storage_classes
from memplan.evict.search_kernel import PIN, RECOMPUTE_ONCE
from memplan.evict.workload import Events, Kind, Workload, infeasible


def partition(workload: Workload) -> Events:
    """Return events that keep the budget where the backward computes again what the forward does not save.

    Raises `BudgetInfeasible` when no such events are found.
    """
    search = DecisionSearch(workload, swaps=False, least=0.0)
    search.moves = tuple(filter(None, (_moves(workload, moves) for moves in search.moves)))
    start = search.start()
    if start.area == 0:
        return search.events(start)
    classes = storage_classes(search)
    starts = [start, *(last for _, last in descents(search, start, EXPONENTS, classes))]
    starts.append(search.after(start, *(m for moves in search.moves for m in moves if m.decision == RECOMPUTE_ONCE)))
    possible = [one for one in starts if one.area < float("inf")]
    found = [fitted for one in possible for a in EXPONENTS if (fitted := descend(search, one, a))]
    if not found:
        raise infeasible(workload)
    return search.events(improve(search, found))


def kept_for_backward(workload: Workload, events: Events) -> tuple[int, ...]:
    """Return the storages that the forward makes and the backward reads from it, in the order of their first reads.

    A storage that the backward has computed again by then is none of them. Computing again reads too.
    """
    ops, first = workload.graph.ops, workload.graph.forward_ops
    made = {s for s, writers in enumerate(workload.writers) if writers and writers[0] < first}
    border = next((i for i, (kind, of) in enumerate(events) if kind is Kind.RUN and of >= first), len(events))
    again = _first_again(workload, events, border)
    kept: dict[int, None] = {}
    remade: set[int] = set()
    for kind, of in events[again:]:
        if kind is not Kind.RUN:
            continue
        read = {workload.graph.values[v].storage for v in ops[of].reads}
        kept.update(dict.fromkeys(sorted((read & made) - remade)))
        if of < first:
            remade.update(workload.graph.written(ops[of]))
    return tuple(kept)


def _first_again(workload: Workload, events: Events, border: int) -> int:
    """Return the position of the first event that belongs to the backward: what the first op of it needs runs again
    before it.
    """
    ran: set[int] = set()
    last = 0
    for position, (kind, of) in enumerate(events[:border]):
        if kind is Kind.RUN and of not in ran:
            ran.add(of)
            last = position + 1
    return last


def _moves(workload: Workload, moves: tuple[Move, ...]) -> tuple[Move, ...]:
    """Return what a partition can decide about a storage: to keep it, or to compute it again once in the backward."""
    first = workload.graph.forward_ops
    storage = moves[0].storage
    uses = workload.uses[storage]
    kept = tuple(move for move in moves if move.decision == PIN)
    before = [i for i in uses if i < first]
    if not before or uses[-1] < first or workload.redo_until[storage] < uses[-1]:
        return kept
    return (Move(storage, RECOMPUTE_ONCE, before[-1]), *kept)
