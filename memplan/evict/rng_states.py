"""Lets random ops run again: the generator's state is saved right before their first run.

A policy sees, before each random op whose results are larger than a state, an op that saves the state, and the random
op reads it. So the state takes arena bytes for as long as the op may run again. From the events that the policy
returns, states that nothing draws with again are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memplan.core.evictions import RNG_STATE_BYTES, SAVE_RNG
from memplan.core.graph import Op, Storage, StorageKind
from memplan.core.graph_edit import GraphEdit
from memplan.errors import BudgetInfeasible
from memplan.evict.measure import to_arrays, to_events
from memplan.evict.workload import Event, Events, Kind, Policy, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStates:
    """A workload in which generator states are saved. `plain` is the same workload without them.

    `op_of[i]` is the op of `plain` that op i is, or ~op where it saves the state that `op` finds. `state_of` has the
    storage of the state for each of these random ops (indices in `plain`).
    """

    plain: Workload
    workload: Workload
    op_of: tuple[int, ...]
    state_of: dict[int, int]

    def within(self, budget: int) -> SavedStates:
        """Return the same with another budget, bytes."""
        return replace(self, plain=self.plain.within(budget), workload=self.workload.within(budget))


def with_saved_states(plain: Workload) -> SavedStates:
    """Return `plain` with a saved state for each random op whose results are larger than the state."""
    return _saving(plain, [i for i in range(len(plain.graph.ops)) if _is_worth_it(plain, i)])


def without_states(plain: Workload) -> SavedStates:
    """Return `plain` as it is, with no saved state."""
    return _saving(plain, ())


def decide(states: SavedStates, policy: Policy) -> tuple[Workload, Events]:
    """Return the events of `policy` and their workload, in which only states that are used are saved.

    Where no way is found with states, which take bytes themselves, all random results are kept. Raises what `policy`
    raises.
    """
    if not states.state_of:
        return states.plain, policy(states.plain)
    try:
        return only_used(states, policy(states.workload))
    except BudgetInfeasible:
        return states.plain, policy(states.plain)


def _is_worth_it(w: Workload, i: int) -> bool:
    """Return whether a state is smaller than what op i draws, and lets the op run again."""
    op, g = w.graph.ops[i], w.graph
    if not op.random or not op.writes or w.device not in ("", "cpu"):
        return False
    written = g.written(op)
    if any(not g.storages[s].planned or g.storages[s].device != "cpu" for s in written):
        return False
    return sum(w.size[s] for s in written) > -(-RNG_STATE_BYTES // w.alignment) * w.alignment


def _saving(plain: Workload, chosen: Sequence[int]) -> SavedStates:
    """Return `plain` with the states of the `chosen` random ops saved, each right before its op."""
    if not chosen:
        return SavedStates(plain=plain, workload=plain, op_of=tuple(range(len(plain.graph.ops))), state_of={})
    edit = GraphEdit(plain.graph)
    op_of: list[int] = []
    state_of: dict[int, int] = {}
    wanted = frozenset(chosen)
    for i, op in enumerate(plain.graph.ops):
        if i in wanted:
            kind = StorageKind.RNG_STATE
            state = Storage(
                name=f"rng_state:{op.name}",
                nbytes=RNG_STATE_BYTES,
                device="cpu",
                kind=kind,
                planned=True,
                origin=op.origin,
            )
            state_of[i] = edit.storage(state)
            value = edit.whole(state_of[i])
            save = Op(
                name=f"save_rng:{op.name}",
                target=SAVE_RNG,
                phase=op.phase,
                reads=(),
                writes=(value,),
                direct=True,
                random=True,
                origin=op.origin,
            )
            edit.add(save)
            op_of.append(~i)
            op = replace(op, reads=(*op.reads, value))  # noqa: PLW2901
        edit.add(op, plain.sources[i])
        op_of.append(i)
    saving = replace(plain, graph=edit.finish(), sources=tuple(edit.sources))
    return SavedStates(plain=plain, workload=saving, op_of=tuple(op_of), state_of=state_of)


def only_used(states: SavedStates, events: Events) -> tuple[Workload, Events]:
    """Return the workload and the events of `states.workload` without the states that no op draws with again."""
    events = to_events(*to_arrays(events))
    times: dict[int, int] = {}
    for kind, i in events:
        if kind is Kind.RUN and 0 <= i < len(states.op_of):
            times[states.op_of[i]] = times.get(states.op_of[i], 0) + 1
    used = _saving(states.plain, [i for i in states.state_of if times.get(i, 0) > 1])
    if len(used.state_of) == len(states.state_of):
        return states.workload, events
    position = {op: i for i, op in enumerate(used.op_of)}
    op_now = {i: position.get(op, -1) for i, op in enumerate(states.op_of)}
    storage_now = {s: used.state_of.get(i, -1) for i, s in states.state_of.items()}
    found = []
    for kind, of in events:
        now = op_now.get(of, of) if kind is Kind.RUN else storage_now.get(of, of)
        if now >= 0 or of < 0:
            found.append(Event(kind, now))
    return used.workload, tuple(found)
