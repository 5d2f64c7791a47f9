"""Capture whole training steps: a model that returns its loss, its backward, and the update of an optimizer.

Forward and backward are captured once (`capture_loss`); each variant of the update (`CapturedLoss.step`) is added to a
copy of that graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
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
    nodes, leaves = call.captured.graph_module.graph.find_nodes(op="placeholder"), call.captured.out_spec.num_leaves
    tangents = [value(n) for n in nodes if n.meta["desc"].is_tangent()]  # of the shapes of what is returned
    require_number(tangents[0] if leaves == 1 else [None] * leaves)
    updated_parameters(call.captured.graph_module.graph, model, optimizer)  # or an error
    return CapturedLoss(call=call, model=model, optimizer=optimizer)


def require_number(loss: object) -> None:
    """Raise `UnsupportedGraph` unless the loss is one number: `backward()` has no initial gradient for another loss."""
    if isinstance(loss, torch.Tensor):
        if loss.numel() == 1:
            return
        what = f"a tensor of shape {tuple(loss.shape)}"
    else:
        count = len(pytree.tree_leaves(loss))
        what = f"a {type(loss).__name__}" if count == 1 else f"{count} values"
    what, hint = f"returns {what}, but a training step minimises one number", "return the mean or the sum alone"
    raise UnsupportedGraph("loss_fn", what, hint, see="loss-number")
