"""`plan_for`: makes the plan of a step on a GPU that need not be there."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.core.arguments import arguments_of
from memplan.core.gpus import find_gpu
from memplan.core.units import format_bytes
from memplan.errors import LibraryNotInstalled, UnsupportedDevice
from memplan.planning.measured import as_after_a_trial
from memplan.planning.options import DEFAULTS, PlanOptions
from memplan.targets.child import asked_for
from memplan.targets.stand_in import DEVICE
from memplan.trace.capture.effects import with_fake_tensors
from memplan.trace.capture.refusals import require_module
from memplan.trace.planning import plan

if TYPE_CHECKING:
    from memplan.core.plan import Plan


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
    target = find_gpu(name)
    if options.device is not None:
        what, hint = "a target is where the whole step is", "leave one of them out"
        raise UnsupportedDevice(what, where="target with device", hint=hint, see="target")
    if options.kernels == "inductor" and find_spec("triton") is None:
        what = "Inductor generates code for a GPU by Triton, which is not installed"
        hint = "pip install triton, in the version that belongs to this torch"
        raise LibraryNotInstalled(what, where="kernels='inductor'", hint=hint, see="target")
    options = replace(options, reserve=options.reserved + target.workspace, costs=options.costs or target.costs)

    require_module(model)
    args, kwargs = arguments_of(example_inputs, example_kwargs)
    given = [(f"input {i}", x) for i, x in enumerate(pytree.tree_leaves((args, kwargs)))]
    for place, tensor in (*model.named_parameters(), *model.named_buffers(), *given):
        if isinstance(tensor, torch.Tensor) and tensor.device.type not in ("cpu", "meta"):
            hint = "plan without target, or move the model and its inputs to the CPU or the meta device"
            raise UnsupportedDevice(f"is on {tensor.device} already", where=place, hint=hint, see="target")

    def made() -> Plan:
        """Return the plan, as if model and inputs were on the target."""
        there, (there_args, there_kwargs) = with_fake_tensors(model, (args, kwargs), device=str(DEVICE))
        return as_after_a_trial(
            plan(there, there_args, there_kwargs, train=train, options=options, ranks=ranks), options
        )

    why = (
        f"those of {target.full_name}, planned without one: kernels' temporaries are not measured, and "
        f"{format_bytes(target.workspace)} of the reserve are for workspaces of cuBLAS"
    )
    found = asked_for(target, made)
    return replace(found, kernels=why, versions={**found.versions, "target": target.name})
