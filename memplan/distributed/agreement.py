"""Compares what the ranks of a group are about to run, before anything runs: all go on, or all raise.

The ranks exchange lines of text through the store of the process group, never by a collective: a rank that has failed,
or was not there, is named within the group's timeout. A digest is compared first; only where it differs are the lines
read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import distributed

from memplan.distributed.ended import is_alone, require_going_on, store_of, timeout_of
from memplan.distributed.ops import process_group
from memplan.errors import RanksDiffer

_POLLS = 0.005, 0.25  # seconds between two looks, at first and at most
_AGREED, _WITHDRAWN = "agreed", "withdrawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A rank's answer: the digest of the lines that it has made; or why it made none; or none any more (`withdrawn`).

    `attempt` counts the rank's attempts, which tells a failure of this one from one of an attempt before.
    """

    nonce: str
    attempt: int
    digest: str = ""
    failure: str = ""
    withdrawn: bool = False


class Exchange:
    """One exchange among the ranks of a process group, from this rank's view."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.ranks: Sequence[int] = distributed.get_process_group_ranks(group)
        self.rank = distributed.get_rank()
        self.store: Any = store_of(group)
        self.nonce = secrets.token_hex(8)
        self.attempt = int(self.store.add(self._key("attempts", self.rank), 1))

    def fail(self, why: str) -> None:
        """Let the others know that this rank has made nothing."""
        self.store.set(self._failure_key(self.rank, self.attempt), why)
        self._put(Offer(nonce=self.nonce, attempt=self.attempt, failure=why))

    def run(self, lines: Sequence[str]) -> str:
        """Return the name of the exchange, on all ranks the same, once all are known to have the same lines.

        Raises:
            RanksDiffer: Another rank has other lines, has failed, or did not come within the timeout of the group.
            CollectiveFailed: The ranks have ended training together.
        """
        text = json.dumps(list(lines))
        self.store.set(self._lines_key(self.nonce), text)
        self._put(Offer(nonce=self.nonce, attempt=self.attempt, digest=hashlib.sha256(text.encode()).hexdigest()))
        name, offers = self._meet()
        first = self.ranks[0]
        other = next((r for r in self.ranks if offers[r].digest != offers[first].digest), None)
        if other is None:
            with contextlib.suppress(RuntimeError):  # some stores cannot delete
                self.store.delete_key(self._lines_key(self.nonce))
            return name
        raise RanksDiffer(
            _difference(first, self._lines(offers[first]), other, self._lines(offers[other])),
            where=f"rank {self.rank}",
            hint="give all ranks the same model, options and versions, and batches of the same shapes",
        )

    def _meet(self) -> tuple[str, dict[int, Offer]]:
        """Return the name of the exchange in which all ranks have seen the same offers, and these offers."""
        patience = timeout_of(self.group)
        begun, pause = time.monotonic(), _POLLS[0]
        name, seen = "", dict[int, Offer]()
        while True:
            offers = self._offers()
            if name and self._verdict(name) == _AGREED:
                return name, seen
            self._require_none_failed(offers)
            if all(r in offers and offers[r].attempt == self.attempt and not offers[r].withdrawn for r in self.ranks):
                found = hashlib.sha256("".join(offers[r].nonce for r in self.ranks).encode()).hexdigest()[:16]
                if found != name:
                    name, seen = found, offers
                    self.store.set(self._key("seen", self.rank), name)
                if not self._absent(name) and self._decide(name, _AGREED) == _AGREED:
                    return name, seen
            require_going_on(self.group)
            if time.monotonic() - begun > patience:
                if name and self._decide(name, _WITHDRAWN) == _AGREED:
                    return name, seen
                self._put(Offer(nonce=self.nonce, attempt=self.attempt, withdrawn=True))
                self._catch_up(self.attempt - 1)
                behind = [r for r in self.ranks if r not in offers or offers[r].attempt < self.attempt]
                missing = self._absent(name) if name else behind
                missing = missing or [r for r in self.ranks if r in offers and offers[r].withdrawn]
                what = f"ranks {missing} did not compile within {patience:.0f} s"
                raise RanksDiffer(what, where=f"rank {self.rank}", hint="see whether they run, and what they log")
            time.sleep(pause)
            pause = min(1.2 * pause, _POLLS[1])

    def _require_none_failed(self, offers: dict[int, Offer]) -> None:
        """Raise `RanksDiffer` for a failure of another rank in this attempt, also if it has gone on to the next."""
        failed = next((r for r, o in offers.items() if o.attempt > self.attempt or self._has_failed(o)), None)
        if failed is None:
            return
        self._put(Offer(nonce=self.nonce, attempt=self.attempt, withdrawn=True))
        ahead = offers[failed].attempt - (0 if offers[failed].failure else 1)
        self._catch_up(ahead)
        keys = [self._failure_key(failed, attempt) for attempt in (self.attempt, ahead)]
        why = next(
            (self.store.get(key).decode() for key in keys if self.store.check([key])), "it compiles another step"
        )
        what = f"rank {failed} could not compile: {why}"
        raise RanksDiffer(what, where=f"rank {self.rank}", hint="see the logs of that rank")

    def _has_failed(self, offer: Offer) -> bool:
        return bool(offer.failure) and offer.attempt >= self.attempt

    def _catch_up(self, attempt: int) -> None:
        """Let this attempt count as that of another number, so that the ranks' next ones have the same."""
        if attempt != self.attempt:
            self.store.add(self._key("attempts", self.rank), attempt - self.attempt)

    def _offers(self) -> dict[int, Offer]:
        """Return the offer that each rank has now; without those that never made one."""
        keys = {r: self._key("offer", r) for r in self.ranks}
        return {r: Offer(**json.loads(self.store.get(key))) for r, key in keys.items() if self.store.check([key])}

    def _absent(self, name: str) -> list[int]:
        """Return the ranks that have not seen what the exchange of this name is of."""
        keys = {r: self._key("seen", r) for r in self.ranks}
        return [r for r, key in keys.items() if not self.store.check([key]) or self.store.get(key).decode() != name]

    def _verdict(self, name: str) -> str:
        key = f"memplan/verdict/{name}"
        return str(self.store.get(key).decode()) if self.store.check([key]) else ""

    def _decide(self, name: str, verdict: str) -> str:
        """Return the verdict of an exchange: this one if there was none."""
        return str(self.store.compare_set(f"memplan/verdict/{name}", "", verdict).decode())

    def _put(self, offer: Offer) -> None:
        self.store.set(self._key("offer", self.rank), json.dumps(asdict(offer)))

    def _lines(self, offer: Offer) -> list[str]:
        found: list[str] = json.loads(self.store.get(self._lines_key(offer.nonce)))
        return found

    def _key(self, kind: str, rank: int) -> str:
        return f"memplan/{'-'.join(map(str, self.ranks))}/{kind} of {rank}"

    def _failure_key(self, rank: int, attempt: int) -> str:
        return self._key(f"failure {attempt}", rank)

    def _lines_key(self, nonce: str) -> str:
        return f"memplan/lines/{nonce}"


def _difference(one: int, ones: Sequence[str], two: int, twos: Sequence[str]) -> str:
    """Return the first line in which two ranks differ, in words."""
    for a, b in zip(ones, twos, strict=False):
        if a != b:
            return f"the ranks differ: rank {one} has {a!r}, rank {two} has {b!r}"
    more, fewer, longer = (one, two, ones) if len(ones) > len(twos) else (two, one, twos)
    return f"the ranks differ: only rank {more} has {longer[min(len(ones), len(twos))]!r}, and rank {fewer} ends before"


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
