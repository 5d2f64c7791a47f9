"""Keeps a program for each kind of call, and says what happens when the batch size, or anything else of it, changes.

A compiled module, a compiled step and each graph of `torch.compile` keep their programs here. A call of a kind that has
a program runs it. Another kind gets a program of its own; beyond the limit, the program that has not run for longest is
given up, or (where calls differ from the example) the new kind gets none. A kind that cannot be planned is remembered,
so that it is traced once. Who keeps the programs says what a call without one does: as `on_mismatch`, or eagerly.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from memplan.errors import CollectiveFailed, InputMismatch, MemplanError, StaleActivationsError, UnsupportedCall

Program = TypeVar("Program")
_MOST_REFUSED = 64  # kinds of which it is remembered that they cannot be planned
_log = logging.getLogger("memplan")


class TooManyPrograms(Exception):
    """Raised for a call that differs from the example if there are programs for as many other calls as are kept."""


class Programs(Generic[Program]):
    """The programs of one compiled object, by the kind of call that each is for.

    Attributes:
        main: The program of the example, which is never given up; None where there is no example.
        most: The number of programs that are kept.
        passing: The errors that say nothing of the next call of that kind, and are not remembered.
    """

    most = 8
    passing: tuple[type[MemplanError], ...] = (
        InputMismatch,
        StaleActivationsError,
        UnsupportedCall,
        CollectiveFailed,
    )

    def __init__(self, main: Program | None = None) -> None:
        self.main = main
        self._others: dict[Hashable, Program] = {}  # that which ran last is last
        self._refused: dict[Hashable, MemplanError] = {}

    def __iter__(self) -> Iterator[Program]:
        """Yield the programs, that of the example first. Other threads may add some at the same time.

        A dict is copied in one piece, unlike an `OrderedDict`, whose kinds are compared meanwhile.
        """
        return iter((*(() if self.main is None else (self.main,)), *tuple(self._others.values())))

    def __len__(self) -> int:
        return len(self._others) + (self.main is not None)

    def find(self, kind: Hashable) -> Program | None:
        """Return the program of a kind of call, which has run last from now on; None if there is none."""
        found = self._others.pop(kind, None)
        if found is not None:
            self._others[kind] = found
        return found

    def of(
        self,
        kind: Hashable,
        make: Callable[[], Program],
        differs: InputMismatch | None = None,
        *,
        model: str = "",
        state: str = "",
    ) -> Program:
        """Return the program of a kind of call, which `make` makes where there is none.

        Raises again what `make` raised before. `differs`: how a call of `model` differs from the example. It gives up
        no other program, but raises `TooManyPrograms`. The log says that, and in which other `state` the call is.
        """
        found = self.find(kind)
        if found is not None:
            return found
        self.require(kind)
        if differs is not None and len(self) >= self.most:
            raise TooManyPrograms(f"{self.most} programs exist already")
        if said := "; ".join(filter(None, (state, differs.summary if differs else ""))):
            what = "%s: makes program %d of %d, for another call: %s"
            _log.info(what, model, min(len(self) + 1, self.most), self.most, said)
        try:
            made = make()
        except self.passing:
            raise
        except MemplanError as refused:
            if refused.see != "optimizer-state":  # that can be mended, and the call made again
                self.refuse(kind, refused)
            raise
        if self._others and len(self) >= self.most:
            oldest, *_ = tuple(self._others)
            self._others.pop(oldest, None)
        self._others[kind] = made
        return made

    def refuse(self, kind: Hashable, refused: MemplanError) -> None:
        """Remember why a kind of call cannot be planned."""
        if kind not in self._refused and len(self._refused) >= _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[kind] = copy.copy(refused)  # without the frames of its traceback

    def require(self, kind: Hashable) -> None:
        """Raise again why a kind of call cannot be planned, if that is known."""
        if kind in self._refused:
            raise copy.copy(self._refused[kind])

    def drop(self, given_up: Callable[[Any], bool]) -> list[Program]:
        """Give up the programs of some kinds, and return them."""
        dropped = (self._others.pop(kind, None) for kind in tuple(self._others) if given_up(kind))
        return [program for program in dropped if program is not None]
