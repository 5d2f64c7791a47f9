"""Counts the bytes on the device during a step, from what the wrappers of its forward and its backward do."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from memplan.integrations.inductor.wrapper_lines import Act, WrapperChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTensor:
    """A tensor that is there before the step: the bytes of its storage, and a key that is equal for equal storages."""

    storage: Hashable
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """The bytes of a step on the device.

    `standing` were there before it: parameters, buffers and inputs. `forward` and `backward` are the peaks of both
    parts, everything counted; `saved` is what the forward leaves for the backward.
    """

    standing: int
    forward: int
    backward: int
    saved: int

    @property
    def peak(self) -> int:
        """The peak of the step."""
        return max(self.forward, self.backward)


def step_bytes(
    forward: WrapperChanges,
    backward: WrapperChanges,
    *,
    given: Sequence[GivenTensor | None],
    links: Mapping[int, int],
    results: int,
    tangents: Mapping[int, int],
    cloned: Iterable[int] = (),
    alignment: int = 1,
) -> StepBytes:
    """Return the bytes of a step.

    Args:
        forward: What the wrapper of the forward does.
        backward: The same for the backward.
        given: What is passed to the forward, by the position of the input; None for what is no tensor.
        links: The position of a result of the forward, for each position of an input of the backward that is one.
        results: How many results of the forward are for its caller; they come first.
        tangents: The bytes of each gradient that comes in, by its position among the inputs of the backward.
        cloned: Positions of results of the backward that autograd copies when it keeps them as gradients.
        alignment: Bytes to which the allocator rounds sizes up.

    Example:
        >>> step_bytes(forward, backward, given=given, links={0: 1}, results=1, tangents={1: 4}).peak
    """
    memory = _Memory(alignment)
    for name, tensor in zip(forward.inputs, given, strict=True):
        if tensor is not None:
            memory.hold(name, tensor.storage, tensor.nbytes)
    standing = memory.live
    memory.keep(forward.inputs)
    memory.run(forward)
    kept = [memory.storages_of(name) for name in forward.outputs]
    memory.retain(s for one in kept[:results] for s in one)
    first = memory.peak
    saved = [one for position, one in enumerate(kept) if position >= results]
    memory.leave({s for one in kept for s in one})
    between = memory.live
    left = {s for one in saved for s in one}
    taken: dict[str, tuple[Hashable, ...]] = {}
    for position, name in enumerate(backward.inputs):
        if position in links:
            taken[name] = kept[links[position]]
    memory.peak = memory.live
    memory.enter(taken)
    for position, nbytes in tangents.items():
        memory.hold(backward.inputs[position], ("tangent", position), nbytes)
        memory.retain((("tangent", position),))
    memory.run(backward)
    ends = [memory.storages_of(name) for name in backward.outputs]
    memory.leave({s for one in ends for s in one})
    memory.clone([ends[i] for i in cloned], ends)
    return StepBytes(
        standing=standing,
        forward=first,
        backward=memory.peak,
        saved=sum(memory.sizes[s] for s in left if s not in memory.before) if between else 0,
    )


class _Memory:
    """The storages that are live, and the variables that refer to them."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.sizes: dict[Hashable, int] = {}
        self.variables: dict[str, tuple[Hashable, ...]] = {}
        self.counts: dict[Hashable, int] = {}  # references by variables and by others
        self.before: set[Hashable] = set()
        self.live = 0
        self.peak = 0
        self._made = 0

    def hold(self, name: str, storage: Hashable, nbytes: int) -> None:
        """Let a variable refer to a storage, which is new if nothing does yet."""
        if storage not in self.counts:
            self.sizes[storage] = -(-nbytes // self.alignment) * self.alignment
            self.counts[storage] = 0
            self.live += self.sizes[storage]
            self.peak = max(self.peak, self.live)
        self._assign(name, (storage,))

    def keep(self, names: Iterable[str]) -> None:
        """Keep what these variables refer to for good: the caller of the step owns it."""
        self.before = {s for name in names for s in self.storages_of(name)}
        self.retain(self.before)

    def retain(self, storages: Iterable[Hashable]) -> None:
        """Keep storages, whatever variables refer to them."""
        for storage in storages:
            self.counts[storage] += 1

    def storages_of(self, name: str | None) -> tuple[Hashable, ...]:
        """Return the storages that a variable refers to."""
        return () if name is None else self.variables.get(name, ())

    def run(self, wrapper: WrapperChanges) -> None:
        """Make the changes of a wrapper."""
        for act, name, nbytes, of in wrapper.changes:
            if act is Act.MAKE:
                self._made += 1
                self.hold(name, ("made", self._made), nbytes)
            elif act is Act.NEED:
                self.peak = max(self.peak, self.live + nbytes)
            elif act is Act.SHARE:
                self._assign(name, tuple(dict.fromkeys(s for one in of for s in self.storages_of(one))))
            else:
                items = [other for other in self.variables if other.startswith(f"{name}[")]
                for one in (name, *items):
                    self._release(self.variables.pop(one, ()))

    def leave(self, returned: Iterable[Hashable]) -> None:
        """End a call: its variables are gone, and something else refers to what it returned."""
        self.retain(returned)
        for name in list(self.variables):
            self._release(self.variables.pop(name))

    def enter(self, arguments: Mapping[str, tuple[Hashable, ...]]) -> None:
        """Begin a call with arguments that nothing else refers to, but for what is retained."""
        moved: set[Hashable] = set()
        for name, storages in arguments.items():
            self._assign(name, storages)
            moved.update(storages)
        self._release(tuple(moved))

    def clone(self, copied: Sequence[tuple[Hashable, ...]], ends: Sequence[tuple[Hashable, ...]]) -> None:
        """Copy results one after another; the first of each is freed if no other result is in its memory."""
        for storages in copied:
            for s in storages:
                shared = sum(s in one for one in ends) > 1 or s in self.before
                self.live += self.sizes[s]
                self.peak = max(self.peak, self.live)
                self.live -= 0 if shared else self.sizes[s]

    def _assign(self, name: str, storages: tuple[Hashable, ...]) -> None:
        self.retain(storages)
        self._release(self.variables.pop(name, ()))
        self.variables[name] = storages

    def _release(self, storages: Iterable[Hashable]) -> None:
        for storage in storages:
            self.counts[storage] -= 1
            if not self.counts[storage]:
                del self.counts[storage]
                self.live -= self.sizes[storage]
