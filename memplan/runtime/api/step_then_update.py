"""`StepThenUpdate`: a training step whose optimizer's own `step()` runs after the planned forward and backward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from memplan.core.plan import Plan
from memplan.distributed.local import largest_part
from memplan.distributed.parallelism import parallelism_of
from memplan.errors import UnsupportedGraph
from memplan.runtime.api.compile import compiled_by
from memplan.runtime.api.compiled_graphs import CompiledGraphs
from memplan.runtime.api.compiled_module import CompiledModule
from memplan.runtime.api.compiled_step import CompiledStep
from memplan.runtime.api.loss_module import LossModule
from memplan.runtime.api.on_demand_offload import OnDemandOffload
from memplan.runtime.dynamo.backend import can_be_several
from memplan.runtime.guards.input_guards import kind_of_call
from memplan.runtime.guards.ranks import require_collective
from memplan.runtime.options import CompileOptions, StepOptions
from memplan.runtime.profiling.op_timer import Measurement
from memplan.trace.capture.refusals import breaks, why_it_breaks
from memplan.trace.optimizer.optimizers import require_no_closure
from memplan.trace.optimizer.update_bytes import bytes_of_updates
from memplan.trace.whole_step import require_number

_log = logging.getLogger("memplan")


def step_then_update(
    loss: LossModule,
    optimizer: torch.optim.Optimizer,
    options: StepOptions,
    *,
    batch: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Plan | None = None,
) -> StepThenUpdate:
    """Return a step whose forward and backward are one graph, or several where one cannot hold them."""
    require_no_closure(optimizer)
    of = _options(loss, optimizer, options)
    try:
        model = compiled_by(of, loss, batch, kwargs, train=True, given=given)
    except UnsupportedGraph as refused:
        if options.fullgraph or given is not None:
            raise
        return step_of_graphs(refused, loss, optimizer, options, batch=batch, kwargs=kwargs)
    if not options.allow_unsynchronized:
        require_collective([model.plan.graph])
    return StepThenUpdate(model, optimizer, options)


def step_of_graphs(
    refused: UnsupportedGraph,
    loss: LossModule,
    optimizer: torch.optim.Optimizer,
    options: StepOptions,
    *,
    batch: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StepThenUpdate:
    """Return a step whose forward and backward are several graphs, and log why one graph could not hold them.

    Raises `refused`, the error of the step as one graph, where graph breaks would not help or an option needs one
    graph: a budget, `device`, `divide`, `compress`, `kernels`, `cuda_graph`, and ranks that train together.
    """
    one = options.has_budget or not breaks(refused) or parallelism_of(loss) is not None
    if one or not can_be_several(refused, options):
        raise refused
    require_no_closure(optimizer)
    of = _options(loss, optimizer, options, several=True)
    model = CompiledGraphs(loss, options=of, train=True, kind=kind_of_call(batch, kwargs))
    _log.warning(
        "%s is planned as several graphs, and %s's step() runs by itself after them, because one graph cannot hold the "
        "step: %s; .plan is complete after the first step",
        type(loss.model).__name__,
        type(optimizer).__name__,
        why_it_breaks(refused),
    )
    return StepThenUpdate(model, optimizer, options)


class StepThenUpdate(CompiledStep):
    """A training step of a compiled model with its loss, and of the optimizer's own `step()`.

    It is called like the `CompiledStep` that it is. Gradients exist until `step()` ends; `.grad` is not changed.

    Attributes:
        plan: The plan of forward and backward; its `reserve` has the optimizer's state and what `step()` allocates.

    Example:
        ```python
        step = memplan.compile_step(model, torch.optim.Adagrad(model.parameters()), loss_fn, (inputs, targets))
        loss = step(inputs, targets)
        ```
    """

    def __init__(self, model: CompiledModule, optimizer: torch.optim.Optimizer, options: StepOptions) -> None:
        """Make a step of a compiled model, which returns its loss."""
        self.accumulate = options.accumulate
        self.pending = 0
        self.hooks = model.hooks
        self._model, self._optimizer, self._clip = model, optimizer, options.clip_grad_norm
        self._sums: dict[torch.nn.Parameter, torch.Tensor | None] = {}  # of gradients, since the last update

    def _taken(self) -> Sequence[Measurement]:
        return self._model._taken()

    @property
    def passive(self) -> OnDemandOffload | None:  # type: ignore[override]
        """With `on_mismatch="passive"`, the state of the last call that ran without a plan; else None."""
        return self._model.passive

    @property
    def plan(self) -> Plan:
        """The plan of forward and backward; of several graphs, the joint plan of the last complete step."""
        return self._model.plan

    @property
    def pool_bytes(self) -> int:
        """Bytes outside the arena that CUDA graphs keep in private pools."""
        return self._model.pool_bytes

    def __call__(self, *batch: Any, **kwargs: Any) -> torch.Tensor:
        """Run a step on a batch.

        Args:
            batch: The parts of the batch.
            kwargs: Keyword arguments of the model.

        Returns:
            The loss, detached.

        Raises:
            InputMismatch: The batch differs from the example, and `on_mismatch` is "error".
            UnsupportedGraph: The loss is not one number.

        Example:
            ```python
            loss = step(inputs, targets)
            ```
        """
        own = [p for group in self._optimizer.param_groups for p in group["params"]]
        everyone = dict.fromkeys([*own, *self._model.parameters()])
        before = {p: p.grad for p in everyone}
        try:
            for p in everyone:
                p.grad = self._sums.get(p)
            with torch.enable_grad():
                loss = self._model(*batch, **kwargs)
                require_number(loss)
                if not loss.requires_grad:
                    what, hint = "the loss depends on none of its parameters", "make it depend on one that trains"
                    raise UnsupportedGraph("loss_fn", what, hint, see="loss-parameters")
                loss.backward(torch.full_like(loss, 1 / self.accumulate))
            self._sums = {p: p.grad for p in everyone}
            self.pending += 1
            if self.pending >= self.accumulate:
                self._update(own)
        finally:
            for p, gradient in before.items():
                p.grad = gradient
        result: torch.Tensor = loss.detach()
        return result

    def _update(self, parameters: list[torch.nn.Parameter]) -> None:
        """Run the optimizer's step on the gradients, which end with it."""
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._clip)
        self._sums, self.pending = {}, 0  # a step() that raises has had these gradients
        self._optimizer.step()


def _options(
    loss: LossModule, optimizer: torch.optim.Optimizer, options: StepOptions, *, several: bool = False
) -> CompileOptions:
    """Return the options of the step of a model, which count the optimizer's state and what its `step()` allocates.

    They do not, with a warning in the log, for an optimizer that cannot run on fake tensors.
    """
    state = temporaries = 0
    if options.device is None:  # otherwise it updates on the host
        found = bytes_of_updates(optimizer, loss.parameters())
        if found is None:
            what = "%s: what its step() keeps and allocates is not known ahead; the plan's total has it if reserve= has"
            _log.warning(what, type(optimizer).__name__)
        else:
            state, temporaries = found.state, found.temporaries
        if options.accumulate > 1:  # sums of gradients outlive a call
            state += sum(largest_part(p).nbytes for p in loss.parameters() if p.requires_grad)
    divided = parallelism_of(loss) is not None
    return CompileOptions.of_step(options, state=state, temporaries=temporaries, several=several or divided)
