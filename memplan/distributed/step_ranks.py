"""The ranks of a compiled step while it is called: what they have agreed to run, and what if one leaves alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import distributed

from memplan.distributed.agreement import Agreement
from memplan.distributed.ended import AGAIN, end, is_alone, reason_of, require_going_on, store_of, timeout_of
from memplan.distributed.ops import process_group
from memplan.errors import CollectiveFailed, MemplanError

_GRACE = 5.0  # seconds at most that a rank which raises waits for the others to raise too
_POLL = 0.02


class StepRanks:
    """A context for each call of a step, in which ranks that raise do so together.

    If one leaves a call by an error and the others do not within five seconds (or the timeout of the group, if that is
    less), the reason is posted for them, and no rank can go on.

    Args:
        group: The name of the process group; None: there are no other ranks.
    """

    def __init__(self, group: str | None) -> None:
        self._name = group
        found = None if group is None else process_group(group)
        self._group: Any = None if is_alone(found) else found
        self._agreed: frozenset[tuple[str, ...]] = frozenset()
        self._calls, self._agreement, self._ended = 0, "", False

    def begin(self, agreement: str, sequences: Sequence[tuple[str, ...]]) -> None:
        """Store the name of the agreement at compile time, and the collectives of the programs it was on."""
        self._agreement, self._agreed = agreement, frozenset(sequences)

    def agree(self, sequence: tuple[str, ...], all_of: Sequence[tuple[str, ...]]) -> None:
        """Let the ranks agree on other collectives than those of the last call, unless `sequence` is one of these.

        `all_of`: the collectives of all programs of the plan that runs now.

        Raises `RanksDiffer` on every rank, or on a rank that is alone with its change, within the group's timeout.
        """
        if self._group is None or sequence in self._agreed:
            return
        with Agreement(self._name) as ranks:
            ranks.compare([f"program {i}: {line}" for i, lines in enumerate(all_of) for line in lines])
        self._agreed = frozenset(all_of)

    def __enter__(self) -> None:
        if self._group is None:
            return
        if self._ended:
            require_going_on(self._group)
            what = "a step of this process has failed before"
            raise CollectiveFailed(what, where="the process group", hint=AGAIN)
        self._calls += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or self._group is None:
            return
        if isinstance(error, CollectiveFailed):
            self._ended = True
        elif not (isinstance(error, Exception) and self._all_raise()):
            self._ended = True
            why = error.summary if isinstance(error, MemplanError) else str(error)
            end(self._group, f"rank {distributed.get_rank()} raised {type(error).__name__}: {why}")

    def _all_raise(self) -> bool:
        """Return whether all ranks leave this call by an error, within the time that they have."""
        store = store_of(self._group)
        ranks = distributed.get_process_group_ranks(self._group)
        prefix = f"memplan/{self._agreement}/{self._calls}/raised by "
        try:
            store.set(f"{prefix}{distributed.get_rank()}", "")
            until = time.monotonic() + min(_GRACE, timeout_of(self._group))
            while not store.check([f"{prefix}{rank}" for rank in ranks]):
                if time.monotonic() > until or reason_of(self._group):
                    return False
                time.sleep(_POLL)
        except RuntimeError:  # the store is gone with the rank that held it
            return False
        return True
