"""`CompiledModule`, which `memplan.compile` returns: a model that runs in one planned arena."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import MemplanError
from memplan.runtime.api.module_calls import ModuleCalls
from memplan.runtime.api.on_demand_offload import OnDemandOffload
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.guards import refused_calls
from memplan.runtime.profiling.op_timer import Measurement
from memplan.runtime.profiling.profile_guided import MeasuredStep

if TYPE_CHECKING:
    from memplan.symbolic import SymbolicPlan


_M = TypeVar("_M", bound=nn.Module)


class SharedModule(nn.Module):
    """A module that shares the parameters, buffers and submodules of another one under the same names.

    It is trained and saved like the original: optimizers, `state_dict`, `.train()`, `.eval()` and hooks on parameters
    work on both. Attributes that are not its own are the original's. Its class shows the original's signature and name.
    """

    def __init__(self, original: nn.Module) -> None:
        self.__dict__["_orig_mod"] = original
        mode = original.training
        super().__init__()
        self.__class__ = shown_as(type(self), original)  # for libraries that read its signature and its class
        original.training = mode
        # without nn.Module.__setattr__: the model may have a submodule of any name
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = original.__dict__[name]

    @property
    def training(self) -> bool:
        """The training flag of the original."""
        return bool(self._orig_mod.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Set the flag of the original alone, without its submodules (Lightning sets each one itself)."""
        self._orig_mod.training = mode

    def train(self, mode: bool = True) -> Self:
        """Set the training flag of the original and its submodules.

        Args:
            mode: True to train, False to evaluate.

        Returns:
            This module.

        Example:
            ```python
            compiled.train()
            ```
        """
        self._orig_mod.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the `state_dict` of the original, whose hooks and extra state apply.

        Args:
            args: Those of `torch.nn.Module.state_dict`.
            kwargs: Those of `torch.nn.Module.state_dict`.

        Returns:
            The parameters and buffers, by the original's names.

        Example:
            ```python
            torch.save(compiled.state_dict(), "model.pt")
            ```
        """
        return self._orig_mod.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a `state_dict` into the original, which shares its parameters with this module.

        Args:
            args: Those of `torch.nn.Module.load_state_dict`.
            kwargs: Those of `torch.nn.Module.load_state_dict`.

        Returns:
            The missing and the unexpected keys.

        Example:
            ```python
            compiled.load_state_dict(torch.load("model.pt"))
            ```
        """
        return self._orig_mod.load_state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute on the original, whose forward is traced, unless it is this module's own."""
        own = name in self.__dict__ or hasattr(type(self), name)
        (super().__setattr__ if own else self._orig_mod.__setattr__)(name, value)

    def __delattr__(self, name: str) -> None:
        (super() if name in self.__dict__ else self._orig_mod).__delattr__(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_orig_mod"], name)


def shown_as(base: type[_M], model: nn.Module) -> type[_M]:
    """Return a subclass of `base` with the class name of `model`, whose `forward` shows the signature of `model`.

    Args:
        base: The class of the compiled module, whose `forward` takes any arguments.
        model: The original.

    Returns:
        The subclass, which adds nothing else; `base` itself where the original has no signature.

    Example:
        >>> compiled = memplan.compile(nn.Linear(8, 8), torch.randn(4, 8))
        >>> type(compiled).__name__, inspect.signature(compiled.forward)
        ('Linear', <Signature (input: torch.Tensor) -> torch.Tensor>)
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return base
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    shown = signature.replace(parameters=[itself, *signature.parameters.values()])

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    forward.__signature__ = shown  # type: ignore[attr-defined]
    body = {
        "forward": forward,
        "_get_name": lambda _: base.__name__,  # of `repr`
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(type(model).__name__, (base,), body)


def in_short(compiled: Any) -> str:
    """Return the bytes, the kernels and the budget of a compiled module or step in one line."""
    try:
        plan: Plan | None = compiled.plan
    except MemplanError:
        plan = None
    if plan is None or not plan.graph.ops:
        return "planned at the first call"
    kernels = "inductor" if plan.graph.is_generated else "aten"
    budget = None if plan.eviction is None else plan.eviction.budget
    limit = "" if budget is None else f", budget {format_bytes(budget)}"
    return f"total {format_bytes(plan.total)}, arena {format_bytes(plan.arena_size)}, kernels={kernels!r}{limit}"


class CompiledModule(SharedModule, MeasuredStep):
    """A model that runs in one planned arena. `memplan.compile` makes it.

    It is called, trained and saved like the original, whose parameters, buffers and submodules it shares under the same
    names: optimizers, `state_dict`, `.train()`, `.eval()` and hooks on parameters work on both. Calls under
    `torch.no_grad()`, in `eval()` mode, and those that differ from the example otherwise, run programs with plans of
    their own, which are made at the first such call and share the arena. Several calls may wait for their backward.
    Python attributes that `forward` reads (constants, dropout rates) are constants of a plan; each call compares them.

    Attributes:
        plan: The plan of training calls (of every call if compiled with `train=False`; of evaluations in a copy that
            has only evaluated so far). With `dynamic_shapes`, the plan of the example's shapes. A copy has one from its
            first call on.
        symbolic: With `dynamic_shapes`, the plan for all shapes; else None.
        hooks: The hooks that are called with the events of its steps: `hooks.add(function)`.
        passive: With `on_mismatch="passive"`, the state of the last call that ran without a plan; else None.

    Example:
        ```python
        compiled = memplan.compile(model, inputs)
        compiled(inputs).sum().backward()
        print(compiled.plan.arena_size)  # bytes
        ```
    """

    hooks: Hooks
    _calls: ModuleCalls

    def __init__(self, model: nn.Module, calls: ModuleCalls) -> None:
        """Make the module whose calls run by `calls`, which may plan them at the first one."""
        super().__init__(model)
        # without nn.Module.__setattr__: the model may have a submodule of any name
        self.__dict__.update(hooks=calls.hooks, _calls=calls)

    @property
    def plan(self) -> Plan:
        """The plan of training calls (of every call if compiled with `train=False`).

        Of several graphs, it is their joint plan in the last complete step, or of the graphs that are known so far.
        """
        return self._calls.plan

    @property
    def symbolic(self) -> SymbolicPlan | None:
        """With `dynamic_shapes`, the plan for all shapes; else None."""
        return self._calls.symbolic

    @property
    def passive(self) -> OnDemandOffload | None:
        """With `on_mismatch="passive"`, the state of the last call that ran without a plan; else None."""
        return self._calls.passive

    def _taken(self) -> Sequence[Measurement]:
        return self._calls.measurements

    def extra_repr(self) -> str:
        """Return what `repr` shows of the plan.

        Returns:
            The bytes, the kernels and the budget, or that it is planned at the first call.

        Example:
            >>> compiled.extra_repr()
            "memplan: total 1.19 MiB, arena 256 KiB, kernels='aten'"
        """
        return f"memplan: {in_short(self)}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, with the arguments of the original.

        Args:
            args: The positional arguments. `on_mismatch` says what happens if they differ from the example.
            kwargs: The keyword arguments.

        Returns:
            What the original returns.

        Raises:
            InputMismatch: With `on_mismatch="error"`, the call, or the model, differs from what was compiled.
            BudgetInfeasible: No plan for this call, or for another call in flight, keeps the budget.
            UnsupportedCall: The call needs what a planned step does not have, such as `torch.func` transforms.
            StaleActivationsError: Another thread runs a step, or the arena holds the activations of another call where
                only one may be in flight (`cuda_graph`, `device`, several ranks).
            CollectiveFailed: Another rank has failed, or left the others.

        Example:
            ```python
            compiled(inputs).sum().backward()
            ```
        """
        # another compiler traces this module, or a model that contains it
        if (torch.compiler.is_compiling() and in_this_thread()) or torch._C._is_tracing():
            return self._orig_mod(*args, **kwargs)
        if refused_calls.around() and (refused := refused_calls.refusal((args, kwargs), self)):
            if self._calls.options.on_mismatch == "eager":
                return self._orig_mod(*args, **kwargs)
            raise refused
        return self._calls.run(args, kwargs)

    @property
    def pool_bytes(self) -> int:
        """Bytes outside the arena that the CUDA graphs of all its programs keep in private pools."""
        return self._calls.pool_bytes

    def __prepare_scriptable__(self) -> Any:
        """Return the original, for `torch.jit.script`."""
        return self._orig_mod

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what compiles a copy at its first call: addresses in an arena cannot be copied or pickled."""
        return rebuilt, (type(self._calls), self._orig_mod, self._calls.settings)


def rebuilt(kind: type[ModuleCalls], model: nn.Module, settings: dict[str, Any]) -> CompiledModule:
    """Return a copy of a compiled module, of a copy of its model."""
    return CompiledModule(model, kind(model, **settings))


def in_this_thread() -> bool:
    """Return whether this thread is tracing.

    It is judged by the thread's dispatch modes, because torch's flag is set while any thread exports.
    """
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
