"""`CompiledGraphs`, which `memplan.compile` returns for a model that one graph cannot hold."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.errors import UnsupportedGraph
from memplan.runtime.api.compiled_module import CompiledModule, in_this_thread, rebuilt
from memplan.runtime.dynamo.backend import Backend, SeveralGraphs, can_be_several
from memplan.runtime.guards.input_guards import CallKind, kind_of_call, require_like
from memplan.runtime.options import CompileOptions
from memplan.trace.capture.refusals import why_it_breaks

_log = logging.getLogger("memplan")


def several_graphs(
    refused: UnsupportedGraph,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    options: CompileOptions,
    train: bool | None,
    given: Plan | None,
) -> CompiledGraphs:
    """Return the model compiled as several graphs, and log why one graph could not hold it.

    Raises `refused`, the error of the model as one graph, where graph breaks would not help or an option needs one
    graph: a given plan, `device`, `dynamic_shapes`, `cuda_graph`, `divide`, `compress`, and measured
    costs.
    """
    if given is not None or not can_be_several(refused, options):
        raise refused
    compiled = CompiledGraphs(model, options=options, train=train, kind=kind_of_call(args, kwargs))
    _log.warning(
        "%s is planned as several graphs, because one cannot hold it: %s; .plan is complete after the first step",
        type(model).__name__,
        why_it_breaks(refused),
    )
    return compiled


class CompiledGraphs(CompiledModule):
    """A model that runs as the graphs into which dynamo breaks it, in one planned arena.

    It is called, trained, saved and copied like the `CompiledModule` that it is. What lies between the graphs runs as
    Python, as in eager. Nothing runs when it is made: each graph is planned when it is first called, with an arena of
    its own, and all graphs of a training step are placed in one arena when the next step begins.

    Attributes:
        plan: The joint plan of the last complete step, with a section for each graph (`Plan.sections`). Before, that of
            the graphs that are known so far.
        hooks: The hooks that are called with the events of all graphs.

    Example:
        ```python
        compiled = memplan.compile(model_with_a_branch, inputs)
        compiled(inputs).sum().backward()
        print(compiled.plan.report())
        ```
    """

    _graphs: SeveralGraphs
    _kind: CallKind

    def __init__(self, model: nn.Module, *, options: CompileOptions, train: bool | None, kind: CallKind) -> None:
        """Prepare the backend; the graphs are traced at their first call. `kind`: that of the example's call."""
        super().__init__(model, options=options, train=train)
        self.__dict__.update(_graphs=SeveralGraphs(model, options, self.hooks), _kind=kind)

    def _taken(self) -> tuple[()]:
        return ()

    @property
    def _backend(self) -> Backend:
        return self._graphs.backend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, with the arguments of the original.

        Args:
            args: The positional arguments of the original.
            kwargs: The keyword arguments.

        Returns:
            What the original returns.

        Raises:
            InputMismatch: The call differs from the example, and `on_mismatch` is "error".
            BudgetInfeasible: A graph, or all graphs together, cannot keep the budget.
            StaleActivationsError: A backward runs whose activations were overwritten.

        Example:
            ```python
            compiled(inputs).sum().backward()
            ```
        """
        if torch.compiler.is_compiling() and in_this_thread():
            return self._original(*args, **kwargs)
        if self._calls.options.on_mismatch == "error":
            require_like(self._kind, kind_of_call(args, kwargs))
        without_gradients = torch.no_grad() if self._calls.train is False else contextlib.nullcontext()
        with without_gradients:
            return self._graphs(*args, **kwargs)

    @property
    def plan(self) -> Plan:
        """The joint plan of the last complete step, or of the graphs that are known so far."""
        held = (*self._original.named_parameters(), *self._original.named_buffers())
        return self._backend.joint_plan(type(self._original).__name__, {id(tensor): name for name, tensor in held})

    @property
    def symbolic(self) -> None:
        """None: each graph has a plan for each shape."""
        return None

    @property
    def pool_bytes(self) -> int:
        """Bytes in private pools of CUDA graphs: none."""
        return 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what compiles a copy again: graphs and addresses cannot be copied or pickled."""
        settings = {"options": self._calls.options, "train": self._calls.train, "kind": self._kind}
        return rebuilt, (CompiledGraphs, self._original, settings)
