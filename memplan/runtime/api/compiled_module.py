"""`CompiledModule`, which `memplan.compile` returns: a model that runs in one planned arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.runtime.api.module_calls import ModuleCalls
from memplan.runtime.api.on_demand_offload import OnDemandOffload
from memplan.runtime.api.shared_module import SharedModule
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.guards import transforms
from memplan.runtime.guards.input_guards import CallKind
from memplan.runtime.options import CompileOptions
from memplan.runtime.profiling.op_timer import Measurement
from memplan.runtime.profiling.profile_guided import MeasuredStep

if TYPE_CHECKING:
    from memplan.symbolic import SymbolicPlan


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

    def __init__(
        self,
        model: nn.Module,
        *,
        options: CompileOptions,
        train: bool | None = None,
        example: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        given: Plan | None = None,
        kind: CallKind | None = None,
        together: bool = False,
    ) -> None:
        """Compile `model` for the example inputs; for its first call where there is none, as in a copy.

        `kind`: what the first call of a copy is to be like. `together`: as in `Builder`.
        """
        super().__init__(model)
        hooks = Hooks()
        calls = ModuleCalls(model, options, hooks, train, given=given, kind=kind, together=together)
        # without nn.Module.__setattr__: the model may have a submodule of any name
        self.__dict__.update(hooks=hooks, _calls=calls)
        if example is not None:
            calls.compile(*example)

    @property
    def plan(self) -> Plan:
        """The plan of training calls (of every call if compiled with `train=False`)."""
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
                only one may be in flight (`cuda_graph`, `device`).

        Example:
            ```python
            compiled(inputs).sum().backward()
            ```
        """
        # this module is part of a model that is being traced: the outer plan contains it
        if torch.compiler.is_compiling() and in_this_thread():
            return self._original(*args, **kwargs)
        if transforms.around() and (refused := transforms.refusal((args, kwargs), self)):
            if self._calls.options.on_mismatch == "eager":
                return self._original(*args, **kwargs)
            raise refused
        return self._calls.run(args, kwargs)

    @property
    def pool_bytes(self) -> int:
        """Bytes outside the arena that the CUDA graphs of all its programs keep in private pools."""
        return int(self._calls.selector.pool_bytes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what compiles a copy at its first call: addresses in an arena cannot be copied or pickled."""
        calls = self._calls
        settings = {
            "options": calls.options_of_copy,
            "train": calls.train,
            "given": calls.given,
            "kind": calls.kind,
        }
        return rebuilt, (CompiledModule, self._original, settings)


def rebuilt(make: Callable[..., CompiledModule], model: nn.Module, settings: dict[str, Any]) -> CompiledModule:
    """Return a copy of a compiled module, of a copy of its model."""
    return make(model, **settings)


def in_this_thread() -> bool:
    """Return whether this thread is tracing.

    It is judged by the thread's dispatch modes, because torch's flag is set while any thread exports.
    """
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
