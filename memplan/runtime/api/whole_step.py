"""`memplan.compile_step`: compiles forward, loss, backward and the optimizer's update to one program in one arena."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.core.arguments import arguments_of
from memplan.core.plan import Plan
from memplan.errors import InputMismatch, MemplanError, UnsupportedCall, UnsupportedGraph
from memplan.runtime.api.select import require_autocast
from memplan.runtime.api.step_builder import StepBuilder
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.optimizer_state import StepStructure
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards import transforms
from memplan.runtime.guards.ranks import require_no_reducer
from memplan.runtime.memory.arena import dtype_of
from memplan.runtime.on_demand.eager_step import eager_step
from memplan.runtime.on_demand.on_demand_offload import OnDemandOffload, passive_for
from memplan.runtime.options import PlanOptions, device_for, given_plan, require_choice
from memplan.runtime.profile.profile_guided import MeasuredStep, ProfileGuide
from memplan.trace.optimizer.updates import Accumulate


class Loss(nn.Module):
    """A model and its loss as one module: the loss is traced too, so that the only tangent is that of the loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.with_targets = _positional_arguments(loss_fn) > 1

    def require_parts(self, batch: tuple[Any, ...]) -> None:
        """Raise `UnsupportedGraph` if the batch does not have the parts that `loss_fn` takes."""
        if self.with_targets and len(batch) != 2:
            what = f"loss_fn takes several arguments, but the batch has {len(batch)} parts"
            raise UnsupportedGraph(
                "example_batch", what, "pass (inputs, targets), or a loss_fn of one argument", see="loss-arguments"
            )

    def forward(self, *batch: Any, **kwargs: Any) -> torch.Tensor:
        if not self.with_targets:
            return self.loss_fn(self.model(*batch, **kwargs))
        inputs, targets = batch
        output = self.model(*inputs, **kwargs) if isinstance(inputs, tuple) else self.model(inputs, **kwargs)
        return self.loss_fn(output, *targets) if isinstance(targets, tuple) else self.loss_fn(output, targets)


class CompiledStep(MeasuredStep):
    """One training step. `memplan.compile_step` makes it; `step(*batch, **kwargs)` returns the loss, detached.

    It changes the parameters and the optimizer's state in place, as `optimizer.step()` does. Gradients exist in the
    arena only; `.grad` is not changed.

    Attributes:
        plan: The plan that it runs; with `accumulate`, that of the call that updates the parameters.
        hooks: The hooks that are called with the events of its steps. If a hook raises, what the step has done is not
            undone: some parameters may be updated, others not.
        accumulate: The number of calls (micro-batches) per update.
        pending: The number of calls since the last update.
        passive: With `on_mismatch="passive"`, the state of the last call that ran without a plan; else None.

    Example:
        ```python
        step = memplan.compile_step(model, optimizer, loss_fn, (inputs, targets))
        for inputs, targets in loader:
            loss = step(inputs, targets)
        ```
    """

    plan: Plan
    hooks: Hooks

    def __init__(
        self,
        structure: StepStructure,
        adding: Runner | None,
        updating: Runner,
        *,
        accumulate: int,
        guides: Sequence[ProfileGuide] = (),
        passive: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        """Make a step of its runners: `adding` (None without `accumulate`) and `updating`.

        `guides`: the guides that measure the runners and replace them. `passive`: runs a step that has no plan.
        """
        self.passive: OnDemandOffload | None = None
        self._passive = passive
        self.plan = updating.plan
        self._guides = tuple(guides)
        self._measurements = next((g.measurements for g in guides if g.runner is updating), [])
        self.hooks = Hooks()
        for runner in (updating, *(() if adding is None else (adding,))):
            self.hooks.attach(runner)
        self.accumulate = accumulate
        self.pending = 0
        self._structure = structure
        self._adding = adding
        self._updating = updating
        self._modes = structure.modes()
        loss = updating.traced.graph.values[updating.traced.results.fresh[0]]
        home = torch.device(updating.traced.graph.storages[loss.storage].device)
        self._tangent = torch.full(loss.shape, 1 / accumulate, dtype=dtype_of(loss), device=home)

    def __call__(self, *batch: Any, **kwargs: Any) -> torch.Tensor:
        """Run a step on a batch like the example batch.

        Returns:
            The loss, detached.

        Raises:
            InputMismatch: The batch, the model or the optimizer differs from what was compiled.
            UnsupportedCall: A hook was added that a compiled step would not call, or a transform is active.
            StaleActivationsError: Another thread is running a step in this arena.
        """
        transforms.refuse((batch, kwargs), self._structure.model)
        runner = self._updating
        if self._adding is not None and self.pending + 1 < self.accumulate:
            runner = self._adding
        try:
            self._structure.require_modes(self._modes)
            require_autocast(runner)
            leaves = runner.signature.flatten(batch, kwargs, training=True)
        except InputMismatch as error:
            if self._passive is None:
                raise
            return self._run_on_demand(error, batch, kwargs, update=runner is self._updating)
        self._structure.follow()
        if self._guides:
            runner = self._advance(runner)
        loss = runner.whole_step(leaves, self._tangent)
        if runner is self._updating:
            self._structure.optimizer._opt_called = True  # type: ignore[attr-defined]  # learning rate schedulers check it
        self.pending = (self.pending + 1) % self.accumulate
        return loss

    def _run_on_demand(
        self, reason: InputMismatch, batch: tuple[Any, ...], kwargs: dict[str, Any], *, update: bool
    ) -> torch.Tensor:
        """Run a step that has no plan eagerly, and offload saved activations on demand."""
        passive = self.passive = passive_for(reason, self.plan, self._updating.traced.device)
        run = _call if passive is None else passive.run
        assert self._passive is not None
        loss = self._passive(self._structure, run, batch, kwargs, accumulate=self.accumulate, update=update)
        self.pending = (self.pending + 1) % self.accumulate
        return loss

    def _advance(self, runner: Runner) -> Runner:
        """Return the runner that replaces `runner` from now on, if its guide has chosen one, else `runner`."""
        guide = next((g for g in self._guides if g.runner is runner), None)
        if guide is None or not guide.due:
            return runner
        try:
            new = guide.turn()
        finally:
            self._guides = tuple(g for g in self._guides if not g.done)
        if new is not runner:
            self.hooks.attach(new)
        if runner is self._updating:
            self._updating, self.plan = new, new.plan
        else:
            self._adding = new
        return new

    @property
    def pool_bytes(self) -> int:
        """Bytes outside the arena that its CUDA graph keeps in a private pool."""
        return self._updating.pool_bytes

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedCall(
            "a compiled step is bound to its model and optimizer, and cannot be copied or pickled",
            hint="save their state_dicts, or copy both together, and compile a step for the copies",
            see="bound-step",
        )


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
    budget: Any = None,
    policy: Any = "auto",
    costs: Any = None,
    divide: Any = None,
    compress: str | None = None,
    schedule: Any = "auto",
    solver: Any = "auto",
    layout: str = "auto",
    time_limit: float | None = None,
    in_place: bool = True,
    sanitize: str | None = None,
    on_mismatch: str = "error",
    cuda_graph: bool = False,
    device: Any = None,
    allow_unsynchronized: bool = False,
) -> CompiledStep:
    """Compile a whole training step: one call does forward, loss, backward and the optimizer's update.

    Each parameter is updated as soon as its gradient exists and its old value has been read for the last time.

    The options that are not listed here are those of `memplan.compile`.

    Args:
        model: The module to train. Its parameters are changed in place.
        optimizer: An SGD, Adam or AdamW optimizer. It keeps its state and its hyperparameters, which every step reads.
        loss_fn: The loss. If it takes one argument, the step computes `loss_fn(model(*batch))`; otherwise the batch is
            `(inputs, targets)` and the step computes `loss_fn(model(inputs), targets)`, with tuples unpacked.
        example_batch: A tuple of the batch's parts, a dict of the model's keywords (without `example_kwargs`), or the
            only part: real tensors with the shapes, dtypes and devices of every later batch.
        example_kwargs: Keyword arguments of the model. With `lambda out: out.loss`, `step(**batch)` trains a model of
            transformers.
        clip_grad_norm: The maximum of the global 2-norm of all gradients. All updates then wait for all gradients.
        accumulate: The number of micro-batches per update. With k, every k-th call updates the parameters, as eager
            does after k times `(loss_fn(...) / k).backward()`; each call returns its loss undivided. The sums of
            gradients persist between calls; they are outside the arena and count as optimizer state.
        plan: A saved plan, or its path, of this very step, to run instead of making one; without `accumulate`.
        on_mismatch: What happens if a batch differs from the example: "error" raises, "passive" runs the step eagerly
            and offloads saved activations on demand to keep the budget.
        cuda_graph: Record the whole step as one CUDA graph at the first call, and replay it. Learning rates are then
            read from memory (float32) and may change at every step; if another hyperparameter changes, the step is
            recorded again.
        device: As in `memplan.compile`. The optimizer's state stays on the CPU too; each step updates parameters and
            state on the device and writes them back.
        allow_unsynchronized: In a process group of several ranks, let each rank train on its own. Otherwise a step that
            contains no collective raises, and so do parameters of a DistributedDataParallel, whose hooks a compiled
            step does not call.

    Returns:
        The compiled step: `step(*batch, **kwargs)` returns the loss, detached.

    Raises:
        UnsupportedGraph: The step cannot be traced as one graph, or the optimizer's update is not supported.
        UnsupportedCall: There are hooks on parameters or on the optimizer's step, which a compiled step would not call,
            or inputs that require gradients, which it would not compute. A call raises for hooks that are added later.
        BudgetInfeasible: No plan keeps the budget; the error names the smallest one that can be kept.
        PlanMismatch: `plan` was made for another step.
        MemplanError: An option has an unknown value.

    Example:
        ```python
        optimizer = torch.optim.AdamW(model.parameters())
        step = memplan.compile_step(model, optimizer, nn.functional.cross_entropy, (inputs, targets))
        loss = step(inputs, targets)
        ```
    """
    _require_sensible(accumulate, clip_grad_norm)
    given = given_plan(plan, budget)
    if given is not None and accumulate > 1:
        what = f"accumulate={accumulate} needs two programs, and a plan is for one"
        raise MemplanError(what, where="compile_step", hint="leave out plan=")
    options = PlanOptions(
        budget=budget,
        policy=policy,
        costs=costs,
        divide=divide,
        compress=compress,
        schedule=schedule,
        solver=solver,
        layout=layout,
        time_limit=time_limit,
        in_place=in_place,
        sanitize=sanitize,
        device=device_for(device, given),
    )
    require_choice("on_mismatch", on_mismatch, ("error", "passive"))
    loss = Loss(model, loss_fn)
    batch, kwargs = arguments_of(example_batch, example_kwargs)
    loss.require_parts(batch)
    _require_no_gradients((batch, kwargs))
    if not allow_unsynchronized:
        require_no_reducer(model)
    builder = StepBuilder(
        loss,
        optimizer,
        options,
        clip_grad_norm=clip_grad_norm,
        cuda_graph=cuda_graph,
        allow_unsynchronized=allow_unsynchronized,
    )
    kinds = (Accumulate.ADD, Accumulate.UPDATE) if accumulate > 1 else (None,)
    structure, runners, guides = builder.build(batch, kwargs, kinds, given)
    passive = partial(eager_step, clip_grad_norm=clip_grad_norm) if on_mismatch == "passive" else None
    adding = runners[0] if accumulate > 1 else None
    return CompiledStep(structure, adding, runners[-1], accumulate=accumulate, guides=guides, passive=passive)


def _require_sensible(accumulate: int, clip_grad_norm: float | None) -> None:
    if type(accumulate) is not int or accumulate < 1:
        raise MemplanError(f"accumulate={accumulate!r}", hint="pass the number of micro-batches per update, 1 or more")
    if clip_grad_norm is not None and (
        isinstance(clip_grad_norm, bool) or not isinstance(clip_grad_norm, (int, float)) or not clip_grad_norm >= 0
    ):
        raise MemplanError(
            f"clip_grad_norm={clip_grad_norm!r}", hint="pass the maximal norm, a number of at least 0, or None"
        )


def _require_no_gradients(batch: Any) -> None:
    """Raise `UnsupportedCall` for an input that requires a gradient: a compiled step computes none for inputs."""
    for i, leaf in enumerate(pytree.tree_leaves(batch)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            what = "requires a gradient, which a compiled step does not give"
            hint = "pass it detached; make what computes it a part of the model, or use memplan.compile"
            raise UnsupportedCall(what, where=f"input {i} of the example batch", hint=hint, see="batch-gradient")


def _call(model: nn.Module, /, *batch: Any, **kwargs: Any) -> Any:
    return model(*batch, **kwargs)


def _positional_arguments(function: Callable[..., Any]) -> int:
    """Return how many positional arguments without defaults a function (or a module's forward) takes.

    Builtin functions such as `torch.sum` have no signature; they count as reductions of one argument.
    """
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)
