"""`memplan.compile_step`: compiles forward, loss, backward and the optimizer's update to one program in one arena."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memplan.core.arguments import arguments_of
from memplan.core.choices import Checkpoint, Compression, Kernels, Layout, OnMismatch, Sanitize
from memplan.core.division import Divide
from memplan.core.plan import Plan
from memplan.distributed.agreement import Agreement
from memplan.distributed.local import largest_part
from memplan.distributed.parallelism import agreed_parallelism_of, parallelism_of
from memplan.errors import UnsupportedGraph
from memplan.evict.workload import Policy as EvictionPolicy
from memplan.planning.options import Budget, Costs, Device
from memplan.runtime.api.calls_of_several import GraphCalls
from memplan.runtime.api.compile import compiled_by
from memplan.runtime.api.compiled_module import CompiledModule
from memplan.runtime.api.compiled_step import CompiledStep, gradients_apart
from memplan.runtime.api.on_demand_offload import OnDemandOffload
from memplan.runtime.api.step_builder import StepBuilder
from memplan.runtime.dynamo.backend import can_be_several
from memplan.runtime.guards.input_guards import kind_of_call
from memplan.runtime.guards.refused_calls import require_collective, require_no_reducer
from memplan.runtime.options import CompileOptions, StepOptions, device_for, given_plan
from memplan.runtime.profiling.op_timer import Measurement
from memplan.schedule import Policy as SchedulePolicy
from memplan.solvers import Solver
from memplan.trace.capture.refusals import breaks, module_of, why_it_breaks
from memplan.trace.default_kernels import with_kernels
from memplan.trace.optimizer.optimizers import require_no_closure
from memplan.trace.optimizer.update_bytes import bytes_of_updates
from memplan.trace.whole_step import LossModule, require_number, require_step

_log = logging.getLogger("memplan")


def compile_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[..., torch.Tensor],
    example_batch: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    plan: Plan | str | os.PathLike[str] | None = None,
    budget: Budget | Sequence[Budget] | None = None,
    arena_budget: Budget | Sequence[Budget] | None = None,
    host_budget: int | str | None = None,
    pinned_budget: int | str | None = None,
    reserve: int | str = 0,
    in_flight: int | str | None = None,
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
    sanitize: Sanitize | None = None,
    on_mismatch: OnMismatch = "replan",
    fullgraph: bool = False,
    cuda_graph: bool = False,
    device: Device | None = None,
    allow_unsynchronized: bool = False,
) -> CompiledStep:
    """Compile a whole training step: one call does forward, loss, backward and the optimizer's update.

    With SGD, Adam and AdamW, each parameter is updated as soon as its gradient exists and its old value has been read
    for the last time.

    The options that are not listed here are those of `memplan.compile`. A `budget` limits the whole call, the
    optimizer's state and what its update allocates included.

    Args:
        model: The module to train. Its parameters are changed in place.
        optimizer: Any optimizer that needs no closure. It keeps its state and its hyperparameters, which every step
            reads. SGD, Adam and AdamW are updated by torch's fused kernels unless their options ask for others; of all
            others, the own `step()` runs after the planned forward and backward.
        loss_fn: The loss. If it takes one argument, the step computes `loss_fn(model(*batch))`; otherwise the batch is
            `(inputs, targets)` and the step computes `loss_fn(model(inputs), targets)`, with tuples unpacked.
        example_batch: A tuple of the batch's parts, a dict of the model's keywords (without `example_kwargs`), or the
            only part: real tensors with the shapes, dtypes and devices of a typical batch. Others are planned anew. If
            `loss_fn` takes inputs and targets, a list of both, as a `DataLoader` yields, is taken apart.
        example_kwargs: Keyword arguments of the model. With `lambda out: out.loss`, `step(**batch)` trains a model of
            transformers.
        clip_grad_norm: The maximum of the global 2-norm of all gradients. All updates then wait for all gradients.
        accumulate: The number of micro-batches per update. With k, every k-th call updates the parameters by the
            optimizer's own `step()`, as eager does after k times `(loss_fn(...) / k).backward()`; each call returns its
            loss undivided. The sums of gradients persist between calls; they are outside the arena, and count in the
            plan's `reserve` (with `device`, they are on the host).
        plan: A saved plan, or its path, of this very step, to run instead of making one.
        kernels: None takes Inductor's kernels on accelerators, and eager's on the CPU and where Inductor's cannot be
            had, which the log then says. "inductor": the fused kernels that Inductor generates for forward and
            backward, with the bits of `torch.compile`. "aten": the kernels of eager. The update is computed by torch's
            own kernels in either case.
        on_mismatch: What happens if a batch, the model's mode or the optimizer's groups differ from what was planned:
            "replan" makes another plan (up to 8, in one arena; calls beyond run eagerly, with a warning), "error"
            raises, "eager" runs the step eagerly, and "passive" also offloads saved activations on demand to keep
            the budget.
        fullgraph: Raise `UnsupportedGraph` for a step that one graph cannot hold. By default, and without a budget, its
            forward and backward are then compiled as several graphs, as by `memplan.compile`, the optimizer's own
            `step()` runs after them, and the log says why.
        cuda_graph: Record the whole step as one CUDA graph at the first call, and replay it (with `accumulate`, forward
            and backward). Learning rates are then
            read from memory (float32, as with a tensor as `lr`: eager has the same bits if float32 holds the rate) and
            may change at every step; if another hyperparameter changes, the step is recorded again.
        device: As in `memplan.compile`. The optimizer's state stays on the CPU too; each step updates parameters and
            state on the device and writes them back.
        allow_unsynchronized: In a process group of several ranks, let each rank train on its own. Otherwise a step that
            contains no collective raises, and so do parameters of a DistributedDataParallel, whose hooks a compiled
            step does not call.

    Returns:
        The compiled step: `step(*batch, **kwargs)` returns the loss, detached.

    Raises:
        UnsupportedGraph: The step cannot be traced as one graph, and `fullgraph` or an option needs one, or graph
            breaks would not help; or the optimizer needs a closure.
        UnsupportedCall: There are hooks on parameters or on the optimizer's step, which a compiled step would not call,
            or inputs that require gradients, which it would not compute. A call raises for hooks that are added later.
        BudgetInfeasible: No plan keeps the budget; the error names the smallest one that can be kept.
        PlanMismatch: `plan` was made for another step.
        MemplanError: An option has an unknown value.
        RanksDiffer: Ranks that train the model together would run other collectives, or have other options.

    Example:
        ```python
        optimizer = torch.optim.AdamW(model.parameters())
        step = memplan.compile_step(model, optimizer, nn.functional.cross_entropy, (inputs, targets))
        loss = step(inputs, targets)
        ```
    """
    keywords = dict(locals())
    model = module_of(model)
    require_step("compile_step", optimizer, loss_fn)
    parallelism = agreed_parallelism_of(model)
    with Agreement(None if parallelism is None else parallelism.group) as ranks:
        given = given_plan(keywords)
        options = StepOptions.of({**keywords, "device": device_for(device, given)})
        loss = LossModule(model, loss_fn)
        batch, kwargs = arguments_of(example_batch, example_kwargs)
        batch = loss.parts_of(batch)
        options = with_kernels(options, loss, (batch, kwargs), given=given)
        if not allow_unsynchronized:
            require_no_reducer(model)
        builder = StepBuilder(loss, optimizer, options)
        if accumulate > 1 or not builder.plans_update:
            return step_then_update(loss, optimizer, options, batch=batch, kwargs=kwargs, given=given)
        try:
            main = builder.build(batch, kwargs, given)
        except UnsupportedGraph as refused:
            if given is not None or fullgraph:
                raise
            return step_of_graphs(refused, loss, optimizer, options, batch=batch, kwargs=kwargs)
        name = ranks.compare(builder.agreed_lines((batch, kwargs), main, given))
        builder.ranks.begin(name, [main.program.collectives])
        return CompiledStep(builder, main)


def step_then_update(
    loss: LossModule,
    optimizer: torch.optim.Optimizer,
    options: StepOptions,
    *,
    batch: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Plan | None = None,
) -> StepThenUpdate:
    """Return a step whose forward and backward are one graph, or several where one cannot hold them."""
    require_no_closure(optimizer)
    of = _options(loss, optimizer, options)
    try:
        model = compiled_by(of, loss, (batch, kwargs), train=True, given=given)
    except UnsupportedGraph as refused:
        if options.fullgraph or given is not None:
            raise
        return step_of_graphs(refused, loss, optimizer, options, batch=batch, kwargs=kwargs)
    if not options.allow_unsynchronized:
        require_collective([model.plan.graph])
    return StepThenUpdate(model, optimizer, options)


def step_of_graphs(
    refused: UnsupportedGraph,
    loss: LossModule,
    optimizer: torch.optim.Optimizer,
    options: StepOptions,
    *,
    batch: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StepThenUpdate:
    """Return a step whose forward and backward are several graphs, and log why one graph could not hold them.

    Raises `refused`, the error of the step as one graph, where graph breaks would not help or an option needs one
    graph: a budget, `device`, `divide`, `compress`, `kernels`, `cuda_graph`, and ranks that train together.
    """
    one = options.has_budget or not breaks(refused) or parallelism_of(loss) is not None
    if one or not can_be_several(refused, options):
        raise refused
    require_no_closure(optimizer)
    of = _options(loss, optimizer, options, several=True)
    model = CompiledModule(loss, GraphCalls(loss, of, True, kind=kind_of_call(batch, kwargs)))
    _log.warning(
        "%s is planned as several graphs, and %s's step() runs by itself after them, because one graph cannot hold the "
        "step: %s; .plan is complete after the first step",
        type(loss.model).__name__,
        type(optimizer).__name__,
        why_it_breaks(refused),
    )
    return StepThenUpdate(model, optimizer, options)


class StepThenUpdate(CompiledStep):
    """A training step of a compiled model with its loss, and of the optimizer's own `step()`.

    It is called like the `CompiledStep` that it is. Gradients exist until `step()` ends; `.grad` is not changed.

    Attributes:
        plan: The plan of forward and backward; its `reserve` has the optimizer's state and what `step()` allocates.

    Example:
        ```python
        step = memplan.compile_step(model, torch.optim.Adagrad(model.parameters()), loss_fn, (inputs, targets))
        loss = step(inputs, targets)
        ```
    """

    def __init__(self, model: CompiledModule, optimizer: torch.optim.Optimizer, options: StepOptions) -> None:
        """Make a step of a compiled model, which returns its loss."""
        self.accumulate = options.accumulate
        self.pending = 0
        self.hooks = model.hooks
        self._model, self._optimizer, self._clip = model, optimizer, options.clip_grad_norm
        self._sums: dict[torch.nn.Parameter, torch.Tensor | None] = {}  # of gradients, since the last update

    def _taken(self) -> Sequence[Measurement]:
        return self._model._taken()

    @property
    def passive(self) -> OnDemandOffload | None:  # type: ignore[override]
        """With `on_mismatch="passive"`, the state of the last call that ran without a plan; else None."""
        return self._model.passive

    @property
    def plan(self) -> Plan:
        """The plan of forward and backward; of several graphs, the joint plan of the last complete step."""
        return self._model.plan

    @property
    def pool_bytes(self) -> int:
        """Bytes outside the arena that CUDA graphs keep in private pools."""
        return self._model.pool_bytes

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
        own = [p for group in self._optimizer.param_groups for p in group["params"]]
        everyone = dict.fromkeys([*own, *self._model.parameters()])
        with gradients_apart(everyone, self._sums):
            with torch.enable_grad():
                loss = self._model(*batch, **kwargs)
                require_number(loss)
                if not loss.requires_grad:
                    what, hint = "the loss depends on none of its parameters", "make it depend on one that trains"
                    raise UnsupportedGraph("loss_fn", what, hint, see="loss-parameters")
                loss.backward(torch.full_like(loss, 1 / self.accumulate))
            self._sums = {p: p.grad for p in everyone}
            self.pending += 1
            if self.pending >= self.accumulate:
                if self._clip is not None:
                    torch.nn.utils.clip_grad_norm_(own, self._clip)
                self._sums, self.pending = {}, 0  # a step() that raises has had these gradients
                self._optimizer.step()
        result: torch.Tensor = loss.detach()
        return result


def _options(
    loss: LossModule, optimizer: torch.optim.Optimizer, options: StepOptions, *, several: bool = False
) -> CompileOptions:
    """Return the options of the step of a model, which count the optimizer's state and what its `step()` allocates.

    They do not, with a warning in the log, for an optimizer that cannot run on fake tensors.
    """
    state = temporaries = 0
    found = bytes_of_updates(optimizer, loss.parameters())
    if found is None:
        what = "%s: what its step() keeps and allocates is not known ahead; the plan's total has it if reserve= has"
        _log.warning(what, type(optimizer).__name__)
    else:
        state, temporaries = found.state, found.temporaries
    if options.accumulate > 1:  # sums of gradients outlive a call
        state += sum(largest_part(p).nbytes for p in loss.parameters() if p.requires_grad)
    divided = parallelism_of(loss) is not None
    return CompileOptions.of_step(options, state=state, temporaries=temporaries, several=several or divided)
