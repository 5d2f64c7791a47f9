"""memplan: ahead-of-time static memory planning for PyTorch graphs.

    plan(model, example_inputs)      plans a step from fake tensors: the memory that it needs, to the byte
    plan_step(model, optimizer, loss_fn, batch)      plans a whole training step, optimizer update included
    compile(model, example_inputs)   returns a module that runs the step in one preallocated arena
    compile_step(model, optimizer, loss_fn, batch)   compiles a whole training step, optimizer update included
    record(step_fn)                  records and places the allocations of a step that cannot be traced; after
                                     install_allocator() it can be replayed on CUDA
    solve(problem)                   assigns offsets to buffers, for compilers and embedded systems
    fits(model, inputs, target="h100")  says whether a training step fits a device, part by part, before it runs
    max_batch(make, budget)          finds the largest batch that fits, without running out of memory
    profile(model, example_inputs)   measures each op on this machine: costs for budgets
    load(path)                       loads and validates a plan; load_symbolic(path): a plan for a range of shapes
    Tracker()                        is a hook that counts the bytes in the arena and on the host at each step
    Backend(**options)               configures torch.compile(model, backend="memplan")
    partitioner(budget)              makes plain torch.compile recompute so that a step's peak keeps a budget
    set_log_level("info")            says what takes long, before it begins; so does MEMPLAN_LOG=info
    explain(plan), diff(one, two)    show the live buffers of a step; the differences between two plans

Importing this package does not import torch and patches nothing: each name is imported on first use. torch is an extra
(`memplan[torch]`): without it, names that trace or run a model raise `TorchNotInstalled`, and the others work.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack, overload

from memplan.core.later import provide
from memplan.errors import MemplanError, UnknownName
from memplan.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from memplan.analysis.diff import diff
    from memplan.analysis.explain import explain
    from memplan.core import csvio
    from memplan.core.choices import Checkpoint, Compression, Gradients, Kernels, Layout
    from memplan.core.division import Divide, Division
    from memplan.core.plan import Plan
    from memplan.core.problem import Buffer, Interval, Problem, Solution, Status
    from memplan.core.timed import set_log_level
    from memplan.core.validate import validate
    from memplan.evict.costs import CostModel, load_costs
    from memplan.evict.workload import Policy as EvictionPolicy
    from memplan.integrations.partitioner import partitioner
    from memplan.planning.memory_answer import Fits
    from memplan.planning.options import Budget, Costs, Device, DynamicShapes, PlanKeywords
    from memplan.planning.planfile import load
    from memplan.runtime import (
        CompiledModule,
        CompiledStep,
        Recording,
        Tracker,
        compile,
        compile_step,
        install_allocator,
        record,
    )
    from memplan.runtime.dynamo.backend import Backend
    from memplan.runtime.profiling.op_timer import profile
    from memplan.schedule import Policy
    from memplan.solvers import Solver, solve
    from memplan.symbolic import SymbolicPlan, load_symbolic
    from memplan.trace.batches import max_batch
    from memplan.trace.fits import fits
    from memplan.trace.whole_step import plan_step


__all__ = [
    "Backend",
    "Buffer",
    "CompiledModule",
    "CompiledStep",
    "CostModel",
    "Division",
    "Fits",
    "Interval",
    "MemplanError",
    "Plan",
    "Problem",
    "Recording",
    "Solution",
    "Status",
    "SymbolicPlan",
    "Tracker",
    "__version__",
    "compile",
    "compile_step",
    "csvio",
    "diff",
    "explain",
    "fits",
    "install_allocator",
    "load",
    "load_costs",
    "load_symbolic",
    "max_batch",
    "partitioner",
    "plan",
    "plan_step",
    "profile",
    "record",
    "set_log_level",
    "solve",
    "validate",
]

_PROBLEM = ("Buffer", "Interval", "Problem", "Solution", "Status")
_RUNTIME = (
    *("CompiledModule", "CompiledStep", "Recording", "Tracker"),
    *("compile", "compile_step", "install_allocator", "record"),
)
_HOMES = {
    **dict.fromkeys(_PROBLEM, "memplan.core.problem"),
    **dict.fromkeys(_RUNTIME, "memplan.runtime"),
    **dict.fromkeys(("SymbolicPlan", "load_symbolic"), "memplan.symbolic"),
    **dict.fromkeys(("CostModel", "load_costs"), "memplan.evict.costs"),
    "Backend": "memplan.runtime.dynamo.backend",
    "Division": "memplan.core.division",
    "Fits": "memplan.planning.memory_answer",
    "Plan": "memplan.core.plan",
    "diff": "memplan.analysis.diff",
    "explain": "memplan.analysis.explain",
    "fits": "memplan.trace.fits",
    "load": "memplan.planning.planfile",
    "max_batch": "memplan.trace.batches",
    "partitioner": "memplan.integrations.partitioner",
    "plan_step": "memplan.trace.whole_step",
    "profile": "memplan.runtime.profiling.op_timer",
    "set_log_level": "memplan.core.timed",
    "solve": "memplan.solvers",
    "validate": "memplan.core.validate",
}


provide(
    {
        "memplan.analysis.buffers": ("records",),
        "memplan.analysis.forecast": ("forecast",),
        "memplan.core.legal_orders": ("to_networkx",),
        "memplan.planning.planfile": ("save",),
        "memplan.report.forms": ("fits_text",),
        "memplan.report.lines": ("plan_fragment", "report_fragment", "report_text"),
        "memplan.report.pages": ("picture_html",),
        "memplan.report.picture": ("picture_of_plan",),
        "memplan.report.summary": ("make_report",),
        "memplan.report.svg": ("picture_svg",),
        "memplan.report.text_diagrams": ("partition_table", "stack_text"),
    }
)

if os.environ.get("MEMPLAN_LOG"):
    try:
        import_module("memplan.core.timed").set_log_level(os.environ["MEMPLAN_LOG"])
    except UnknownName as unknown:  # an import does not fail for that
        warnings.warn(f"MEMPLAN_LOG is ignored: {unknown}", stacklevel=2)

_ROOMS_WITH_TORCH = ("memplan.integrations", "memplan.runtime", "memplan.targets", "memplan.trace")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts without torch.

    Raises `TorchNotInstalled` for a name that needs torch where torch is not installed.
    """
    if name == "csvio":
        return import_module("memplan.core.csvio")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name].startswith(_ROOMS_WITH_TORCH):
        from memplan.core.arguments import require_torch

        require_torch(f"memplan.{name}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


@overload
def plan(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    target: str | None = None,
    train: bool | None = None,
    gradients: Gradients = "arena",
    ranks: int | None = None,
    dynamic_shapes: None = None,
    **options: Unpack[PlanKeywords],
) -> Plan: ...


@overload
def plan(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    gradients: Gradients = "arena",
    dynamic_shapes: DynamicShapes,
    **options: Unpack[PlanKeywords],
) -> SymbolicPlan: ...


def plan(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    target: str | None = None,
    train: bool | None = None,
    budget: Budget | Sequence[Budget] | None = None,
    arena_budget: Budget | Sequence[Budget] | None = None,
    host_budget: int | str | None = None,
    pinned_budget: int | str | None = None,
    reserve: int | str = 0,
    policy: str | EvictionPolicy = "auto",
    costs: Costs | None = None,
    checkpoint: Checkpoint = "follow",
    kernels: Kernels | None = None,
    divide: Divide = None,
    compress: Compression | None = None,
    gradients: Gradients = "arena",
    schedule: str | Policy = "auto",
    solver: str | Solver = "auto",
    layout: Layout = "auto",
    time_limit: float | None = None,
    device: Device | None = None,
    in_flight: int | str | None = None,
    ranks: int | None = None,
    dynamic_shapes: DynamicShapes | None = None,
) -> Plan | SymbolicPlan:
    """Plan the memory of one step of `model` from fake tensors, to the byte, without computing anything.

    Args:
        model: The module whose call is planned. Its parameters may be real, fake or meta tensors.
        example_inputs: A tuple of positional arguments, a dict of keywords (without `example_kwargs`), or the only
            argument: real, fake or meta tensors of the shapes that the step will see.
        example_kwargs: The keyword arguments.
        target: Plan for this GPU, which need not be there: "h100", "h200", "a100", "a100-40gb", "l4", "l40s",
            "rtx3090", "rtx4090", "b200", or a capability and its memory ("sm90:80GiB"). Kernels, layouts, alignment and
            costs are its own. The model and its inputs are on the CPU, or on the meta device.
        train: Plan forward and backward (True) or the forward alone (False); None follows `model.training`.
        budget: The most bytes on the device, everything together (`Plan.total`): a number of bytes, a text ("8GiB"), a
            share of what eager is predicted to need (0.5, "50%"), or "min". Storages that do not fit are evicted. With
            `device=`, what is on that device counts (`Plan.on_device`).
        arena_budget: The most bytes that the arena alone may have, written alike; a share is one of its live bytes
            without a budget. Where both budgets are given, both hold.
        host_budget: The most bytes of copies on the host at once: a number of bytes, or a text.
        pinned_budget: The same for page-locked memory, which holds those copies where the step runs on CUDA.
        reserve: Bytes on the device that the step does not show, such as an optimizer's state; the total counts them.
        policy: What decides the evictions: "auto" (recompute or offload, whichever costs less), "recompute"
            (no copies), another name of `memplan.evict.policies.POLICIES`, or a function
            (`memplan.evict.workload.Policy`).
        costs: The seconds of ops and copies, for `policy`: a `CostModel`, or the name of a device: "cpu", or a GPU's,
            as for `target`.
        checkpoint: What activation checkpoints of the model (`torch.utils.checkpoint`) mean without a budget: with
            "follow", what they drop is computed again where eager does; "plan" takes the bytes of that step as the
            budget of its arena, and lets `policy` decide what is computed again or offloaded, in at most the time.
        kernels: What computes the ops: "aten", the kernels of eager, or "inductor", the fused kernels that
            `torch.compile` generates, with its partition of forward and backward. None: Inductor's on accelerators,
            eager's on the CPU and where Inductor's cannot be had. Code is generated; nothing runs.
        divide: True allows ops with independent rows (a softmax and its cross-entropy, forward and backward) to run in
            blocks of rows, with the same bits, where evictions alone do not keep the budget; a number always runs them
            in that many blocks; a `Division` sets more. None: Inductor's kernels of an accelerator run the loss head in
            blocks where a budget would evict something otherwise, with gradients that are equal up to rounding. False:
            nothing is divided.
        compress: "int8" saves activations for the backward as 8-bit codes, so that gradients are no longer exact.
        gradients: Where the parameters' gradients are, as in `memplan.compile`: planned in the "arena", or "outside",
            where they belong to the caller.
        schedule: The policy that orders the ops, a name of `memplan.schedule.POLICIES` or a function. "auto" needs no
            more memory than "traced", which is eager's order.
        solver: The solver that assigns offsets, by name or as a function.
        layout: "auto" makes the arena smallest; "tstack" places buffers that are released later at lower offsets, so
            that a release leaves one hole at the top (`plan.to_text()` draws it).
        time_limit: The solver's time limit in seconds.
        device: The device on which the step runs while the model and its caller stay on the CPU.
        in_flight: The most bytes of parameters that are gathered from other ranks ahead of their use at once: a number
            of bytes, or a text; 0 gathers each where it is used. Without it, as many as the arena has room for.
        ranks: Plan one of so many ranks, of which none has to exist: a model that `fully_shard` or
            `DistributedDataParallel` has prepared, or a plain one, each of whose parameters is then divided by rows
            among all ranks and gathered for its use. The inputs are those of one rank.
        dynamic_shapes: The dimensions of the inputs that vary, as `torch.export` takes them.

    Returns:
        The plan: `.arena_size`, `.max_live` and `.total` in bytes, `.report()`, `.save(path)` and more. With
        `dynamic_shapes`, a `SymbolicPlan` for every shape in range.

    Raises:
        UnsupportedGraph: The model cannot be traced as one graph, or holds an op that cannot be planned.
        UnsupportedDevice: The device is not there, or the model cannot run on it this way.
        BudgetInfeasible: No plan keeps the budget; the error has the smallest budget that works.
        InvalidSize: An option has no valid value.
        TorchNotInstalled: torch is not installed; the error has the command that installs it.

    Example:
        >>> plan = memplan.plan(model, (torch.empty(8, 1024, device="meta"),), budget="8GiB")
        >>> print(plan.arena_size, plan.max_live, plan.total)
    """
    keywords = dict(locals())
    from memplan.core.arguments import require_torch

    require_torch("memplan.plan")
    from memplan.planning.options import PlanOptions

    options = PlanOptions.of(keywords)
    if target is not None:
        if dynamic_shapes is not None:
            from memplan.errors import InvalidShapes

            hint = "plan each shape that matters"
            raise InvalidShapes("a target has one shape", where="target with dynamic_shapes", hint=hint, see="target")
        from memplan.trace.for_target import plan_for

        return plan_for(target, model, example_inputs, example_kwargs, train=train, options=options, ranks=ranks)
    if dynamic_shapes is not None:
        if ranks is not None:
            from memplan.errors import InvalidShapes

            hint = "plan each shape that matters"
            raise InvalidShapes("a rank has one shape", where="ranks with dynamic_shapes", hint=hint, see="one-shape")
        from memplan.trace.dynamic.symbolic import plan_symbolic

        return plan_symbolic(model, example_inputs, example_kwargs, train=train, options=options)
    from memplan import trace

    return trace.plan(model, example_inputs, example_kwargs, train=train, options=options, ranks=ranks)
