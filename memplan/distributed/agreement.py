"""Compares what the ranks of a group are about to run, before anything runs: all go on, or all raise.

The ranks exchange lines of text through the store of the process group, never by a collective: a rank that has failed,
or was not there, is named within the store's timeout. A digest is compared first; only where it differs are the lines
read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from torch import distributed

from memplan.distributed.ops import process_group
from memplan.errors import RanksDiffer

_FAILED = "failed"
_SEE_LOG = "see the logs of that rank"


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
        alone = found is None or found.size() == 1 or distributed.get_backend(found) == "fake"
        self._exchange = None if alone else _Exchange(distributed.get_process_group_ranks(found))

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._exchange is not None and not self._exchange.published:
            self._exchange.put(_FAILED, [f"{type(error).__name__}: {error}"])

    def compare(self, lines: Sequence[str]) -> None:
        """Raise `RanksDiffer` on every rank unless all ranks have the same lines, within the store's timeout."""
        if self._exchange is not None:
            self._exchange.put(hashlib.sha256("\n".join(lines).encode()).hexdigest(), lines)
            self._exchange.compare()


class _Exchange:
    """One comparison among ranks; each rank counts its own, so that the next one has other keys."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self.rank = ranks, distributed.get_rank()
        self.store: Any = distributed.distributed_c10d._get_default_store()
        prefix = f"memplan/{'-'.join(map(str, ranks))}"
        number = self.store.add(f"{prefix}/of rank {self.rank}", 1)
        self.prefix = f"{prefix}/{number}"
        self.published = False

    def put(self, digest: str, lines: Sequence[str]) -> None:
        """Publish this rank's digest and lines."""
        self.published = True
        self.store.set(f"{self.prefix}/lines of {self.rank}", json.dumps(list(lines)))
        self.store.set(self._key(self.rank), digest)

    def compare(self) -> None:
        """Raise `RanksDiffer` unless all ranks have published the same lines."""
        digests = self._digests()
        failed = next((r for r in self.ranks if digests[r] == _FAILED), None)
        if failed is not None:
            what = f"rank {failed} could not compile: {self._lines(failed)[0]}"
            raise RanksDiffer(what, where=f"rank {self.rank}", hint=_SEE_LOG)
        first = self.ranks[0]
        other = next((r for r in self.ranks if digests[r] != digests[first]), None)
        if other is None:
            return
        raise RanksDiffer(
            _difference(first, self._lines(first), other, self._lines(other)),
            where=f"rank {self.rank}",
            hint="give all ranks the same model, options and versions, and batches of the same shapes",
        )

    def _digests(self) -> dict[int, str]:
        """Return the digest of each rank. Raises `RanksDiffer` for ranks that do not come in time."""
        keys = {r: self._key(r) for r in self.ranks}
        try:
            self.store.wait(list(keys.values()))
        except RuntimeError as error:
            missing = [r for r, key in keys.items() if not self.store.check([key])]
            what = f"ranks {missing} did not compile within {self.store.timeout.total_seconds():.0f} s"
            raise RanksDiffer(
                what, where=f"rank {self.rank}", hint="see whether they run, and what they log"
            ) from error
        return {r: self.store.get(key).decode() for r, key in keys.items()}

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/digest of {rank}"

    def _lines(self, rank: int) -> list[str]:
        found: list[str] = json.loads(self.store.get(f"{self.prefix}/lines of {rank}"))
        return found


def _difference(one: int, ones: Sequence[str], two: int, twos: Sequence[str]) -> str:
    """Return the first line in which two ranks differ, in words."""
    for a, b in zip(ones, twos, strict=False):
        if a != b:
            return f"the ranks differ: rank {one} has {a!r}, rank {two} has {b!r}"
    more, fewer, longer = (one, two, ones) if len(ones) > len(twos) else (two, one, twos)
    return f"the ranks differ: only rank {more} has {longer[min(len(ones), len(twos))]!r}, and rank {fewer} ends before"
