"""`gradients="auto"` and `"arena"`: keep the gradients of parameters in the arena until the next step needs the bytes.

They use the bytes of freed activations, so that a step takes no more than its own peak; outside the arena, they would
add to it. A `.grad` that is still set when the next program begins is moved out of the arena. With "auto", gradients
stay outside from then on: a step with a backward raises `GradientsInUse`, and is compiled anew.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import CellType
from typing import Any

import torch

from memplan.errors import StaleActivationsError
from memplan.runtime.execute.program import Program
from memplan.runtime.guards.parameter_guards import ParameterGuards
from memplan.runtime.memory.arena import Arena

Parked = list[tuple[torch.Tensor, torch.device]]  # gradients, and the devices that they come from
_ALONE = 2  # references to the tensor of a `.grad` if only its parameter and its Python object refer to it


class GradientsInUse(Exception):
    """Raised when a step with a backward begins while gradients of the last one, in its arena, are still in use."""

    def __init__(self, gradients: ArenaGradients) -> None:
        super().__init__("gradients in the arena are still in use")
        self.gradients = gradients


class ArenaGradients:
    """The gradients of one program that are in the arena between its steps.

    `slots` (positions in `held`) are their parameters, `values` their values in `program`. A reference to one of them
    keeps the whole arena alive. `temporary`: until one of them is still in use at the next step.
    """

    def __init__(
        self,
        held: ParameterGuards,
        slots: Sequence[int],
        values: Sequence[int],
        program: Program,
        *,
        temporary: bool = False,
    ) -> None:
        self._held = held
        tensors = [program.namespace.names[f"v{value}"] for value in values]
        self._namespace, self.arena, self.plan = program.namespace, program.arena, program.plan
        self._temporary = temporary
        self._slots = [slot for slot, t in zip(slots, tensors, strict=True) if t.numel()]
        self._storages = [t.untyped_storage() for t in tensors if t.numel()]
        self._addresses = [storage._cdata for storage in self._storages]
        self.nbytes = sum(storage.nbytes() for storage in self._storages)
        self._keep(program.arena)
        self._unreferenced = self._references()

    def _keep(self, arena: Arena) -> None:
        for storage in self._storages:
            storage.arena = arena.memory

    def _references(self) -> list[int]:
        """Return for each storage the number of tensors that use it, and of references to its Python object."""
        return [*map(torch._C._storage_Use_Count, self._addresses), *map(sys.getrefcount, self._storages)]

    @property
    def are_unshared(self) -> bool:
        """Whether nothing but the `.grad` of parameters has their bytes: no view, array, or other tensor."""
        parameters = {id(p): p for p in self._held.tensors()}.values()  # those that modules share are held twice
        given = Counter(p.grad.untyped_storage()._cdata for p in parameters if p.grad is not None)
        expected = [n + given[address] for address, n in zip(self._addresses, self._unreferenced, strict=False)]
        return self._references() == [*expected, *self._unreferenced[len(expected) :]]

    def require_unset(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise `GradientsInUse` if a parameter has a `.grad`, to which the step would add a second set of gradients.

        Where gradients are in the arena for good, nothing is raised.
        """
        free = self.arena.ownership.pending is None  # otherwise the step cannot begin, for another reason
        if self._temporary and free and any(p.grad is not None for p in parameters):
            left = self.arena.ownership.left  # maybe those of another program
            raise GradientsInUse(left if isinstance(left, ArenaGradients) else self)

    def vacate(self, has_backward: bool) -> None:
        """Move each `.grad` that is in the arena out of it, before a step with a backward or without uses the bytes.

        Raises `GradientsInUse` instead if gradients are to stay outside from now on: before a step with a backward, if
        anything else refers to a gradient, and if a budget has no room for both. Where they are in the arena for good,
        raises `StaleActivationsError` if anything else refers to a gradient, which would be overwritten.
        """
        if self._references() == self._unreferenced:
            return
        if self._temporary and (has_backward or self.lacks_room):
            raise GradientsInUse(self)
        try:
            self.clear()
        except StaleActivationsError:
            if self._temporary:
                raise GradientsInUse(self) from None
            raise

    @property
    def lacks_room(self) -> bool:
        """Whether the gradients, moved out of the arena, would exceed the plan's budget together with it."""
        budget = None if self.plan.eviction is None else self.plan.eviction.budget
        return budget is not None and self.plan.total + self.nbytes > budget

    def move_out(self) -> None:
        """Move each `.grad` that is in the arena to memory of its own."""
        here = set(self._addresses)
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self._held.tensors():
                _move(parameter, here)
        if self._references() != self._unreferenced:
            _end_failed_backward()

    def park(self, parked: Parked) -> None:
        """Move each `.grad` in the arena out of the memory of its device, and add it to `parked` for `unpark`.

        It stays the same tensor object. One that something else refers to stays where it is.
        """
        here = set(self._addresses)
        with torch.inference_mode(False), torch.no_grad():
            for p in self._held.tensors():
                gradient = p.grad
                if gradient is not None and gradient.untyped_storage()._cdata in here and _can_move(gradient):
                    device = gradient.device
                    gradient.data = _elsewhere(gradient)
                    parked.append((gradient, device))

    def clear(self) -> None:
        """Move each `.grad` out of the arena; raise `StaleActivationsError` if something else refers to a gradient."""
        if self._references() == self._unreferenced:
            return
        self.move_out()
        if name := self.holder():
            raise referred(name, 'or compile with gradients="safe"')

    def try_to_clear(self) -> bool:
        """Move the gradients out of the arena, those with other names in Python too; return whether all could be."""
        self.move_out()
        if self.holder():
            self.move_names_out()
        return self.holder() is None

    def give_up_arena(self, *, free: bool) -> None:
        """Have no program use the arena that the gradients were in any more, and free its bytes if `free` is set."""
        whole: Arena = getattr(self.arena, "whole", self.arena)
        whole.ownership.released = True
        if free:
            whole.release()

    def copies(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return gradients of a backward, with copies of those that are in the arena."""
        here = set(self._addresses)
        return tuple(g.clone() if g.untyped_storage()._cdata in here else g for g in gradients)

    def move_names_out(self) -> None:
        """Move the gradients to which nothing but names, containers and attributes of Python objects refer.

        An array or a view of one shares its address: such gradients stay. It walks all objects of the process.
        """
        here, frames = set(self._addresses), list(_locals())
        own = set(map(id, self._namespace.names.values()))
        found = [t for t in gc.get_objects() if type(t) is torch.Tensor and _is_plain(t)]
        with torch.inference_mode(False), torch.no_grad():
            while found:
                t = found.pop()
                inside = t.untyped_storage()._cdata in here
                if (
                    inside
                    and id(t) not in own
                    and not t._is_view()
                    and sys.getrefcount(t) - 2 == _visible(t, frames, found)
                ):
                    t.data = t.clone()

    def holder(self) -> str | None:
        """Return the name of a parameter whose gradient in the arena something refers to; None if there is none."""
        now, free = self._references(), self._unreferenced
        both = [*self._slots, *self._slots]
        slot = next((slot for slot, one, two in zip(both, now, free, strict=True) if one != two), None)
        return None if slot is None else self._held.names[slot]


def unpark(parked: Parked) -> None:
    """Move the gradients that `ArenaGradients.park` has moved back to their devices."""
    with torch.inference_mode(False), torch.no_grad():
        for gradient, device in parked:
            gradient.data = gradient.data.to(device, copy=True)


def _elsewhere(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, and of what is there, in a temporary file."""
    if gradient.device.type != "cpu":
        return gradient.cpu()
    with tempfile.NamedTemporaryFile() as file:
        size = gradient.untyped_storage().nbytes() // gradient.itemsize
        mapped = torch.from_file(file.name, shared=True, size=size, dtype=gradient.dtype)
    return mapped.as_strided(gradient.shape, gradient.stride()).copy_(gradient)


def _move(parameter: torch.Tensor, here: set[int]) -> None:
    """Move `.grad` out of the arena; it stays the same tensor object, unless it is a view."""
    gradient = parameter.grad
    if gradient is None or gradient.untyped_storage()._cdata not in here:
        return
    if gradient._is_view():
        parameter.grad = gradient.clone()
    elif _can_move(gradient):
        gradient.data = gradient.clone()


def _can_move(gradient: torch.Tensor) -> bool:
    """Return whether a `.grad` can get other memory: it is no view, and nothing like DLPack has its address."""
    return not gradient._is_view() and gradient._use_count() <= _ALONE  # type: ignore[attr-defined]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether only its Python object refers to a tensor, which has plain memory."""
    plain = tensor.layout is torch.strided and torch._C._has_storage(tensor)  # torch.func's wrappers have none
    return plain and tensor._use_count() == 1  # type: ignore[attr-defined]


def _locals() -> Iterator[list[Any]]:
    """Yield the local variables of every function that runs, in all threads, apart from this module's.

    The variables of a module that runs are in a dict, which refers to them.
    """
    for frame in sys._current_frames().values():
        at = frame
        while at is not None:
            if at.f_code.co_filename != __file__ and at.f_locals is not at.f_globals:
                yield list(at.f_locals.values())
            at = at.f_back  # type: ignore[assignment]


def _visible(tensor: torch.Tensor, frames: list[list[Any]], ours: list[Any]) -> int:
    """Return the number of references to a tensor from containers, attributes and local variables.

    `frames` holds a second reference for each local variable; `ours` is no reference of the user's.
    """
    wanted = id(tensor)  # in the generators below: `tensor` itself would become a cell that refers to it
    count = 2 * sum(id(value) == wanted for values in frames for value in values)
    own = {id(ours), id(frames), *map(id, frames)}
    for referrer in gc.get_referrers(tensor):
        if id(referrer) in own:
            continue
        held: Iterable[Any] = ()
        if isinstance(referrer, dict):
            held = referrer.values()
        elif isinstance(referrer, (list, tuple)):
            held = referrer
        elif isinstance(referrer, CellType):
            held = (referrer.cell_contents,)
        elif hasattr(referrer, "__dict__"):
            held = vars(referrer).values()
        count += sum(id(value) == wanted for value in held)
    return count


def _end_failed_backward() -> None:
    """Run an empty backward: after an exception in a hook, autograd keeps undelivered gradients until the next one."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def referred(name: str, instead: str) -> StaleActivationsError:
    """Return the error for a gradient that something else refers to; `instead`: the second half of the hint."""
    return StaleActivationsError(
        f"the gradient of {name!r} is still referred to by something else than its parameter's .grad (a view, an "
        "array, a result of autograd.grad, another name), and this step would overwrite it",
        hint=f"drop that before the next step, keep a copy of it, {instead}",
        see="gradient-kept",
    )
