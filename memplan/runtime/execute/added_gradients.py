"""`gradients="added"`: adds each gradient to the parameter's `.grad` as soon as it is made, as one node of autograd.

Autograd would get all gradients of a step at once, and add them to those of the steps before only then: two sets. A
backward that adds each one itself needs one set and one gradient. It does so where nobody could see a difference: for
a plain `backward()`, without hooks on the parameters, where no other part of the graph uses them. Where several calls
have one backward, the first one returns its gradients to autograd, and the others add theirs to those while they wait
there. Otherwise gradients are returned to autograd.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from memplan.core.graph import Value
from memplan.runtime.execute.held_gradients import are_in_buffers_alone
from memplan.runtime.execute.program import Program
from memplan.runtime.guards.hook_counts import HookSearch
from memplan.runtime.kernels.kernel_selection import BoundOp
from memplan.runtime.memory.arena import dtype_of

_grad, _wants = attrgetter("grad"), attrgetter("requires_grad")
_COPY = "aten.copy_.default"


class AddedGradients:
    """The second backward of a program: it takes the `.grad` of parameters, and adds to them what it makes.

    `values` are the gradients of the parameters in the graph, in order.
    """

    def __init__(self, program: Program, values: Sequence[int]) -> None:
        graph = program.traced.graph
        self._values = [graph.values[v] for v in values]
        self.backward: Callable[..., Any] = program.backward_into(values, adding(program, values))
        self._hooks = HookSearch()

    def targets(
        self, parameters: Sequence[torch.Tensor], nodes: Sequence[Any], read: Sequence[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """Return the `.grad` of each parameter to add to; None if autograd has to do it.

        `nodes` are the nodes of autograd that take the parameters' gradients; `read` are the tensors outside the arena
        that the backward reads, which must not change while it runs.
        """
        grads = list(map(_grad, parameters))
        if not self._may_add(parameters, grads) or not all(map(_wants, parameters)):
            return None
        if not {t.untyped_storage().data_ptr() for t in read}.isdisjoint(g.untyped_storage().data_ptr() for g in grads):
            return None
        if not _counts_references() or not all(map(_is_only_user, nodes)):
            return None
        return grads

    def waiting(
        self, parameters: Sequence[torch.Tensor], gradients: list[torch.Tensor] | None
    ) -> list[torch.Tensor] | None:
        """Return `gradients` to add to, which other calls have handed to autograd; None if autograd has to do it."""
        if gradients is None or not self._may_add(parameters, gradients):
            return None
        if [g.device for g in gradients] != [p.device for p in parameters]:
            return None
        return gradients if are_in_buffers_alone(gradients) else None

    def _may_add(self, parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]) -> bool:
        """Return whether gradients can be added to tensors in place, and no hook or check is to see them before."""
        return (
            all(map(_can_take, tensors, self._values))
            and not torch.is_anomaly_enabled()
            and self._hooks.first(parameters) is None
        )


def adding(program: Program, values: Sequence[int]) -> tuple[BoundOp, ...]:
    """Return the bound ops of a program, with those that copy one of `values` out replaced by ops that add it."""
    ops, bound = program.plan.graph.ops, list(program.bound)
    wanted = set(values)
    for i, op in enumerate(ops):
        if op.target == _COPY and wanted.issuperset(op.writes):
            add = torch.ops.aten.add_.Tensor
            bound[i] = replace(bound[i], function=torch.Tensor.add_, overload=add, fresh_overload=None, returns=False)
            wanted.difference_update(op.writes)
    assert not wanted, "a gradient of a parameter is not copied out"
    return tuple(bound)


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


_OWN_REFERENCES = 2  # the edge from the step's own node, and the Python object


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
