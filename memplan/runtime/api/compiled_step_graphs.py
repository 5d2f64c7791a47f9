"""`CompiledStepGraphs`, which `memplan.compile_step` returns for a model that one graph cannot hold."""

from __future__ import annotations

import logging
from typing import Any

import torch

from memplan.core.plan import Plan
from memplan.distributed.parallelism import parallelism_of
from memplan.errors import UnsupportedGraph
from memplan.runtime.api.compiled_graphs import require_same
from memplan.runtime.api.compiled_step import CompiledStep
from memplan.runtime.api.loss_module import LossModule
from memplan.runtime.api.several_graphs import SeveralGraphs, can_be_several
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.guards import transforms
from memplan.runtime.guards.call_kinds import kind_of_call
from memplan.runtime.options import StepOptions
from memplan.trace.capture.refusals import breaks, why_it_breaks
from memplan.trace.optimizer.recordable import require_no_closure

_log = logging.getLogger("memplan")


def step_of_graphs(
    refused: UnsupportedGraph,
    loss: LossModule,
    optimizer: torch.optim.Optimizer,
    options: StepOptions,
    *,
    batch: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> CompiledStep:
    """Return a step whose forward and backward are several graphs, and log why one graph could not hold them.

    Raises `refused`, the error of the step as one graph, where graph breaks would not help or an option needs one
    graph: a budget, `device`, `divide`, `compress`, `kernels`, `cuda_graph`, and ranks that train together.
    """
    one = options.has_budget or not breaks(refused) or parallelism_of(loss) is not None
    if one or not can_be_several(refused, options):
        raise refused
    require_no_closure(optimizer)
    step = CompiledStepGraphs(loss, optimizer, options, batch, kwargs)
    _log.warning(
        "%s is planned as several graphs, and %s's step() runs by itself after them, because one graph cannot hold the "
        "step: %s; .plan is complete after the first step",
        type(loss.model).__name__,
        type(optimizer).__name__,
        why_it_breaks(refused),
    )
    return step


class CompiledStepGraphs(CompiledStep):
    """A training step that runs as the graphs into which dynamo breaks the model, in one planned arena.

    It is called like the `CompiledStep` that it is. What lies between the graphs runs as Python, as in eager; the
    optimizer's own `step()` runs after the backward, and gradients exist until then. Nothing runs when it is made: each
    graph is planned when it is first called.

    Attributes:
        plan: The joint plan of the graphs of the last complete step, without the update.

    Example:
        ```python
        step = memplan.compile_step(model_with_a_branch, optimizer, loss_fn, (inputs, targets))
        loss = step(inputs, targets)
        ```
    """

    def __init__(
        self,
        loss: LossModule,
        optimizer: torch.optim.Optimizer,
        options: StepOptions,
        batch: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Make a step for calls like the example's; its graphs are traced at their first call."""
        self.passive = None
        self.accumulate = options.accumulate
        self.pending = 0
        self.hooks = Hooks()
        self._measurements = []
        self._loss, self._optimizer, self._options = loss, optimizer, options
        self._graphs = SeveralGraphs(loss, options, self.hooks)
        self._example = kind_of_call(batch, kwargs)
        self._sums: dict[torch.nn.Parameter, torch.Tensor | None] = {}  # of gradients, since the last update

    @property
    def plan(self) -> Plan:
        """The joint plan of the last complete step, or of the graphs that are known so far."""
        model = self._loss.model
        held = (*model.named_parameters(), *model.named_buffers())
        return self._graphs.backend.joint_plan(type(model).__name__, {id(tensor): name for name, tensor in held})

    @property
    def pool_bytes(self) -> int:
        """Bytes in private pools of CUDA graphs: none."""
        return 0

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
        transforms.refuse((batch, kwargs), self._loss)
        if self._options.on_mismatch == "error":
            require_same(self._example, kind_of_call(batch, kwargs))
        own = [p for group in self._optimizer.param_groups for p in group["params"]]
        everyone = dict.fromkeys([*own, *self._loss.parameters()])
        before = {p: p.grad for p in everyone}
        try:
            for p in everyone:
                p.grad = self._sums.get(p)
            with torch.enable_grad():
                loss = self._graphs(*batch, **kwargs)
                _require_number(loss)
                loss.backward(torch.full_like(loss, 1 / self.accumulate))
            self._sums = {p: p.grad for p in everyone}
            if self.pending + 1 >= self.accumulate:
                self._update(own)
        finally:
            for p, gradient in before.items():
                p.grad = gradient
        self.pending = (self.pending + 1) % self.accumulate
        result: torch.Tensor = loss.detach()
        return result

    def _update(self, parameters: list[torch.nn.Parameter]) -> None:
        """Run the optimizer's step on the gradients, which end with it."""
        if self._options.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._options.clip_grad_norm)
        self._sums = {}
        self._optimizer.step()


def _require_number(loss: object) -> None:
    """Raise `UnsupportedGraph` unless the loss is one number that depends on a parameter."""
    what, see = "", "loss-number"
    if not isinstance(loss, torch.Tensor):
        what = f"returns a {type(loss).__name__}, but a training step minimises one number"
    elif loss.numel() != 1:
        what = f"returns a tensor of shape {tuple(loss.shape)}, but a training step minimises one number"
    elif not loss.requires_grad:
        what, see = "the loss depends on none of its parameters", "loss-parameters"
    if what:
        raise UnsupportedGraph("loss_fn", what, "return the mean or the sum of what is to be minimised", see=see)
