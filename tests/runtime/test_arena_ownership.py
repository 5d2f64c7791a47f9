"""Who owns the bytes of an arena, and when another step may have them."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest

from memplan.errors import StaleActivationsError
from memplan.runtime.memory.arena_ownership import ArenaOwnership, InFlight


class _Calls:
    """An arena's owner whose waits are noted in order."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.owner = ArenaOwnership(lambda: self.made.append("drain"), lambda: self.made.append("turn"))


def _pending(owner: ArenaOwnership) -> InFlight | None:
    """The step in flight; asked anew each time."""
    return owner.pending


def test_no_forward_overwrites_activations_that_a_backward_will_read() -> None:
    calls = _Calls()
    owner = calls.owner
    first = owner.begin(keep=True)
    assert _pending(owner) is first
    calls.made.clear()
    with pytest.raises(StaleActivationsError, match=r"forward 2 would overwrite the activations of forward 1, whose"):
        owner.begin(keep=False)
    with pytest.raises(StaleActivationsError, match=r"^another program would overwrite the activations of forward 1"):
        owner.require_free("another program")
    assert calls.made == []
    owner.end(first)
    assert _pending(owner) is None
    owner.require_free("another program")


def test_a_forward_whose_graph_is_gone_blocks_nothing() -> None:
    owner = _Calls().owner
    step = owner.begin(keep=True)
    assert _pending(owner) is step
    del step
    gc.collect()
    assert _pending(owner) is None
    owner.begin(keep=True)


def test_a_step_waits_until_gradients_moved_out_copies_ended_and_earlier_steps_ran() -> None:
    calls = _Calls()
    calls.owner.left.append(SimpleNamespace(clear=lambda: calls.made.append("move out")))  # type: ignore[arg-type]
    step = calls.owner.begin(keep=False)
    assert calls.made == ["move out", "drain", "turn"]
    assert _pending(calls.owner) is None, "no backward follows"
    with pytest.raises(StaleActivationsError, match="activations of forward 1 were overwritten by forward 1"):
        calls.owner.end(step)
    calls.owner.end(calls.owner.begin(keep=True))
    assert calls.made[3:] == ["drain", "turn", "turn"]


def test_a_backward_runs_once_and_only_on_its_own_activations() -> None:
    owner = _Calls().owner
    first = owner.begin(keep=True)
    owner.end(first)
    with pytest.raises(StaleActivationsError, match="backward ran twice for forward 1"):
        owner.end(first)
    second = owner.begin(keep=True)
    owner.end(second)
    first.done = False
    with pytest.raises(StaleActivationsError, match="activations of forward 1 were overwritten by forward 2"):
        owner.end(first)
    assert not first.done


def test_one_thread_at_a_time_runs_in_an_arena() -> None:
    owner = _Calls().owner
    heard: list[str] = []

    def other() -> None:
        try:
            with owner:
                heard.append("entered")
        except StaleActivationsError as error:
            heard.append(str(error))

    def run() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with owner as entered:
        assert entered is owner
        run()
    run()
    assert heard[0].startswith("another thread is running a step in this arena")
    assert heard[1:] == ["entered"]


def test_copies_end_before_an_error_leaves_the_arena_and_the_lock_is_always_released() -> None:
    calls = _Calls()
    with calls.owner:
        pass
    assert calls.made == []
    with pytest.raises(ValueError, match="wrong"), calls.owner:
        raise ValueError("wrong")
    assert calls.made == ["drain"]
    with calls.owner:
        assert calls.made == ["drain"]

    def fail() -> None:
        raise RuntimeError("a copy failed")

    calls.owner.drain = fail
    with pytest.raises(RuntimeError, match="a copy failed"), calls.owner:
        raise ValueError("wrong")
    with calls.owner:
        assert calls.owner.pending is None
