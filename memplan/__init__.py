"""memplan: ahead-of-time static memory planning for PyTorch graphs.

    plan(model, example_inputs)      what a step needs, to the byte, from fake tensors
    compile(model, example_inputs)   a module that runs it in one preallocated arena
    compile_step(model, optimizer, loss_fn, batch)   a whole training step, updates included
    record(step_fn)                  what a run allocates that cannot be traced, placed by plan; install_allocator()
                                     first, and it can be replayed on CUDA
    solve(problem)                   offset assignment on its own, for compilers and embedded systems
    max_batch(make, budget)          the largest batch that fits, without running out of memory once
    profile(model, example_inputs)   what each op takes on this machine: costs for budgets
    load(path)                       a saved plan, validated; load_symbolic(path): one for a range of shapes
    Tracker()                        a hook that counts what lies in the arena and on the host at each step
    Backend(**options)               torch.compile(model, backend="memplan"), with options
    explain(plan), diff(one, two)    who is alive at a step and why; what changed between two plans

Importing this package imports no torch and patches nothing: each name is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from memplan.errors import MemplanError
from memplan.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from memplan.analysis.diff import diff
    from memplan.analysis.explain import explain
    from memplan.core import csvio
    from memplan.core.division import Divide, Division
    from memplan.core.plan import Plan
    from memplan.core.problem import Buffer, Interval, Problem, Solution, Status
    from memplan.core.validate import validate
    from memplan.evict.costs import CostModel, load_costs
    from memplan.evict.workload import Policy as EvictionPolicy
    from memplan.planning.budget import Budget
    from memplan.planning.planfile import load
    from memplan.runtime import (
        CompiledModule,
        CompiledStep,
        Recording,
        Tracker,
        compile,
        compile_step,
        install_allocator,
        profile,
        record,
    )
    from memplan.runtime.dynamo.backend import Backend
    from memplan.schedule import Policy
    from memplan.solvers import Solver, solve
    from memplan.symbolic import SymbolicPlan, load_symbolic
    from memplan.trace.batches import max_batch

    class _Options(TypedDict, total=False):
        """Options of `plan` on which the type of its result does not depend."""

        train: bool | None
        budget: Budget | Sequence[Budget] | None
        policy: str | EvictionPolicy
        costs: CostModel | str | None
        divide: Divide
        compress: str | None
        gradients: str
        schedule: str | Policy
        solver: str | Solver
        layout: str
        time_limit: float | None
        device: Any


__all__ = [
    "Backend",
    "Buffer",
    "CompiledModule",
    "CompiledStep",
    "CostModel",
    "Division",
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
    "install_allocator",
    "load",
    "load_costs",
    "load_symbolic",
    "max_batch",
    "plan",
    "profile",
    "record",
    "solve",
    "validate",
]

_PROBLEM = ("Buffer", "Interval", "Problem", "Solution", "Status")
_RUNTIME = (
    *("CompiledModule", "CompiledStep", "Recording", "Tracker"),
    *("compile", "compile_step", "install_allocator", "profile", "record"),
)
_HOMES = {
    **dict.fromkeys(_PROBLEM, "memplan.core.problem"),
    **dict.fromkeys(_RUNTIME, "memplan.runtime"),
    **dict.fromkeys(("SymbolicPlan", "load_symbolic"), "memplan.symbolic"),
    **dict.fromkeys(("CostModel", "load_costs"), "memplan.evict.costs"),
    "Backend": "memplan.runtime.dynamo.backend",
    "Division": "memplan.core.division",
    "Plan": "memplan.core.plan",
    "diff": "memplan.analysis.diff",
    "explain": "memplan.analysis.explain",
    "load": "memplan.planning.planfile",
    "max_batch": "memplan.trace.batches",
    "solve": "memplan.solvers",
    "validate": "memplan.core.validate",
}


def __getattr__(name: str) -> Any:
    """Import what people ask for when they first do: the command line starts without any of it."""
    if name == "csvio":
        return import_module("memplan.core.csvio")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


@overload
def plan(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: None = None,
    **options: Unpack[_Options],
) -> Plan: ...


@overload
def plan(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any,
    **options: Unpack[_Options],
) -> SymbolicPlan: ...


def plan(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    budget: Budget | Sequence[Budget] | None = None,
    policy: str | EvictionPolicy = "auto",
    costs: CostModel | str | None = None,
    divide: Divide = None,
    compress: str | None = None,
    gradients: str = "safe",
    schedule: str | Policy = "auto",
    solver: str | Solver = "auto",
    layout: str = "auto",
    time_limit: float | None = None,
    device: Any = None,
    dynamic_shapes: Any = None,
) -> Plan | SymbolicPlan:
    """Plan one step of `model` from fake tensors: what it needs, to the byte, without computing anything.

    `example_inputs` is the tuple of positional arguments (or the only one), `example_kwargs` the others;
    real, fake and meta tensors will do, and so they will as parameters. `train`: plan forward and backward
    (None: as `model.training` says) or the forward alone. `budget`: the most that the arena may have, in bytes, as
    a text ("8GiB"), as a share of its size without a budget (0.5, "50%"), or "min"; what does not fit is evicted
    by `policy` ("auto": computed again or copied to the host and back, whatever costs least by `costs`, a
    `CostModel` or the name of a device: "a100", "h100", "h200", "cpu"; "recompute": without copies; or a function
    of your own, see `memplan.evict.workload.Policy`). `schedule`: which order of the ops to plan, by the name of its
    policy (`memplan.schedule.POLICIES`): "auto" is never worse than "traced", eager's own. `layout`: "tstack" places
    what is released later lower, so that a release leaves one hole at the top (the ext-tstack note's diagram, drawn by
    `plan.to_text()`); "auto" makes the arena smallest. `time_limit` is the solver's, in seconds. `device`: plan to run
    there while the model and its caller stay on the CPU, as `memplan.compile` does. `dynamic_shapes`: which dimensions
    of the inputs vary, as `torch.export` takes it; the result is a `SymbolicPlan`, for every shape in range. Raises
    `UnsupportedGraph` when the model cannot be traced as one graph, `UnsupportedDevice`, and `BudgetInfeasible`, with
    the smallest budget that can be kept, when `budget` cannot.

    `divide=True`: where evictions alone find no way, ops whose rows are independent (a softmax and its cross-entropy,
    forward and backward) run block by block of rows, with the same bits; a number: always, in so many blocks;
    `memplan.Division` says more. `compress="bits"`: masks wait for the backward with a bit for each element; "int8":
    activations too, as 8-bit codes, so that gradients are no longer exact (see `memplan/trace/quantize.py`).
    `gradients="arena"`: parameters' gradients are planned like everything else, for `compile(gradients="arena")`,
    without a budget; otherwise ("safe", "owned") they are the caller's.
    """
    from memplan import trace

    options: dict[str, Any] = {
        **{"train": train, "budget": budget, "policy": policy, "costs": costs},
        **{"schedule": schedule, "solver": solver, "layout": layout, "time_limit": time_limit},
    }
    if dynamic_shapes is not None:
        from memplan.trace.dynamic.dims import refuse_beside
        from memplan.trace.dynamic.symbolic import plan_symbolic

        refuse_beside(device=device, divide=divide, compress=compress)
        trace.stay_in_arena(gradients, dynamic_shapes=dynamic_shapes)
        return plan_symbolic(model, example_inputs, example_kwargs, dynamic_shapes=dynamic_shapes, **options)
    options |= {"device": device, "divide": divide, "compress": compress, "gradients": gradients}
    return trace.plan(model, example_inputs, example_kwargs, **options)
