"""Runs ops on tensors of the host beside the device and its copies: one after another, in a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch

from memplan.devices.kinds import is_accelerator
from memplan.devices.streams import new_event, record


class HostLane:
    """The thread of the host's ops of a step. It starts with the first of them.

    An op runs after all that was launched on `devices` before it was started. `before`: called in the thread before
    each op; tests delay ops so, or make them fail.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.before: Callable[[], object] | None = None
        self._devices = [device for device in devices if is_accelerator(device)]
        self._thread: ThreadPoolExecutor | None = None
        self._started: list[Future[None]] = []

    def starter(self, function: Callable[..., object]) -> Callable[..., None]:
        """Return a function that starts `function` with its arguments."""
        return partial(self.start, function)

    def start(self, function: Callable[..., object], /, *args: Any, **kwargs: Any) -> None:
        """Put the call of a function in the queue of the thread."""
        events = [new_event(device) for device in self._devices]
        for event, device in zip(events, self._devices, strict=True):
            record(event, device)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "memplan host ops")
        self._started.append(self._thread.submit(self._run, events, self.before, function, args, kwargs))

    def _run(
        self,
        events: Sequence[torch.Event],
        before: Callable[[], object] | None,
        function: Callable[..., object],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        for event in events:
            event.synchronize()
        if before is not None:
            before()
        with torch._C._AutoDispatchBelowADInplaceOrView(), torch.no_grad():  # as generated code, in another thread
            function(*args, **kwargs)

    def drain(self) -> None:
        """Return when no op is running, of a step that has failed: what its ops raised is forgotten."""
        wait(self._started)
        self._started.clear()

    def settle(self) -> None:
        """Block until all ops have run; raise the first error that one of them raised."""
        wait(self._started)
        started, self._started = self._started, []
        for one in started:
            one.result()

    def close(self) -> None:
        """End the thread when its ops have run; a later op starts another."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None
