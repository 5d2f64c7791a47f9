"""`Tracker`: a hook that counts the bytes in the arena and on the host at each step while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from memplan.runtime.debug.hooks import ArenaBlock, EventKind, StepEvent, When


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """The contents of one memory: its bytes (alignment included), and the names of its storages, the oldest first."""

    nbytes: int = 0
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """The bytes that were held while the op of `step` (a step of the schedule) ran.

    `devices` divides the contents of the arena by device, by its name in the plan.
    """

    step: int
    op: str
    arena: HeldBytes
    host: HeldBytes
    devices: Mapping[str, HeldBytes]


class Tracker:
    """A hook that counts the bytes in the arena and on the host while a step runs.

    Use one tracker for each compiled module or step. Bytes outside the arena (parameters, inputs, outputs, gradients
    that the caller keeps) are not counted. A step that ends early has no entries for ops that did not run.

    Attributes:
        steps: An entry for each op of the last training step, or of the current one so far. Each call of the model
            clears it.

    Example:
        ```python
        tracker = memplan.Tracker()
        with compiled.hooks.add(tracker):
            compiled(inputs).sum().backward()
        print(tracker.peak)  # bytes
        ```
    """

    def __init__(self) -> None:
        self.steps: list[Tracked] = []
        self._held: dict[str, dict[str, ArenaBlock]] = {"arena": {}, "host": {}}

    def __call__(self, event: StepEvent) -> None:
        """Count one event."""
        if event.kind is EventKind.EVICT:  # the END of its op has named the blocks already
            return
        if event.when is When.START:
            self._start(event)
        else:
            for block in event.given:
                del self._held[block.memory][block.storage]

    @property
    def now(self) -> Tracked | None:
        """The latest entry of `steps`; None if there is none."""
        return self.steps[-1] if self.steps else None

    @property
    def peak(self) -> int:
        """The most bytes of the arena that were held at once. After a whole step it is the plan's `max_live`."""
        return max((t.arena.nbytes for t in self.steps), default=0)

    def peak_of(self, device: str) -> int:
        """Return the most bytes of the arena that were held at once on one device.

        Args:
            device: The name of the device in the plan.

        Returns:
            Bytes; 0 for a device that has no arena.

        Example:
            ```python
            print(tracker.peak_of("cuda:0"))
            ```
        """
        return max((t.devices[device].nbytes for t in self.steps if device in t.devices), default=0)

    @property
    def host_peak(self) -> int:
        """The most bytes of host memory that were held at once."""
        return max((t.host.nbytes for t in self.steps), default=0)

    def _start(self, event: StepEvent) -> None:
        if event.step == 0:
            self.steps.clear()
            self._held = {"arena": {}, "host": {}}
        for block in event.taken:
            self._held[block.memory][block.storage] = block
        arena, host = (_held(self._held[memory]) for memory in ("arena", "host"))
        by_device: dict[str, dict[str, ArenaBlock]] = {}
        for name, block in self._held["arena"].items():
            by_device.setdefault(block.device, {})[name] = block
        devices = MappingProxyType({device: _held(blocks) for device, blocks in by_device.items()})
        self.steps.append(Tracked(step=event.step, op=event.op, arena=arena, host=host, devices=devices))


def _held(blocks: dict[str, ArenaBlock]) -> HeldBytes:
    return HeldBytes(nbytes=sum(b.nbytes for b in blocks.values()), tensors=tuple(blocks))
