"""Tracks which step owns the bytes of an arena, and raises if another step would overwrite them.

An arena holds the activations of one step. A forward may not start before the backward of the last forward has run,
and a backward runs once. A violation raises `StaleActivationsError`; results are never silently wrong.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from memplan.errors import StaleActivationsError


class ArenaInUse(StaleActivationsError):
    """A step cannot begin, because the arena holds the activations of another one, whose backward has not run."""


def in_another_thread() -> StaleActivationsError:
    """Return the error of a call while another thread runs a step in the same arena."""
    return StaleActivationsError(
        "another thread is running a step in this arena",
        hint="let one thread at a time call a compiled module, or compile one for each thread",
        see="threads",
    )


class OneThread:
    """Lets one thread at a time in, again while it is inside; others get a `StaleActivationsError` and do not wait."""

    def __init__(self) -> None:
        self._inside = threading.RLock()

    def __enter__(self) -> None:
        if not self._inside.acquire(blocking=False):
            raise in_another_thread()

    def __exit__(self, *_: object) -> None:
        self._inside.release()


class LeftGradients(Protocol):
    """Gradients in the arena, of one of its programs."""

    @property
    def arena(self) -> Any:
        """The arena that they are in."""

    def clear(self) -> None:
        """Have nothing refer to the bytes any more, before a step uses them, or they are given back."""


class InFlight:
    """The activations of one forward. It exists as long as its autograd graph; `done` is set by its backward."""

    __slots__ = ("__weakref__", "_first", "_outside", "done", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.done = False
        self._outside: list[Any] = []
        self._first: Callable[[], Any] = lambda: None

    def leaves(self, outside: list[Any]) -> None:
        """Note the activations outside the arena: they are freed with the autograd graph if no backward takes them."""
        self._outside, self._first = outside, weakref.ref(outside[0])

    def __del__(self) -> None:
        outside = self._outside
        if outside and outside[0] is self._first():  # not those of a later forward
            outside.clear()


class ArenaOwnership:
    """Tracks which step owns an arena; programs that share the arena share this object.

    `drain()` returns when no copy into or out of the arena is running; it is called if a step ends early.
    `left` are the gradients that the last backward left in the arena, if there are any: they move out before the bytes
    are used again.
    `order_streams()` makes the work launched from now on wait for the steps before, if they ran on other streams.
    """

    def __init__(self, drain: Callable[[], None], order_streams: Callable[[], None]) -> None:
        self.drain = drain
        self.order_streams = order_streams
        self._lock = threading.Lock()
        self.steps = 0
        self.released = False
        self._current: Callable[[], InFlight | None] = lambda: None
        self.left: LeftGradients | None = None

    def __enter__(self) -> ArenaOwnership:
        """Lock the arena while a program runs; raise `StaleActivationsError` if another thread has locked it."""
        if not self._lock.acquire(blocking=False):
            raise in_another_thread()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is not None:
                self.drain()
        finally:
            self._lock.release()

    def begin(self, *, keep: bool) -> InFlight:
        """Start a step, or raise `ArenaInUse` if one is in flight; `keep`: a backward will follow."""
        self.steps += 1
        self.require_free(f"forward {self.steps}")
        step = InFlight(self.steps)
        self._current = weakref.ref(step) if keep else lambda: None
        return step

    def require_free(self, who: str) -> None:
        """Raise `ArenaInUse` if a step is in flight; otherwise wait for all copies and earlier steps."""
        self._require_memory()
        if self.pending is not None:
            raise ArenaInUse(
                f"{who} would overwrite the activations of forward {self.pending.number}, whose backward has not run",
                hint="call backward first, or run forwards that need none under torch.no_grad(), "
                "or drop the earlier forward's outputs (and exceptions that hold them)",
                see="activations",
            )
        self.clear_left()
        self.drain()  # copies of a forward whose backward will not run
        self.order_streams()

    def _require_memory(self) -> None:
        """Raise `StaleActivationsError` if the arena was freed, because the model was compiled anew."""
        if self.released:
            raise StaleActivationsError(
                "the model was compiled anew, and the arena of this call was freed",
                hint="let one thread at a time call a compiled module, or compile one for each thread",
                see="threads",
            )

    def leave(self, gradients: LeftGradients) -> None:
        """Note the gradients that a backward leaves in the arena."""
        self.left = gradients

    def clear_left(self) -> None:
        """Have the gradients that the last backward left moved out of the arena, whose bytes are about to be used."""
        if self.left is not None:
            self.left.clear()
            self.left = None

    @property
    def has_left(self) -> bool:
        """Whether gradients were left in the arena."""
        return self.left is not None

    @property
    def is_in_use(self) -> bool:
        """Whether a step waits for its backward, or the arena was freed for good."""
        return self.released or self.pending is not None

    @property
    def pending(self) -> InFlight | None:
        """The step whose backward has not run, if its autograd graph is still alive."""
        step = self._current()
        return None if step is None or step.done else step

    @property
    def has_graph(self) -> bool:
        """Whether the autograd graph of the last step is still alive."""
        return self._current() is not None

    def repeat(self) -> None:
        """Start the forward and the backward of an earlier step again, in one; raise as `begin`."""
        self.begin(keep=False)

    def program_now(self, runner: Any) -> Any:
        """Return the program that runs what `runner` ran here when the step began; None if its arena was freed."""
        return None if self.released else runner

    @property
    def may_begin(self) -> bool:
        """Whether a step can begin now without overwriting activations."""
        return self.pending is None and not self.released

    def end(self, step: InFlight) -> None:
        """Start the backward of `step`; raise `StaleActivationsError` unless the arena still holds its activations."""
        if step.done:
            raise StaleActivationsError(
                f"backward ran twice for forward {step.number}; its activations were released by the first",
                hint="run the forward again, or add the losses before one backward",
                see="backward-twice",
            )
        if self._current() is not step:
            raise StaleActivationsError(
                f"the activations of forward {step.number} were overwritten by forward {self.steps}",
                hint="call backward before the next forward",
                see="backward-twice",
            )
        self._require_memory()
        step.done = True
        self.order_streams()
