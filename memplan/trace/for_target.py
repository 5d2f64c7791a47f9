"""`plan_for`: makes the plan of a step on a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

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
from memplan.trace.capture.refusals import module_of
from memplan.trace.graph.offload_target import require_on_cpu
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
    model = module_of(model)
    args, kwargs = arguments_of(example_inputs, example_kwargs)

    def made(options: PlanOptions, place: str | None) -> Plan:
        """Return the plan, as if model and inputs were at a place."""
        there, (there_args, there_kwargs) = with_fake_tensors(model, (args, kwargs), device=place)
        return plan(there, there_args, there_kwargs, train=train, options=options, ranks=ranks)

    return planned_there(name, model, (args, kwargs), options, made)


def planned_there(
    name: str, model: nn.Module, inputs: Any, options: PlanOptions, make: Callable[[PlanOptions, str | None], Plan]
) -> Plan:
    """Return the plan that `make` makes where the target of a name stands in for the GPU of the process.

    `make` is given the options with the target's costs and workspaces, and the place of the model: the target, or None
    for where it is (with `device="cuda"`, from where the step loads it). The errors are those of `plan_for`.
    """
    target = find_gpu(name)
    if options.device is not None and str(options.device) not in ("cuda", str(DEVICE)):
        what, hint = "the target is the device", "with device='cuda' the model stays on the CPU; else leave it out"
        raise UnsupportedDevice(what, where=f"target with device={options.device!r}", hint=hint, see="target")
    if options.kernels == "inductor" and find_spec("triton") is None:
        what = "Inductor generates code for a GPU by Triton, which is not installed"
        hint = "pip install triton, in the version that belongs to this torch"
        raise LibraryNotInstalled(what, where="kernels='inductor'", hint=hint, see="target")
    options = replace(options, reserve=options.reserved + target.workspace, costs=options.costs or target.costs)
    hint = "plan without target, or move the model and its inputs to the CPU or the meta device"
    require_on_cpu(model, inputs, hint, "target")

    def made() -> Plan:
        """Return the plan, as if a trial had run."""
        return as_after_a_trial(make(options, None if options.device is not None else str(DEVICE)), options)

    why = (
        f"those of {target.full_name}, planned without one: kernels' temporaries are not measured, and "
        f"{format_bytes(target.workspace)} of the reserve are for workspaces of cuBLAS"
    )
    found = asked_for(target, made)
    why = f"{why}; {found.kernels}" if found.kernels else why
    return replace(found, kernels=why, versions={**found.versions, "target": target.name})
