"""The gradients of parameters that a step has made: in the arena until its bytes are needed again, or added outside.

`ArenaGradients` are those of `gradients="arena"`: they use the bytes of freed activations, so that a step takes no more
than its own peak. What is still in use of them when the next program begins moves out. `AddedGradients` are those of
`gradients="outside"`: where a `.grad` is there already, the backward adds each gradient to it as soon as it is made, so
that a sum needs one set of gradients. It does so where nobody could see a difference: for a plain `backward()`, without
hooks on the parameters, where no other part of the graph uses them. Otherwise autograd adds.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from memplan.core.graph import Value
from memplan.core.in_place import COPY
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, StaleActivationsError
from memplan.runtime.execute.program import Program
from memplan.runtime.guards.module_guards import HookSearch
from memplan.runtime.guards.parameter_guards import ParameterGuards
from memplan.runtime.memory.arena import dtype_of

_log = logging.getLogger("memplan")
_grad, _wants = attrgetter("grad"), attrgetter("requires_grad")
_ALONE = 2  # references to the tensor of a `.grad` if only its parameter and its Python object refer to it
_OWN_REFERENCES = 2  # to a node of autograd: the edge from the step's own node, and the Python object
_KEPT = (
    "%s: something else than its parameter's .grad still refers to the gradient of %r, and keeps a block of %s that it "
    'lies in; from now on gradients are copied out when the backward ends; gradients="outside" has them there at once'
)


class ArenaGradients:
    """The gradients of one program that are in the arena between its steps.

    `slots` (positions in `held`) are their parameters, `values` their values in the program. A reference to one of them
    keeps the block in which it lies alive. `copied`: they are copied out when the backward ends, because something kept
    one, or because the arena cannot leave its block.
    """

    def __init__(
        self, held: ParameterGuards, slots: Sequence[int], values: Sequence[int], program: Program, *, copied: bool
    ) -> None:
        self._held, self._plan, self.arena = held, program.plan, program.arena
        self.copied = copied or program.arena.several
        tensors = [program.namespace.names[f"v{value}"] for value in values]
        self._slots = [slot for slot, t in zip(slots, tensors, strict=True) if t.numel()]
        self._storages = [t.untyped_storage() for t in tensors if t.numel()]
        self._addresses = [storage._cdata for storage in self._storages]
        self._keep_alive()
        self._unreferenced = self._references()

    def _keep_alive(self) -> None:
        """Have each storage keep the block of the arena in which it lies."""
        for storage in self._storages:
            storage.arena = self.arena.memory

    def _references(self) -> list[int]:
        """Return for each storage the number of tensors that use it, and of references to its Python object."""
        return [*map(torch._C._storage_Use_Count, self._addresses), *map(sys.getrefcount, self._storages)]

    def clear(self) -> None:
        """Have nothing refer to the arena's bytes any more, because they are about to be used, or given back.

        Each `.grad` moves out. Where anything else refers to a gradient, the arena leaves its block to that, and takes
        another one; from then on gradients are copied out when the backward ends.

        Raises `BudgetInfeasible` if a budget has no room for gradients beside the arena, and `StaleActivationsError` if
        it has none for two arenas.
        """
        if self._references() == self._unreferenced:
            return
        plan = self._plan
        budget = None if plan.eviction is None else plan.eviction.budget
        need = plan.total + sum(storage.nbytes() for storage in self._storages)
        if budget is not None and need > budget:
            raise BudgetInfeasible(
                f"gradients of the last step are still set; beside the next one they need {format_bytes(need)} in all, "
                f"the budget is {format_bytes(budget)}",
                op="",
                smallest=need,
                where="the gradients of the last step",
                hint='call zero_grad() before each call, compile with gradients="outside", which plans for them, or '
                f"give at least {need} bytes",
            )
        self._move_out()
        if (name := self._holder()) is None:
            return
        if budget is not None:
            raise StaleActivationsError(
                f"the gradient of {name!r} is still referred to by something else than its parameter's .grad (a view, "
                "an array, a result of autograd.grad, another name), and the budget has no room for a second arena",
                hint='drop that before the next step, keep a copy of it, or compile with gradients="outside"',
                see="gradient-kept",
            )
        _log.warning(_KEPT, plan.model, name, format_bytes(self.arena.nbytes))
        self.copied = True
        self.arena.leave_bytes()

    def _move_out(self) -> None:
        """Move each `.grad` that is in the arena to memory of its own."""
        here = set(self._addresses)
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self._held.tensors():
                _move(parameter, here)
        if self._references() != self._unreferenced:
            _end_failed_backward()

    def _holder(self) -> str | None:
        """Return the name of a parameter whose gradient in the arena something refers to; None if there is none."""
        now, free = self._references(), self._unreferenced
        both = [*self._slots, *self._slots]
        slot = next((slot for slot, one, two in zip(both, now, free, strict=True) if one != two), None)
        return None if slot is None else self._held.names[slot]

    def copies(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return gradients of a backward, with copies of those that are in the arena."""
        here = set(self._addresses)
        return tuple(g.clone() if g.untyped_storage()._cdata in here else g for g in gradients)


def _move(parameter: torch.Tensor | None, here: set[int]) -> None:
    """Move `.grad` out of the arena; it stays the same tensor object, unless it is a view."""
    if parameter is None:  # the model has none there any more
        return
    gradient = parameter.grad
    if gradient is None or gradient.untyped_storage()._cdata not in here:
        return
    if gradient._is_view():
        parameter.grad = gradient.clone()
    elif gradient._use_count() <= _ALONE:  # type: ignore[attr-defined]  # nothing like DLPack has its address
        gradient.data = gradient.clone()


def _end_failed_backward() -> None:
    """Run an empty backward: after an exception in a hook, autograd keeps undelivered gradients until the next one."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


class AddedGradients:
    """The second backward of a program: it takes the `.grad` of parameters, and adds to them what it makes.

    `values` are the gradients of the parameters in the graph, in order.
    """

    def __init__(self, program: Program, values: Sequence[int]) -> None:
        graph = program.traced.graph
        self._values = [graph.values[v] for v in values]
        bound, wanted = list(program.bound), set(values)
        for i, op in enumerate(graph.ops):
            if op.target == COPY and wanted.issuperset(op.writes):
                bound[i] = replace(bound[i], function=torch.Tensor.add_)
                wanted.difference_update(op.writes)
        assert not wanted, "a gradient of a parameter is not copied out"
        self.backward: Callable[..., Any] = program.backward_into(values, bound)
        self._hooks = HookSearch()

    def targets(
        self, parameters: Sequence[torch.Tensor], nodes: Sequence[Any], read: Sequence[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """Return the `.grad` of each parameter to add to; None if autograd has to do it.

        `nodes` are the nodes of autograd that take the parameters' gradients; `read` are the tensors outside the arena
        that the backward reads, which must not change while it runs.
        """
        grads = list(map(_grad, parameters))
        if not all(map(_can_take, grads, self._values)) or not all(map(_wants, parameters)):
            return None
        if torch.is_anomaly_enabled() or self._hooks.first(parameters) is not None:
            return None
        if not {t.untyped_storage().data_ptr() for t in read}.isdisjoint(g.untyped_storage().data_ptr() for g in grads):
            return None
        return grads if _counts_references() and all(map(_is_only_user, nodes)) else None


def _can_take(grad: torch.Tensor | None, value: Value) -> bool:
    """Return whether a gradient can be added in place to a `.grad`, as autograd would."""
    return (
        type(grad) is torch.Tensor
        and grad.layout is torch.strided
        and not grad.requires_grad
        and grad.shape == value.shape
        and grad.dtype == dtype_of(value)
        and not grad.is_inference()
    )


def _is_only_user(node: Any) -> bool:
    """Return whether a running backward will execute the node of a parameter, and no other node sends it a gradient."""
    try:
        executed = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad asks for this gradient
        return False
    return bool(executed) and _references(node) == _OWN_REFERENCES


def _references(node: Any) -> int:
    """Return the number of references to a C++ node of autograd: edges to it, and its Python object.

    torch does not tell it. The Python object is a header and a `c10::intrusive_ptr`, whose target has the number after
    its table of functions, or (older releases) a `std::shared_ptr`, where another block has it.
    """
    word = ctypes.sizeof(ctypes.c_void_p)
    target = ctypes.c_void_p.from_address(id(node) + type(node).__basicsize__ - word).value
    assert target is not None
    return ctypes.c_int32.from_address(target + word).value


@cache
def _counts_references() -> bool:
    """Return whether `_references` counts right in this build of torch: it is tried on nodes with known numbers."""
    if sys.implementation.name != "cpython" or sys.platform != "linux":
        return False
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True)
        node = torch.autograd.graph.get_gradient_edge(leaf).node
        if (type(node).__basicsize__ - object.__basicsize__) // ctypes.sizeof(ctypes.c_void_p) not in (1, 2):
            return False
        users = []
        for edges in range(1, 5):
            users.append(leaf.neg())
            if _references(node) != edges + 1:
                return False
        del users[1:]
        return _references(node) == _OWN_REFERENCES
