"""`memplan.compile`: compiles a model to run forward and backward in one planned arena."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from memplan.core.arguments import arguments_of
from memplan.core.choices import Checkpoint, Compression, Gradients, Kernels, Layout, OnMismatch, Sanitize
from memplan.core.division import Divide
from memplan.core.plan import Plan
from memplan.distributed.parallelism import agreed_parallelism_of
from memplan.errors import InputMismatch, UnsupportedGraph
from memplan.evict.workload import Policy as EvictionPolicy
from memplan.planning.options import Budget, Costs, Device, DynamicShapes
from memplan.runtime.api.calls_of_several import GraphCalls, RankCalls
from memplan.runtime.api.compiled_module import CompiledModule
from memplan.runtime.api.module_calls import ModuleCalls
from memplan.runtime.dynamo.backend import can_be_several
from memplan.runtime.guards.input_guards import kind_of_call
from memplan.runtime.options import CompileOptions, device_for, given_plan, gradients_for
from memplan.schedule import Policy as SchedulePolicy
from memplan.solvers import Solver
from memplan.trace.capture.refusals import module_of, why_it_breaks
from memplan.trace.default_kernels import with_kernels

_log = logging.getLogger("memplan")


def compile(
    model: nn.Module,
    example_inputs: Any = None,
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
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
    schedule: str | SchedulePolicy = "auto",
    solver: str | Solver = "auto",
    layout: Layout = "auto",
    time_limit: float | None = None,
    in_place: bool = True,
    gradients: Gradients = "arena",
    sanitize: Sanitize | None = None,
    on_mismatch: OnMismatch = "replan",
    fullgraph: bool = False,
    cuda_graph: bool = False,
    device: Device | None = None,
    dynamic_shapes: DynamicShapes | None = None,
    bucketing: Mapping[str, int] | None = None,
) -> CompiledModule:
    """Compile `model` to run forward and backward at planned addresses in one preallocated arena.

    The options `budget`, `arena_budget`, `host_budget`, `pinned_budget`, `reserve`, `policy`, `costs`,
    `checkpoint`, `divide`, `compress`, `schedule`, `solver`, `layout` and `time_limit` are those of `memplan.plan`; not
    all are repeated here.

    Args:
        model: The module to compile. The result shares its parameters, buffers and submodules.
        example_inputs: A tuple of positional arguments, a dict of keywords (without `example_kwargs`), or the only
            argument: real tensors with the usual shapes, dtypes and devices of later calls. None: the
            model is planned at its first call, and has no `.plan` before; `()` is a call without arguments.
        example_kwargs: The keyword arguments.
        train: True plans forward and backward. False plans the forward alone; results then have no gradients. None
            follows `model.training`; in eval mode, a call that eager would record then gets a program with a backward,
            or runs eagerly while the results of an earlier such call are alive.
        plan: A saved plan, or its path, to run instead of making one. It must have been made for this very graph, and
            has its budget already.
        budget: The most bytes on the device, everything together: an int, a text ("8GiB"), a share of what eager is
            predicted to need (0.5, "50%"), or "min". Saved activations that do not fit are recomputed or offloaded.
            Kernels' temporaries are measured while compiling, and count too.
        arena_budget: The same for the arena alone; a share is one of its live bytes without a budget.
        host_budget: The most bytes of copies on the host at once.
        pinned_budget: The same for page-locked memory, which holds those copies on CUDA.
        reserve: Bytes on the device that the step does not show, such as an optimizer's state; the total counts them.
        policy: The policy that decides what is evicted.
        costs: The cost model of the policy. None: on an accelerator, ops and copies are timed before the first step;
            on the CPU, a roofline. "measure" measures the first steps and plans again from the measured times, until
            no better plan is found (`CompiledModule.measurements`).
        kernels: None takes Inductor's kernels on accelerators, and eager's on the CPU and where Inductor's cannot be
            had, which the log then says. "inductor": the fused kernels that `torch.compile` generates, with its bits
            and the time of its compilation. "aten": the kernels of eager, with the bits of eager; on a GPU they take
            up to twice the memory and the time.
        divide: As in `memplan.plan`.
        compress: As in `memplan.plan`.
        checkpoint: As in `memplan.plan`.
        schedule: The policy that orders the ops.
        solver: The solver that assigns offsets.
        layout: As in `memplan.plan`.
        time_limit: The time limit of the solver, in seconds.
        in_place: Let a result take the bytes of an input that has its last use there, if the kernel allows it.
        gradients: Where the gradients of parameters are. "arena" leaves them in the arena until the next call, which
            takes the least memory: a `.grad` that is still set then is copied out, once. With `device` and `cuda_graph`
            they are outside. "outside": they are tensors of the caller; each is added to its `.grad` as soon as it is
            made, where that is set, so that accumulation needs one set.
        sanitize: Check every step, slowly: "poison" fills buffers with NaN before their first write and after their
            last use; "redzone" checks bytes on both sides of every buffer.
        on_mismatch: What happens at a call that differs from the example, or after the model has changed: "replan"
            makes a plan for such calls, up to 8 programs; beyond them the original model runs, with a warning. "error"
            raises, "eager" runs the original model, and "passive" runs the original model and offloads saved
            activations on demand to keep the budget (also if the plan of another mode would exceed it).
        fullgraph: Raise `UnsupportedGraph` for a model that one graph cannot hold. By default such a model is compiled
            as several graphs, as `torch.compile` breaks it, with Python between them, and the log says why. These share
            one arena once a step is complete; then `CompiledModule.plan` is their joint plan, and `budget` holds for
            all together. Each kind of call is planned, whatever `on_mismatch` says, unless it is "error".
        cuda_graph: Record forward and backward as two CUDA graphs at the first call, and replay them. Inputs are
            copied in and results copied out; `CompiledModule.pool_bytes` are the bytes outside the arena.
        device: Run on this device ("cuda", "cuda:1") while the model, its inputs and its results stay on the CPU. Every
            step copies parameters, inputs and results by planned ops that run beside its kernels. The arena then holds
            all of it, and budgets count all of it: parameters that do not fit are loaded when they are needed, and
            gradients are copied out when they are made. "cpu" stands in for a device: a separate arena in the CPU's
            memory with the same plan and the same copies. A sequence (`["cuda:0", "cuda:1"]`, or
            `["cpu:0", "cpu:1"]`) divides the model's blocks among devices, with an arena on each: forward and backward
            of a block run on one device, and planned ops send what another one needs. `budget` is then that of each
            device, or a sequence with one for each; nothing is evicted (`policy` stays "auto"). See `Plan.devices`.
        dynamic_shapes: The dimensions of the inputs that vary, and their ranges, as `torch.export` takes them. Every
            shape in range runs in one arena, which grows if a shape needs more; a shape out of range is a mismatch.
        bucketing: Multiples by dimension: `{"seq": 64}` plans each size of that dimension for the next multiple of 64,
            so that the arena grows less often and the shapes in between share their offsets. Nothing is padded, and
            results are the same.

    Returns:
        The compiled module, called like `model`.

    Raises:
        UnsupportedGraph: The model cannot be traced as one graph, and `fullgraph` or an option needs one, or graph
            breaks would not help; nothing was allocated.
        UnsupportedDevice: The device does not exist, or the model is on a device already.
        UnsupportedCall: The options cannot be combined.
        BudgetInfeasible: No plan keeps the budget; the error names the smallest one that can be kept.
        InputMismatch: A parameter, buffer or input is a fake or meta tensor; or there is no example where `plan`, or a
            model of several ranks, needs one.
        PlanMismatch: `plan` was made for another graph or device.
        MemplanError: An option has an unknown value. What `memplan.load` raises is raised for `plan`.

    Example:
        ```python
        compiled = memplan.compile(model, inputs, budget="2GiB")  # without inputs: planned at the first call
        loss = compiled(inputs).square().mean()
        loss.backward()
        ```
    """
    keywords = dict(locals())
    given = given_plan(keywords)
    follows = {"device": device_for(device, given), "gradients": gradients_for(gradients, given)}
    options = CompileOptions.of({**keywords, **follows})
    without = example_inputs is None and example_kwargs is None
    example = None if without else arguments_of(() if example_inputs is None else example_inputs, example_kwargs)
    return compiled_by(options, model, example, train=train, given=given)


def compiled_by(
    options: CompileOptions,
    model: nn.Module,
    example: tuple[tuple[Any, ...], dict[str, Any]] | None,
    *,
    train: bool | None,
    given: Plan | None,
) -> CompiledModule:
    """Return what `compile` does, for checked options. Raises `InputMismatch` for what needs an example."""
    model = module_of(model)
    parallelism = agreed_parallelism_of(model)
    if example is None and (given is not None or parallelism is not None):
        what = "plan=" if given is not None else "a model of several ranks"
        hint = "pass the inputs of a usual call: memplan.compile(model, inputs)"
        raise InputMismatch(f"{what} needs example inputs", where=type(model).__name__, hint=hint)
    options = with_kernels(options, model, example or (), given=given)
    if parallelism is not None:
        calls: ModuleCalls = RankCalls(model, options, train, given=given, parallelism=parallelism)
    else:
        calls = ModuleCalls(model, options, train, given=given)
    try:
        if example is not None:
            calls.compile(*example)
    except UnsupportedGraph as refused:
        assert example is not None
        one = options.fullgraph or given is not None or parallelism is not None
        if one or not can_be_several(refused, options):
            raise
        calls = GraphCalls(model, options, train, kind=kind_of_call(*example))
        what = "%s is planned as several graphs, because one cannot hold it: %s; .plan is complete after the first step"
        _log.warning(what, type(model).__name__, why_it_breaks(refused))
    return CompiledModule(model, calls)
