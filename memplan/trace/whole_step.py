"""Capture whole training steps: a model that returns its loss, its backward, and the update of an optimizer.

Forward and backward are captured once (`capture_loss`); each variant of the update (`CapturedLoss.step`) is added to a
copy of that graph.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.core.arguments import arguments_of
from memplan.core.choices import Kernels
from memplan.distributed.parallelism import parallelism_of
from memplan.errors import MemplanError, UnsupportedCall, UnsupportedGraph
from memplan.planning.options import PlanKeywords, PlanOptions
from memplan.trace import planning
from memplan.trace.capture.effects import with_fake_tensors
from memplan.trace.capture.joint_graph import Captured
from memplan.trace.capture.refusals import module_of
from memplan.trace.default_kernels import made_by_default, with_kernels
from memplan.trace.optimizer.optimizers import is_fused, state_bytes
from memplan.trace.optimizer.updates import append_updates, updated_parameters
from memplan.trace.passes.rewrite import value
from memplan.trace.traced import POSITIONAL, TracedGraph, parameters_of
from memplan.trace.tracing import CapturedCall, capture_call
from memplan.trace.variants import first_variant

if TYPE_CHECKING:
    from memplan.core.plan import Plan
    from memplan.planning.options import Device


def plan_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[..., torch.Tensor],
    example_batch: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    target: str | None = None,
    clip_grad_norm: float | None = None,
    **options: Unpack[PlanKeywords],
) -> Plan:
    """Plan the memory of a whole training step, as `memplan.compile_step` runs it, without computing anything.

    Args:
        model: The module. Its parameters may be real, fake or meta tensors.
        optimizer: SGD, Adam or AdamW of its parameters. It is not changed, and its state takes no memory.
        loss_fn: As in `memplan.compile_step`.
        example_batch: As in `memplan.compile_step`: real, fake or meta tensors.
        example_kwargs: The keyword arguments of the model.
        target: Plan for this GPU, which need not be there, as in `memplan.plan`. With `device="cuda"`, the model and
            the optimizer's state stay on the CPU, and the budget has all that is loaded from there.
        clip_grad_norm: As in `memplan.compile_step`.
        options: Those of `memplan.plan`.

    Returns:
        The plan.

    Raises:
        UnsupportedGraph: The step cannot be traced as one graph, or the update of the optimizer is not planned.
        UnsupportedDevice: The device is not there, or the model cannot run on it this way.
        BudgetInfeasible: No plan keeps the budget; the error has the smallest budget that works.
        InvalidSize: An option has no valid value.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> plan = memplan.plan_step(model, optimizer, loss_fn, batch, device="cuda", target="rtx4090", budget="22GiB")
    """
    model = module_of(model)
    require_step("plan_step", optimizer, loss_fn)
    loss = LossModule(model, loss_fn)
    args, kwargs = arguments_of(example_batch, example_kwargs)
    inputs = (loss.parts_of(args), kwargs)

    def made(options: PlanOptions, place: str | None = None) -> Plan:
        """Return the plan, as if the model were at a place (None: where it is)."""
        there, there_inputs = with_fake_tensors(loss, inputs, device=place)
        of = _of(optimizer, loss, there)
        return plan_whole_step(there, of, there_inputs, options, clip_grad_norm=clip_grad_norm)

    asked = PlanOptions(**options)
    require_update(1, clip_grad_norm)
    require_planned_update(optimizer)
    if target is None:
        return made(asked)
    from memplan.trace.for_target import planned_there

    return planned_there(target, loss, inputs, asked, made)


def require_step(call: str, optimizer: Any, loss_fn: Any) -> None:
    """Raise `MemplanError` unless these arguments of a call are an optimizer and a function."""
    order = f"in this order: {call}(model, optimizer, loss_fn, example_batch)"
    if not hasattr(optimizer, "param_groups"):  # a wrapper around an optimizer is one too
        raise MemplanError(f"is given a {type(optimizer).__name__}, not an optimizer", where="optimizer", hint=order)
    if isinstance(loss_fn, type) or not callable(loss_fn):
        hint = f"pass a function that returns the loss, {order}"
        raise MemplanError(f"is given a {type(loss_fn).__name__}, not a function", where="loss_fn", hint=hint)


def require_update(accumulate: int, clip_grad_norm: float | None) -> None:
    """Raise `MemplanError` unless these are a number of batches per update, and a maximal norm or None."""
    if type(accumulate) is not int or accumulate < 1:
        hint = "pass the number of micro-batches per update, 1 or more"
        raise MemplanError(f"accumulate={accumulate!r}", hint=hint)
    norm = clip_grad_norm
    if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm >= 0):
        hint = "pass the maximal norm, a number of at least 0, or None"
        raise MemplanError(f"clip_grad_norm={norm!r}", hint=hint)


def require_planned_update(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedGraph` for an optimizer whose own `step()` updates."""
    if not is_fused(optimizer):
        hint = "plan forward and backward by memplan.plan, with reserve= for its state"
        what = "its own step() runs after the planned forward and backward"
        raise UnsupportedGraph(type(optimizer).__name__, what, hint, see="fused-update")


def plan_whole_step(
    loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    options: PlanOptions,
    *,
    clip_grad_norm: float | None = None,
) -> Plan:
    """Return the plan of a step of a model that returns its loss; `inputs` are arguments and keywords.

    The update of the optimizer is one that is planned (`require_planned_update`).
    """

    def capture(options: PlanOptions) -> tuple[TracedGraph, CapturedCall]:
        """Return the step, traced and captured."""
        captured = capture_loss(loss, optimizer, *inputs, device=options.device, kernels=options.kernels)
        step = captured.step(clip_grad_norm=clip_grad_norm)
        return first_variant(step, options), step

    options = with_kernels(options, loss, inputs)
    options, (traced, step) = made_by_default(options, type(loss).__name__, capture)
    step.warn()
    return planning.plan_step(traced, step, options)[1]


def _of(optimizer: torch.optim.Optimizer, model: nn.Module, twin: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer without state, with the options of a model's, for the parameters of a copy of that model."""
    of = dict(zip(map(id, model.parameters()), twin.parameters(), strict=True))
    made = copy.copy(optimizer)
    groups = optimizer.param_groups
    made.param_groups = [{**g, "params": [of[id(p)] for p in g["params"] if id(p) in of]} for g in groups]
    made.state = defaultdict(dict)
    return made


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
        self, *, clip_grad_norm: float | None, rates_in_memory: bool = False, in_place: bool = True
    ) -> CapturedCall:
        """Return the step with an update; the arguments are those of `append_updates`, `in_place` as in `trace`."""
        update = partial(
            append_updates,
            model=self.model,
            optimizer=self.optimizer,
            clip_grad_norm=clip_grad_norm,
            rates_in_memory=rates_in_memory,
            device=None if self.call.target is None else self.call.target.device,
        )
        options = replace(self.call.options, in_place=in_place)
        return replace(self.call, update=update, state=state_bytes(self.optimizer), options=options)


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


class LossModule(nn.Module):
    """A model and its loss as one module: the loss is traced too, so that the only tangent is that of the loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.arguments = _positional_arguments(loss_fn)

    def parts_of(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the parts of a batch; a list or a tuple of both parts, as a `DataLoader` yields, is taken apart.

        Raises `UnsupportedGraph` if it does not have the parts that `loss_fn` takes.
        """
        if self.arguments < 2:
            return batch
        if len(batch) == 1 and isinstance(batch[0], (list, tuple)) and len(batch[0]) == 2:
            batch = tuple(batch[0])
        if len(batch) != 2:
            what = f"loss_fn takes several arguments, but the batch has {len(batch)} parts"
            hint = "pass (inputs, targets), or a loss_fn of one argument; a dict is keywords of the model"
            raise UnsupportedGraph("the batch", what, hint, see="loss-arguments")
        given = 1 + (len(batch[1]) if isinstance(batch[1], tuple) else 1)
        if given < self.arguments:
            what = f"takes {self.arguments} arguments, and is given {given}: the model's result and the targets"
            hint = "write loss_fn(output, targets); several targets are a tuple: (inputs, (first, second))"
            raise UnsupportedGraph("loss_fn", what, hint, see="loss-arguments")
        return batch

    def forward(self, *batch: Any, **kwargs: Any) -> torch.Tensor:
        if self.arguments < 2:
            return self.loss_fn(self.model(*batch, **kwargs))
        inputs, targets = self.parts_of(batch)
        output = self.model(*inputs, **kwargs) if isinstance(inputs, tuple) else self.model(inputs, **kwargs)
        return self.loss_fn(output, *targets) if isinstance(targets, tuple) else self.loss_fn(output, targets)


def _positional_arguments(function: Callable[..., Any]) -> int:
    """Return how many positional arguments without defaults a function (or a module's forward) takes.

    Builtin functions such as `torch.sum` have no signature; they count as reductions of one argument.
    """
    parameters = parameters_of(function.forward if isinstance(function, nn.Module) else function).values()
    return sum(p.kind in POSITIONAL and p.default is p.empty for p in parameters)
