"""Compares what the ranks of a group are about to run, before anything runs: all go on, or all raise.

The ranks exchange lines of text through the store of the process group, never by a collective: a rank that has failed,
or was not there, is named within the group's timeout. A digest is compared first; only where it differs are the lines
read.
"""

from __future__ import annotations

from collections.abc import Sequence

from memplan.distributed.ended import is_alone
from memplan.distributed.exchange import Exchange
from memplan.distributed.ops import process_group


class Agreement:
    """A context in which each rank of a group makes what it will run, and the comparison of what they have made.

    If it raises within the context, the other ranks raise too, with its reason.

    Args:
        group: The name of the process group; None: there are no other ranks, and all agree.

    Example:
        >>> with Agreement("0") as ranks:
        ...     step = build()
        ...     ranks.compare([c.line for c in step.plan.collectives])
    """

    def __init__(self, group: str | None) -> None:
        found = None if group is None else process_group(group)
        self._exchange = None if is_alone(found) else Exchange(found)
        self._compared = False

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._exchange is not None and not self._compared:
            self._exchange.fail(f"{type(error).__name__}: {error}")

    def compare(self, lines: Sequence[str]) -> str:
        """Return the name of the comparison, the same on all ranks ("" if there is one rank).

        Raises `RanksDiffer` on every rank unless all have the same lines, within the timeout of the group.
        """
        self._compared = True
        return "" if self._exchange is None else self._exchange.run(lines)
