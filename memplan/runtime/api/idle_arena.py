"""`IdleArena`: keeps the idle arena of a compiled model, beside what else runs then, from needing more than eager.

An arena is idle while an optimizer updates, and while other models run. Compiled models of one thread know of each
other: where their idle arenas would take a step above eager's peak, all of them allocate while they run instead.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from memplan.errors import MemplanError
from memplan.planning.measured import NOTICEABLE_SHARE
from memplan.runtime.api.compilation import Compilation
from memplan.runtime.api.pending_calls import PendingCalls
from memplan.runtime.execute.arena_gradients import GradientsInUse
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import OneThread
from memplan.runtime.room_for_update import compared, made_room
from memplan.trace.optimizer.first_update import FirstUpdate

_log = logging.getLogger("memplan")
_STEPS_WITHOUT_UPDATE = 2  # after which a loop is known to have no optimizer
_GIVES_UP = (
    "%s: its arena, idle beside an update or the step of another model, would take them above what eager needs; from "
    "now on its steps allocate what they need while they run"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsNow:
    """The programs by which a compiled model runs now, those of calls that wait for their backward among them.

    `fixed`: whether they stay as they are, because steps are measured, or the model is about to be compiled again.
    """

    compilation: Compilation
    pending: PendingCalls | None
    fixed: bool

    @property
    def may_change(self) -> bool:
        """Whether other programs may take their place, with another arena or none."""
        of = self.compilation
        return not self.fixed and of.given is None and of.builder.options.plans_for_updates

    @property
    def arena(self) -> Arena:
        """The arena that the programs share."""
        shared = None if self.pending is None else self.pending.coordinator.shared
        return self.compilation.builder.arena or shared or self.compilation.selector.main.arena

    @property
    def idle_bytes(self) -> int:
        """The bytes of its arena, if no call in it waits for its backward; else 0."""
        if self.pending is not None:
            return 0 if self.pending.coordinator.waiting else self.pending.nbytes
        ownership = self.arena.ownership
        return 0 if ownership.released or ownership.pending is not None else self.arena.held

    def give_back_arena(self) -> None:
        """Give its bytes back until a program runs again, if no call is in flight, because something else runs now."""
        programs = self.compilation.selector.programs_of_calls
        if not all(runner.may_give_back for runner in programs):
            return
        if self.pending is not None:
            self.pending.release(lend=True)
        else:
            self.arena.give_back_idle()


class IdleArena:
    """The arena of one compiled model, which is compared with eager when an optimizer updates for the first time.

    `now` is a method, whose object is not kept alive; it returns what runs, None before the model is compiled.
    `calling` is held by calls of the model.
    """

    def __init__(self, model: str, now: Callable[[], RunsNow | None], calling: OneThread) -> None:
        self._model, self._calling = model, calling
        self._now = weakref.WeakMethod(now)
        self._update: FirstUpdate | None = None
        self._first_call = 0  # its number among all calls of its thread; 0 before
        self._gives_up = False  # at the next call

    @property
    def runs(self) -> RunsNow | None:
        """The programs that its model runs now; None if it is not compiled so far."""
        now = self._now()
        return None if now is None else now()

    def wait_for_update(self, parameters: Callable[[], Iterable[torch.nn.Parameter]]) -> None:
        """Compare with eager right before the first update of some of these parameters."""
        self._update = FirstUpdate(parameters, self._make_room)

    def wait_no_longer(self) -> None:
        """Compare with eager no more: its steps have no arena."""
        self._update = None

    def begin_call(self) -> None:
        """Note a call that is about to run, and do before it what an earlier comparison found, or left for later."""
        number = _THREAD.note_call(self)
        self._first_call = self._first_call or number
        runs = self.runs
        assert runs is not None
        if self._gives_up:
            self._allocate_while_running(runs)
        elif self._update is None:
            return
        elif runs.pending is not None:
            if runs.pending.coordinator.has_new_kind:
                self._make_room(self._update)
        elif not self._update.name and runs.compilation.selector.main.caller.backwards >= _STEPS_WITHOUT_UPDATE:
            self._update.expect_none()

    def give_up(self) -> None:
        """Have its model allocate what its steps need while they run, from the next call on, if its options allow."""
        runs = self.runs
        if runs is not None and runs.may_change and not runs.compilation.builder.outside:
            self._gives_up = True

    def _make_room(self, update: FirstUpdate) -> bool:
        """Free the arena while an optimizer runs for the first time, if both need more than eager, for a smaller one.

        Programs of training become smaller at their next call. Returns whether they do; nothing changes while the
        arena, or a gradient in it, is in use.
        """
        with self._calling:
            return compared(self._model, lambda: self._made_room(update))

    def _made_room(self, update: FirstUpdate) -> bool:
        """Do what `_make_room` does; raise what goes wrong in it."""
        runs = self.runs
        if runs is None or not runs.may_change:
            return False
        builder, programs = runs.compilation.builder, runs.compilation.selector.programs_of_calls
        others = _THREAD.others_since(self._first_call, self, runs.arena.device)
        beside = sum(its.idle_bytes for _, its in others if its.may_change)
        if beside >= max(one.plan.on_device for one in programs) * NOTICEABLE_SHARE:
            for one in (self, *(other for other, _ in others)):
                one.give_up()
            if self._gives_up:
                return self._allocate_while_running(runs)
        if runs.pending is not None:
            return made_room(runs.pending.coordinator, builder.options, update) is not None
        left = runs.arena.ownership.left
        if left is not None and not left.are_unshared:
            return False
        found = builder.leave_room_for_update(programs, update)
        if update.is_unknown or builder.is_more_than_eager(programs, update):
            builder.give_up_arena(programs)
            return True
        return found

    def _allocate_while_running(self, runs: RunsNow) -> bool:
        """Have the programs replaced by those that need no arena; return False while a call waits for its backward."""
        builder = runs.compilation.builder
        try:
            if runs.pending is None:
                builder.give_up_arena(runs.compilation.selector.programs_of_calls)
            elif runs.pending.give_up_arena():
                builder.outside = True
            else:
                return False
        except (MemplanError, GradientsInUse):
            return False
        self._gives_up = False
        _log.info(_GIVES_UP, runs.compilation.plan.model)
        return True


class _CallsOfThread(threading.local):
    """The arenas of one thread's models, with the number of the last call of each among all calls."""

    def __init__(self) -> None:
        self._last_call: weakref.WeakKeyDictionary[IdleArena, int] = weakref.WeakKeyDictionary()
        self._calls = 0

    def note_call(self, of: IdleArena) -> int:
        """Note a call of a model; return its number among the calls of this thread."""
        self._calls += 1
        self._last_call[of] = self._calls
        return self._calls

    def others_since(self, call: int, of: IdleArena, device: torch.device) -> list[tuple[IdleArena, RunsNow]]:
        """Return what other models on a device run that were called since a call."""
        called = [one for one, number in tuple(self._last_call.items()) if number > call and one is not of]
        now = ((one, one.runs) for one in called)
        return [(one, runs) for one, runs in now if runs is not None and runs.arena.device == device]


_THREAD = _CallsOfThread()
