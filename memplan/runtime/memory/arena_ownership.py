"""Tracks which step owns the bytes of an arena, and raises if another step would overwrite them.

An arena holds the activations of one step. A forward may not start before the backward of the last forward has run,
and a backward runs once. A violation raises `StaleActivationsError`; results are never silently wrong.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memplan.errors import StaleActivationsError

if TYPE_CHECKING:
    from memplan.runtime.execute.gradients import ArenaGradients
    from memplan.runtime.execute.instances import ProgramInstance
    from memplan.runtime.memory.arena import Arena
    from memplan.runtime.memory.shared_arena import ArenaCoordinator


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


def clear_gradients(left: list[ArenaGradients], arena: Arena | None = None) -> None:
    """Move the gradients of earlier steps out of an arena, or out of any, before a step uses the bytes."""
    for gradients in tuple(left):
        if arena is None or gradients.arena.shares_memory(arena):
            gradients.clear()
            left.remove(gradients)


class ArenaOwnership:
    """Tracks which step owns an arena; programs that share the arena share this object.

    `drain()` returns when no copy into or out of the arena is running; it is called if a step ends early.
    `left` are the gradients that backwards left in the arena, if there are any: they move out before the bytes are used
    again.
    `order_streams()` makes the work launched from now on wait for the steps before, if they ran on other streams.
    With a `coordinator`, it is of one `instance` of a program, and reports each forward and backward; steps of all
    instances of a coordinator exclude each other.
    """

    def __init__(
        self,
        drain: Callable[[], None],
        order_streams: Callable[[], None],
        coordinator: ArenaCoordinator | None = None,
    ) -> None:
        self.drain = drain
        self.order_streams = order_streams
        self.steps = 0
        self.coordinator = coordinator
        self.instance: Callable[[], ProgramInstance | None] = lambda: None
        self._lock = threading.Lock() if coordinator is None else coordinator.running
        self.left: list[ArenaGradients] = [] if coordinator is None else coordinator.left
        self._current: Callable[[], InFlight | None] = lambda: None
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []

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
        self._aside = []
        self._report(backward=False)
        return step

    def require_free(self, who: str) -> None:
        """Raise `ArenaInUse` if a step is in flight; otherwise wait for all copies and earlier steps."""
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

    def clear_left(self) -> None:
        """Have gradients that backwards left moved out of the bytes that are about to be used."""
        if self.left:
            instance = self.instance()
            clear_gradients(self.left, None if instance is None else instance.arena)

    @property
    def is_in_use(self) -> bool:
        """Whether a step, or that of any instance of the coordinator, waits for its backward."""
        return self.pending is not None or (self.coordinator is not None and bool(self.coordinator.waiting))

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
        self._report(backward=True)

    def program_now(self, runner: Any) -> Any:
        """Return the program that runs what `runner` ran here, which may have moved; None if its bytes are used."""
        if self.coordinator is None:
            return runner
        instance = self.instance()
        if instance is None or self.pending is not None:
            return None
        self.coordinator.settle(instance)
        return instance.runner

    @property
    def may_begin(self) -> bool:
        """Whether a step can begin now without overwriting activations."""
        if self.pending is not None:
            return False
        instance = self.instance()
        if instance is None or self.coordinator is None:
            return True
        return not self.coordinator.overwritten_by(instance, backward=False)

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
        self.clear_left()
        step.done = True
        self.order_streams()
        self._report(backward=True)
        for place, saved in self._aside:
            place.copy_(saved)
        self._aside = []

    @property
    def is_aside(self) -> bool:
        """Whether copies of the activations in flight were made, because their bytes are used by another step."""
        return bool(self._aside)

    def set_aside(self, instance: ProgramInstance) -> None:
        """Copy the activations in flight, which another step is about to overwrite; they return for their backward."""
        plan, arena = instance.runner.plan, instance.arena
        split, offsets = plan.graph.forward_ops, plan.solution.offsets
        saved = [b for b in plan.problem.buffers if b.size and b.live.start < split < b.live.end]
        places = [arena.bytes_at(plan, offsets[b.id], offsets[b.id] + b.size) for b in saved]
        self.drain()
        self._aside = [(place, place.clone()) for place in places]

    def _report(self, *, backward: bool) -> None:
        instance = self.instance()
        if instance is not None and self.coordinator is not None:
            self.coordinator.record_event(instance, backward=backward)
