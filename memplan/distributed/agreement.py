"""Compares what the ranks of a group are about to run, before anything runs: all go on, or all raise.

The ranks exchange lines of text through the store of the process group, never by a collective: a rank that has failed,
or was not there, is named within the group's timeout. A digest is compared first; only where it differs are the lines
read. Each exchange has a number, which all ranks count alike; one that a rank has given up is skipped by those who come
later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

from torch import distributed

from memplan.distributed.ended import is_alone, require_going_on, store_of, timeout_of
from memplan.distributed.ops import process_group
from memplan.errors import RanksDiffer

_POLLS = 0.005, 0.25  # seconds between two looks, at first and at most
_AGREED, _WITHDRAWN = "agreed", "withdrawn"
_FAILED = "failed: "


class Agreement:
    """A context in which each rank of a group makes what it will run, and the comparison of what they have made.

    If it raises within the context, the other ranks raise too, with its reason. If it leaves the comparison early, none
    can agree any more.

    Args:
        group: The name of the process group; None: there are no other ranks, and all agree.

    Example:
        >>> with Agreement("0") as ranks:
        ...     step = build()
        ...     ranks.compare([c.line for c in step.plan.collectives])
    """

    def __init__(self, group: str | None) -> None:
        found = None if group is None else process_group(group)
        self._group = None if is_alone(found) else found
        self._compared = False
        if self._group is None:
            return
        self._ranks: Sequence[int] = distributed.get_process_group_ranks(self._group)
        self._name = f"memplan/{'-'.join(map(str, self._ranks))}"
        self._rank = distributed.get_rank()
        self._store: Any = store_of(self._group)
        self._count()
        while self._read("verdict") == _WITHDRAWN:
            self._count()

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or self._group is None:
            return
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that held it
            if not self._compared:
                self._store.set(self._key(f"offer of {self._rank}"), f"{_FAILED}{type(error).__name__}: {error}")
            elif not isinstance(error, RanksDiffer):
                self._decide(_WITHDRAWN)

    def compare(self, lines: Sequence[str]) -> str:
        """Return the name of the comparison, the same on all ranks ("" if there is one rank).

        Raises:
            RanksDiffer: Another rank has other lines, has failed, or did not come within the timeout of the group.
            CollectiveFailed: The ranks have ended training together.
        """
        self._compared = True
        if self._group is None:
            return ""
        text = json.dumps(list(lines))
        self._store.set(self._key(f"lines of {self._rank}"), text)
        self._store.set(self._key(f"offer of {self._rank}"), hashlib.sha256(text.encode()).hexdigest())
        offers = self._meet()
        first = self._ranks[0]
        other = next((r for r in self._ranks if offers[r] != offers[first]), None)
        if other is None:
            with contextlib.suppress(RuntimeError):  # some stores cannot delete
                self._store.delete_key(self._key(f"lines of {self._rank}"))
            return self._key("agreement")
        ones, twos = (json.loads(self._read(f"lines of {r}")) for r in (first, other))
        raise RanksDiffer(
            _difference(first, ones, other, twos),
            where=f"rank {self._rank}",
            hint="give all ranks the same model, options and versions, and batches of the same shapes",
        )

    def _meet(self) -> dict[int, str]:
        """Return the offers of all ranks, once all are known to see them."""
        patience = timeout_of(self._group)
        until, pause = time.monotonic() + patience, _POLLS[0]
        where = f"rank {self._rank}"
        while True:
            offers = {r: said for r in self._ranks if (said := self._read(f"offer of {r}"))}
            failed = next((r for r, said in offers.items() if said.startswith(_FAILED)), None)
            if failed is not None:
                what = f"rank {failed} could not compile: {offers[failed].removeprefix(_FAILED)}"
                raise RanksDiffer(what, where=where, hint="see the logs of that rank")
            require_going_on(self._group)
            complete = len(offers) == len(self._ranks)
            if complete and self._decide(_AGREED) == _AGREED:
                return offers
            if complete or (time.monotonic() > until and self._decide(_WITHDRAWN) == _WITHDRAWN):
                missing = [r for r in self._ranks if r not in offers] or list(self._ranks)
                what = f"ranks {missing} did not compile within {patience:.0f} s"
                raise RanksDiffer(what, where=where, hint="see whether they run, and what they log")
            time.sleep(pause)
            pause = min(1.2 * pause, _POLLS[1])

    def _count(self) -> None:
        """Go on to this rank's next exchange."""
        self._number = int(self._store.add(f"{self._name}/exchanges of {self._rank}", 1))

    def _decide(self, verdict: str) -> str:
        """Return the verdict of the exchange: this one if there was none."""
        return str(self._store.compare_set(self._key("verdict"), "", verdict).decode())

    def _read(self, kind: str) -> str:
        """Return what a rank has posted in the exchange; "" if it has not."""
        key = self._key(kind)
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _key(self, kind: str) -> str:
        return f"{self._name}/{self._number}/{kind}"


def _difference(one: int, ones: Sequence[str], two: int, twos: Sequence[str]) -> str:
    """Return the first line in which two ranks differ, in words."""
    for a, b in zip(ones, twos, strict=False):
        if a != b:
            return f"the ranks differ: rank {one} has {a!r}, rank {two} has {b!r}"
    more, fewer, longer = (one, two, ones) if len(ones) > len(twos) else (two, one, twos)
    return f"the ranks differ: only rank {more} has {longer[min(len(ones), len(twos))]!r}, and rank {fewer} ends before"
