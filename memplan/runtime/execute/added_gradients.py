"""`gradients="added"`: adds each gradient to the parameter's `.grad` as soon as it is made, as one node of autograd.

Autograd would get all gradients of a step at once, and add them to those of the steps before only then: two sets. A
backward that adds each one itself needs one set and one gradient. It does so where nobody could see a difference: for
a plain `backward()`, without hooks on the parameters, where no other part of the graph uses them. Where several calls
have one backward, the first one returns its gradients to autograd, and the others add theirs to those while they wait
there. Otherwise gradients are returned to autograd.

Where parameters have post-accumulate hooks (optimizers that step in the backward), each gradient becomes the `.grad` as
soon as it is made and nothing reads its parameter any more, and the hooks are called then, as autograd does.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch

from memplan.core.graph import Value
from memplan.runtime.debug.sanitizers import Callback
from memplan.runtime.execute.held_gradients import are_in_buffers_alone
from memplan.runtime.execute.program import Program
from memplan.runtime.guards.hook_counts import HookSearch, hooks_on
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
        self._indices = values
        self._handing: HandsOver | None = None
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

    def handing(
        self, program: Program, parameters: Sequence[torch.Tensor], nodes: Sequence[Any], read: Sequence[torch.Tensor]
    ) -> HandsOver | None:
        """Return the backward that hands over each gradient when it is made, for parameters with hooks; else None.

        `nodes`, `read`: as in `targets`. Parameters that something else uses, or with other hooks, get theirs from
        autograd.
        """
        if not any(p._post_accumulate_grad_hooks for p in parameters):
            return None
        if torch.is_anomaly_enabled() or not _counts_references():
            return None
        if self._handing is None:
            self._handing = HandsOver(program, self._indices)
        being_read = {t.untyped_storage().data_ptr() for t in read}
        self._handing.taking = [
            p
            if (p.grad is None or (_can_take(p.grad, value) and p.grad.untyped_storage().data_ptr() not in being_read))
            and p.is_leaf
            and p.requires_grad
            and not p._backward_hooks
            and _is_only_user(node)
            and not hooks_on(node)
            else None
            for p, node, value in zip(parameters, nodes, self._values, strict=True)
        ]
        return self._handing

    def waiting(
        self, parameters: Sequence[torch.Tensor], gradients: list[torch.Tensor] | None
    ) -> list[torch.Tensor] | None:
        """Return `gradients` to add to, which other calls have handed to autograd; None if autograd has to do it."""
        if gradients is None or not self._may_add(parameters, gradients, hooked=True):
            return None
        if [g.device for g in gradients] != [p.device for p in parameters]:
            return None
        return gradients if are_in_buffers_alone(gradients) else None

    def _may_add(
        self, parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], *, hooked: bool = False
    ) -> bool:
        """Return whether gradients can be added to tensors in place, and no hook or check is to see them before.

        `hooked`: hooks of parameters, which autograd calls for the sum, are none that is to see them.
        """
        return (
            all(map(_can_take, tensors, self._values))
            and not torch.is_anomaly_enabled()
            and (hooked or self._hooks.first(parameters) is None)
        )


class _Once:
    """A post-accumulate hook that autograd's node of the parameter does not call again in the backward that called it.

    That node runs although it gets no gradient, and calls the hooks all the same.
    """

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        self._hook, self._ran_in = hook, -1

    def now(self, parameter: torch.Tensor) -> Any:
        """Call the hook, instead of the next call in this backward."""
        self._ran_in = torch._C._current_graph_task_id()
        return self._hook(parameter)

    def __call__(self, parameter: torch.Tensor) -> Any:
        if self._ran_in != -1 and self._ran_in == torch._C._current_graph_task_id():
            self._ran_in = -1
            return None
        return self._hook(parameter)


class HandsOver:
    """The backward of a program that hands each gradient to its parameter as soon as it is made.

    `taking` are the parameters that take theirs, for the next call; None where autograd is to get it.
    """

    def __init__(self, program: Program, values: Sequence[int]) -> None:
        graph, order = program.plan.graph, program.plan.schedule.order
        self.taking: list[torch.Tensor | None] = []
        self._values = [graph.values[v] for v in values]
        self._made: list[torch.Tensor | None] = []
        position, bound = {v: i for i, v in enumerate(values)}, list(program.bound)
        last = {s: step for step, op in enumerate(order) for s in graph.touched(graph.ops[op])}
        of = dict(zip(program.traced.results.gradients, program.traced.results.gradient_of, strict=True))
        after: dict[int, list[Callback]] = {}
        for step, op in enumerate(order):
            writes = [v for v in graph.ops[op].writes if v in position]
            if graph.ops[op].target != _COPY or not writes:
                continue
            i = position.pop(writes[0])
            source = graph.values[graph.ops[op].reads[0]]
            nbytes, value = graph.storages[source.storage].nbytes, self._values[i]
            alone = source.storage in program.layout.released and last[source.storage] == step
            whole = source.offset == 0 and nbytes == graph.storages[value.storage].nbytes
            like = (source.dtype, source.shape, source.strides) == (value.dtype, value.shape, value.strides)
            take = partial(self._take, i, alone and whole and like)
            bound[op] = replace(bound[op], function=take, overload=None, fresh_overload=None, returns=False)
            read_last = last.get(graph.values[program.traced.bindings[of[writes[0]]].value].storage, step)
            after.setdefault(max(step, read_last), []).append(partial(self._deliver, i))
        assert not position, "a gradient of a parameter is not copied out"
        self._backward = program.backward_into(values, bound, after=after)

    def __call__(
        self, given: Sequence[torch.Tensor], missing: Collection[int]
    ) -> tuple[Sequence[Any], list[torch.Tensor | None]]:
        """Run the backward; return what it returns, and those gradients of parameters that it did not hand over.

        `given`: what the backward takes. `missing` are the positions of gradients that eager does not have.
        """
        self.taking = [None if i in missing else p for i, p in enumerate(self.taking)]
        self._made = [None] * len(self._values)
        # hooks run as in autograd, and not as kernels do
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        try:
            found = self._backward(*given, *self._made)
            return found, [None if i in missing else made for i, made in enumerate(self._made)]
        finally:
            self.taking, self._made = [], []

    def _take(self, i: int, own: bool, _: None, gradient: torch.Tensor, *__: Any) -> None:
        """Keep a gradient until it is handed over; `own`: nothing else has its memory."""
        if not own:
            value = self._values[i]
            made = torch.empty_strided(value.shape, value.strides, dtype=dtype_of(value), device=gradient.device)
            gradient = made.copy_(gradient)
        self._made[i] = gradient

    def _deliver(self, i: int) -> None:
        """Hand a gradient to its parameter, and call the hooks of this, unless autograd is to get it."""
        parameter = self.taking[i]
        if parameter is None:
            return
        gradient, self._made[i] = self._made[i], None
        assert gradient is not None
        with torch._C._ForceDispatchKeyGuard(*self._keys):
            if parameter.grad is not None:
                parameter.grad.add_(gradient)
            elif gradient.stride() == parameter.stride():
                parameter.grad = gradient
            else:
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            del gradient
            hooks: Any = parameter._post_accumulate_grad_hooks
            for key, hook in tuple((hooks or {}).items()):
                once = hooks[key] = hook if isinstance(hook, _Once) else _Once(hook)
                if once.now(parameter) is not None:
                    raise RuntimeError("Tensor post accumulate grad hooks should return None.")


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
