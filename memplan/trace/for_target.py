"""`plan_for`: the plan of a step on a GPU that need not be there; `asked_of` asks any other question of such a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.core.arguments import arguments_of
from memplan.core.units import format_bytes
from memplan.errors import LibraryNotInstalled, UnsupportedDevice
from memplan.planning.options import DEFAULTS, PlanOptions
from memplan.targets.child import asked_for
from memplan.targets.stand_in import DEVICE
from memplan.targets.target import GpuTarget, find_target

if TYPE_CHECKING:
    from memplan.core.plan import Plan

_T = TypeVar("_T")
Question = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], _T]


def plan_for(
    name: str,
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    options: PlanOptions = DEFAULTS,
    ranks: int | None = None,
) -> Plan:
    """Return the plan of one step of `model` on the target of a name; see `memplan.plan`.

    Its total has the workspaces that cuBLAS keeps there, in `Plan.reserve`.

    Raises:
        UnsupportedDevice: The target is unknown, or the model or an input is on a GPU.
        LibraryNotInstalled: What generates the code, or builds the stand-in, is missing.
    """
    target = find_target(name)
    if options.device is not None:
        what, hint = "a target is where the whole step is", "leave one of them out"
        raise UnsupportedDevice(what, where="target with device", hint=hint, see="target")
    if options.kernels == "inductor" and find_spec("triton") is None:
        what = "Inductor generates code for a GPU by Triton, which is not installed"
        hint = "pip install triton, in the version that belongs to this torch"
        raise LibraryNotInstalled(what, where="kernels='inductor'", hint=hint, see="target")
    options = replace(options, reserve=options.reserved + target.workspace, costs=options.costs or target.costs)

    def plan(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Return the plan of a model that is there."""
        from memplan.trace.planning import plan as plan_here

        made = plan_here(model, args, kwargs, train=train, options=options, ranks=ranks)
        why = (
            f"those of {target.full_name}, planned without one: no matrix product is padded, kernels' temporaries are "
        )
        why += f"not measured, and {format_bytes(target.workspace)} of the reserve are for workspaces of cuBLAS"
        return replace(made, kernels=why, versions={**made.versions, "target": target.name})

    return asked_of(target, model, example_inputs, example_kwargs, plan)


def asked_of(
    target: GpuTarget,
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: dict[str, Any] | None,
    question: Question[_T],
) -> _T:
    """Return the answer to a question about a model and its inputs as if they were on the target.

    Raises what `asked_for` raises, and `UnsupportedDevice` for a model that is on a GPU.
    """
    args, kwargs = arguments_of(example_inputs, example_kwargs)
    flat, spec = pytree.tree_flatten((args, kwargs))
    given = [(f"input {i}", x) for i, x in enumerate(flat)]
    for place, tensor in (*model.named_parameters(), *model.named_buffers(), *given):
        if isinstance(tensor, torch.Tensor) and tensor.device.type not in ("cpu", "meta"):
            hint = "plan without target, or move the model and its inputs to the CPU or the meta device"
            raise UnsupportedDevice(f"is on {tensor.device} already", where=place, hint=hint, see="target")

    def ask() -> _T:
        """Ask it of fake tensors on the device."""
        from memplan.trace.capture.effects import with_fake_tensors

        there, leaves = with_fake_tensors(model, flat, device=str(DEVICE))
        return question(there, *pytree.tree_unflatten(leaves, spec))

    return asked_for(target, ask)
