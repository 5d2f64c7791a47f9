"""The tracker: what lies in the arena and on the host at each step, counted while the step runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from memplan.runtime.debug.hooks import ArenaBlock, EventKind, StepEvent, When


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """What one memory holds: how many bytes (alignment included), and the names of the storages, the oldest first."""

    nbytes: int = 0
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """What was held while the op of `step` ran. Steps are those of the plan. `devices`: of what the arena held, what
    lay on which device, by its name in the plan.
    """

    step: int
    op: str
    arena: HeldBytes
    host: HeldBytes
    devices: Mapping[str, HeldBytes]


class Tracker:
    """A hook that counts: `compiled.hooks.add(tracker)`; one for each thing that is compiled.

    `steps` is what the last step of training did, or what is done so far of the one that is under way; each call of
    the model begins anew. Bytes beside the arena (parameters, inputs, outputs, gradients that the caller keeps) are
    not counted: no plan moves them. A step that ends early has no entries for what did not run.
    """

    def __init__(self) -> None:
        self.steps: list[Tracked] = []
        self._held: dict[str, dict[str, ArenaBlock]] = {"arena": {}, "host": {}}

    def __call__(self, event: StepEvent) -> None:
        """Take one event in."""
        if event.kind is EventKind.EVICT:  # an end before it has said which blocks go
            return
        if event.when is When.START:
            self._start(event)
        else:
            for block in event.given:
                del self._held[block.memory][block.storage]

    @property
    def now(self) -> Tracked | None:
        """The latest entry of `steps`."""
        return self.steps[-1] if self.steps else None

    @property
    def peak(self) -> int:
        """The most bytes of the arena that were held at once: the plan's `max_live` after a whole step."""
        return max((t.arena.nbytes for t in self.steps), default=0)

    def peak_of(self, device: str) -> int:
        """The most bytes that were held at once on one device: the `max_live` of its section of the plan."""
        return max((t.devices[device].nbytes for t in self.steps if device in t.devices), default=0)

    @property
    def host_peak(self) -> int:
        """The most bytes on the host that were held at once."""
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
