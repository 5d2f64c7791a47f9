"""Capture whole training steps: a model that returns its loss, its backward, and the update of an optimizer.

Forward and backward are captured once (`capture_loss`); each variant of the update (`CapturedLoss.step`) is added to a
copy of that graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memplan.core.choices import Kernels
from memplan.distributed.parallelism import parallelism_of
from memplan.errors import UnsupportedCall, UnsupportedGraph
from memplan.trace.capture.joint_graph import Captured
from memplan.trace.optimizer.updates import Accumulate, append_updates, updated_parameters
from memplan.trace.passes.rewrite import value
from memplan.trace.tracing import CapturedCall, capture_call

if TYPE_CHECKING:
    from memplan.planning.options import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLoss:
    """A captured forward and backward, to which updates of `optimizer` can be added.

    `call` is forward and backward; `model` returns the loss.
    """

    call: CapturedCall
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def captured(self) -> Captured:
        """The graph of forward and backward."""
        return self.call.captured

    def step(
        self,
        accumulate: Accumulate | None,
        *,
        clip_grad_norm: float | None,
        rates_in_memory: bool = False,
        in_place: bool = True,
    ) -> CapturedCall:
        """Return the step with an update; the arguments are those of `append_updates`, `in_place` as in `trace`."""
        update = partial(
            append_updates,
            model=self.model,
            optimizer=self.optimizer,
            clip_grad_norm=clip_grad_norm,
            accumulate=accumulate,
            rates_in_memory=rates_in_memory,
            device=None if self.call.target is None else self.call.target.device,
        )
        return replace(self.call, update=update, options=replace(self.call.options, in_place=in_place))


def capture_loss(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    example_inputs: tuple[Any, ...],
    example_kwargs: dict[str, Any] | None = None,
    *,
    device: Device | None = None,
    kernels: Kernels | None = None,
) -> CapturedLoss:
    """Return forward and backward of a model that returns its loss, one number, captured.

    Args:
        model: A module whose result is the loss.
        optimizer: The optimizer whose update becomes part of the step.
        example_inputs: The positional arguments.
        example_kwargs: The keyword arguments.
        device: As in `trace`.
        kernels: What computes the loss and its gradients ("inductor": kernels that Inductor generates).

    Raises:
        UnsupportedGraph: The model or the loss cannot be traced.
        UnsupportedDevice: Inductor cannot generate kernels here.
        UnsupportedCall: The model is divided among ranks, and `kernels` are Inductor's.
    """
    if kernels == "inductor" and parallelism_of(model) is not None:
        raise UnsupportedCall(
            "kernels='inductor' does not run a model that is divided among ranks yet",
            where="kernels",
            hint='take kernels="aten"',
            see="inductor-options",
        )
    call = capture_call(model, example_inputs, example_kwargs, train=True, device=device, kernels=kernels)
    _require_one_number(call.captured)
    updated_parameters(call.captured.graph_module.graph, model, optimizer)  # or an error
    return CapturedLoss(call=call, model=model, optimizer=optimizer)


def _require_one_number(captured: Captured) -> None:
    """Raise `UnsupportedGraph` unless the loss is one number: `backward()` has no initial gradient for another loss."""
    nodes = captured.graph_module.graph.find_nodes(op="placeholder")
    shapes = [tuple(value(n).shape) for n in nodes if n.meta["desc"].is_tangent()]
    leaves = captured.out_spec.num_leaves
    if leaves != 1 or math.prod(shapes[0]) != 1:
        what = f"returns {leaves} values" if leaves != 1 else f"returns a tensor of shape {shapes[0]}"
        raise UnsupportedGraph(
            "loss_fn",
            f"{what}, but a training step minimises one number",
            "return the mean or the sum alone",
            see="loss-number",
        )
