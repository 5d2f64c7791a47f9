"""`CompiledModule`, which `memplan.compile` returns: a model that runs in one planned arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.runtime.api.module_calls import ModuleCalls
from memplan.runtime.api.pickling import modes_by_name, rebuild, recipe
from memplan.runtime.api.recompile import CopyOfCompiled
from memplan.runtime.api.shared_module import SharedModule
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.guards import transforms
from memplan.runtime.on_demand.on_demand_offload import OnDemandOffload
from memplan.runtime.options import CompileOptions
from memplan.runtime.profiling.measurement import Measurement
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
            has only evaluated so far). With `dynamic_shapes`, the plan of the example's shapes.
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
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        options: CompileOptions,
        train: bool | None = None,
        given: Plan | None = None,
        copied_in: Mapping[str, bool] | list[bool] | None = None,
    ) -> None:
        """Compile `model` for the example inputs.

        `copied_in`: as a copy of a module that was compiled in these training flags, which is compiled when first used;
        a list has them in the order of the submodules.
        """
        super().__init__(model)
        hooks, copied = Hooks(), None
        if copied_in is not None:
            if isinstance(copied_in, list):
                copied_in = modes_by_name(model, list(model.modules()), copied_in)
            copied = CopyOfCompiled(
                model=model,
                hooks=hooks,
                options=options,
                example=(args, kwargs),
                train=train,
                given=given,
                modes=copied_in,
            )
        calls = ModuleCalls(model, options, hooks, train, copied=copied)
        # without nn.Module.__setattr__: the model may have a submodule of any name
        self.__dict__.update(hooks=hooks, _calls=calls)
        if copied is None:
            self._compile(args, kwargs, given)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: Plan | None) -> None:
        """Build the program of the example inputs."""
        self._calls.compile((args, kwargs), given)

    @property
    def plan(self) -> Plan:
        """The plan of training calls (of every call if compiled with `train=False`)."""
        return self._calls.plan

    @property
    def symbolic(self) -> SymbolicPlan | None:
        """With `dynamic_shapes`, the plan for all shapes; else None."""
        return self._calls.compilation.symbolic

    @property
    def passive(self) -> OnDemandOffload | None:
        """With `on_mismatch="passive"`, the state of the last call that ran without a plan; else None."""
        return self._calls.fallbacks.passive

    def _taken(self) -> Sequence[Measurement]:
        return self._calls.compilation.measurements

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
        """Return what compiles a copy again: addresses in an arena cannot be copied or pickled."""
        calls = self._calls
        of_copy = calls.copied
        if of_copy is not None and (not calls.is_compiled or calls.selector.evaluates):
            # a copy that was not used so far, or only evaluated: its copies can train too
            settings = {"options": of_copy.options, "train": calls.train, "given": of_copy.given}
            return rebuild, (CompiledModule, self._original, of_copy.example, {**settings, "copied_in": of_copy.modes})
        of = calls.compilation
        options, given = of.builder.options, of.given
        if of.guide is not None:
            options = of.options
        elif of.measurements:
            given = of.plan
        made = recipe(self._original, of.selector.main, options, given, of.selector.main_modes_by_name, calls.train)
        return rebuild, (CompiledModule, *made)


def in_this_thread() -> bool:
    """Return whether this thread is tracing.

    It is judged by the thread's dispatch modes, because torch's flag is set while any thread exports.
    """
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
