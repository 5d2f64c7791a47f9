"""Who owns the arena's bytes right now: the rules that keep a step in flight honest.

An arena holds one step's activations. So a forward may not start while another one's backward is still to
come, and a backward runs once. Each breach raises instead of being silently wrong.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from memplan.errors import StaleActivationsError


class InFlight:
    """The activations of one forward. Lives as long as its autograd graph; `done` after its backward."""

    __slots__ = ("__weakref__", "done", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.done = False


class ArenaOwnership:
    """Which step owns an arena; programs that share the arena share the ledger.

    `drain()` returns when no copy into or out of the arena is under way. A step that ends early leaves none.
    `move_out()`, where a backward has left something in the arena, takes it out before the bytes are used again.
    `turn()` lets what is launched from now on wait for the steps before (`stream_ordering.py`).
    """

    def __init__(self, drain: Callable[[], None], turn: Callable[[], None]) -> None:
        self.drain = drain
        self.turn = turn
        self._lock = threading.Lock()
        self.steps = 0
        self._current: Callable[[], InFlight | None] = lambda: None
        self.move_out: Callable[[], None] | None = None

    def __enter__(self) -> ArenaOwnership:
        """Hold the arena while a program runs; raise when another thread holds it."""
        if not self._lock.acquire(blocking=False):
            raise StaleActivationsError(
                "another thread is running a step in this arena",
                hint="let one thread at a time call a compiled module, or compile one for each thread",
            )
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is not None:
                self.drain()
        finally:
            self._lock.release()

    def begin(self, *, keep: bool) -> InFlight:
        """Start a step, or raise `StaleActivationsError` when one is in flight; `keep`: a backward will follow."""
        self.steps += 1
        self.require_free(f"forward {self.steps}")
        step = InFlight(self.steps)
        self._current = weakref.ref(step) if keep else lambda: None
        return step

    def require_free(self, who: str) -> None:
        """Raise `StaleActivationsError` when a step is in flight; else no copy is under way either."""
        if self.pending is not None:
            raise StaleActivationsError(
                f"{who} would overwrite the activations of forward {self.pending.number}, whose backward has not run",
                hint="call backward first, or run forwards that need none under torch.no_grad(), "
                "or drop the earlier forward's outputs (and exceptions that hold them)",
            )
        if self.move_out is not None:
            self.move_out()
            self.move_out = None
        self.drain()  # of a forward that was given up
        self.turn()

    @property
    def pending(self) -> InFlight | None:
        """The step whose backward is still to come, if its autograd graph is still alive."""
        step = self._current()
        return None if step is None or step.done else step

    def end(self, step: InFlight) -> None:
        """The backward of `step` begins; raise unless the arena still holds what it needs."""
        if step.done:
            raise StaleActivationsError(
                f"backward ran twice for forward {step.number}; its activations were given up by the first",
                hint="run the forward again, or add the losses before one backward",
            )
        if self._current() is not step:
            raise StaleActivationsError(
                f"the activations of forward {step.number} were overwritten by forward {self.steps}",
                hint="call backward before the next forward",
            )
        step.done = True
        self.turn()
