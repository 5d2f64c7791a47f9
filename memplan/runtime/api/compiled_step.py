"""`CompiledStep`, which `memplan.compile_step` returns: it runs one training step per call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.errors import InputMismatch, MemplanError, UnsupportedCall
from memplan.runtime.api.on_demand_offload import OnDemandOffload, offload_for, offload_within
from memplan.runtime.api.select import require_autocast
from memplan.runtime.api.step_builder import StepBuilder, StepPlan
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.optimizer_state import StepGuards
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards import transforms
from memplan.runtime.guards.input_guards import TensorKind, kind_of_call
from memplan.runtime.memory.arena import dtype_of
from memplan.runtime.profiling.profile_guided import MeasuredStep
from memplan.trace.capture.joint_graph import autocast_dtype

MOST_PLANS = 8  # kinds of calls that get a plan
_log = logging.getLogger("memplan")


@dataclass(frozen=True, slots=True)
class _Ready:
    """A checked call: its program, its leaves, and the current parameters and state."""

    runner: Runner
    leaves: list[Any]
    current: list[torch.Tensor]


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

    hooks: Hooks

    def __init__(
        self,
        builder: StepBuilder,
        main: StepPlan,
        *,
        eager: Callable[..., torch.Tensor],
    ) -> None:
        """Make a step of the plan of its example batch. `builder` makes others; `eager` runs a step without a plan."""
        self.passive: OnDemandOffload | None = None
        self.accumulate = builder.options.accumulate
        self.pending = 0
        self.hooks = builder.hooks
        self._builder, self._module_guards = builder, builder.guards
        self._on_mismatch = builder.options.on_mismatch
        self._eager = eager
        self._main = self._last = main
        self._refused: set[Any] = set()  # kinds of calls that cannot be planned
        self._warned = False
        self._measurements = next((g.measurements for g in builder.guides if g.runner is self._updating), [])
        self._tangents: dict[Any, torch.Tensor] = {}

    def __call__(self, *batch: Any, **kwargs: Any) -> torch.Tensor:
        """Run a step on a batch.

        Args:
            batch: The parts of the batch: tensors with the shapes, dtypes and devices of the example. Others are
                planned anew (`on_mismatch="replan"`).
            kwargs: Keyword arguments of the model.

        Returns:
            The loss, detached.

        Raises:
            InputMismatch: With `on_mismatch="error"`: the batch, the model or the optimizer differs from what was
                compiled.
            UnsupportedCall: A hook was added that a compiled step would not call, or a transform is active.
            StaleActivationsError: Another thread is running a step in this arena.

        Example:
            ```python
            loss = step(inputs, targets)
            ```
        """
        with self._builder.ranks:
            return self._call(batch, kwargs)

    def _call(self, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        transforms.refuse((batch, kwargs), self._module_guards.model)
        update = self.pending + 1 >= self.accumulate
        try:
            ready = self._ready(self._last, batch, kwargs, update=update)
        except InputMismatch as error:
            found = self._otherwise(error, batch, kwargs, update=update)
            if isinstance(found, torch.Tensor):
                return found
            ready = found
        if self._builder.guides:
            ready = self._advanced(ready)
        loss = self._run(ready, update=update)
        self.pending = (self.pending + 1) % self.accumulate
        return loss

    def _run(self, ready: _Ready, *, update: bool) -> torch.Tensor:
        """Run a step that was checked."""
        loss = ready.runner.whole_step(ready.leaves, self._tangent(ready.runner), ready.current)
        if update:  # which learning rate schedulers check
            self._module_guards.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _ready(self, plan: StepPlan, batch: tuple[Any, ...], kwargs: dict[str, Any], *, update: bool) -> _Ready:
        """Return what runs a call by a plan, after all checks. Raises `InputMismatch` if it is not for the call."""
        guards = self._module_guards
        guards.require_modes(plan.modes)
        program = plan.updating if update or plan.adding is None else plan.adding
        if program.runner.arena.ownership.released:
            self._builder.again(program)
        require_autocast(program.runner)
        leaves = program.runner.input_guards.flatten(batch, kwargs, training=True)
        self._last = plan
        runner = program.runner
        current = runner.checked(leaves)
        with runner.arena.ownership as ownership:
            ownership.order_streams()  # the step before may still read, on another stream, what this writes
            guards.synchronize(program.counted)
        self._builder.agree(plan, program)
        return _Ready(runner, leaves, current)

    @property
    def plan(self) -> Plan:
        """The plan that it runs."""
        return self._updating.plan

    @property
    def _updating(self) -> Runner:
        """The program of the example batch that updates the parameters."""
        return self._main.updating.runner

    # -- calls that differ -------------------------------------------------------------------------------

    def _otherwise(
        self, reason: InputMismatch, batch: tuple[Any, ...], kwargs: dict[str, Any], *, update: bool
    ) -> _Ready | torch.Tensor:
        """Return what runs a call that differs from the last plan, or its loss if it ran eagerly."""
        if self._on_mismatch == "error":
            raise reason
        if self._on_mismatch != "replan":
            return self._run_eagerly(reason, batch, kwargs, update=update)
        guards = self._module_guards
        several = self._builder.parallelism is not None  # then a step by torch alone would run other collectives
        if not self._builder.plans_update:  # any more; the guards stay, so that each such call comes here
            if several:
                raise reason
            self._warn(reason, "its update is no longer one of torch's fused kernels; compile the step again")
            return self._run_eagerly(reason, batch, kwargs, update=update, quiet=True)
        if (found := self._by_another_plan(batch, kwargs, update=update)) is not None:
            return found
        kind = _kind(guards, batch, kwargs)
        if several and (len(self._builder.plans) >= MOST_PLANS or kind in self._refused):
            what = f"{reason.what}, and {len(self._builder.plans)} plans exist already"
            hint = "pad or bucket batches to a few shapes; a step of several ranks does not run eagerly"
            raise UnsupportedCall(what, where=reason.where, hint=hint, see="ranks-refused") from reason
        if len(self._builder.plans) >= MOST_PLANS or kind in self._refused:
            self._warn(reason, f"{len(self._builder.plans)} plans exist already")
            return self._run_eagerly(reason, batch, kwargs, update=update, quiet=True)
        _log.info("%s: planned anew: %s", self.plan.model, reason.summary)
        try:
            plan = self._builder.build(batch, kwargs)
        except UnsupportedCall:
            raise
        except MemplanError as error:
            if several or error.see == "optimizer-state":  # eager would fail too, in the middle of its update
                raise
            self._refused.add(kind)
            self._warn(reason, f"it cannot be planned ({error.what})")
            return self._run_eagerly(reason, batch, kwargs, update=update, quiet=True)
        return self._ready(plan, batch, kwargs, update=update)

    def _by_another_plan(self, batch: tuple[Any, ...], kwargs: dict[str, Any], *, update: bool) -> _Ready | None:
        """Return what runs a call by one of the plans; None if none is for it."""
        guards = self._module_guards
        try:
            guards.modes()
        except InputMismatch:
            guards.refresh()
        guards.require_known()
        key = guards.update_key
        for plan in self._builder.plans:
            if plan.update_key == key:
                with contextlib.suppress(InputMismatch):
                    return self._ready(plan, batch, kwargs, update=update)
        return None

    def _warn(self, reason: InputMismatch, why: str) -> None:
        """Log once that calls run eagerly, and why."""
        if self._warned:
            return
        self._warned = True
        _log.warning(
            "%s: a call runs eagerly, because %s. It differs from the last plan: %s. Pad or bucket batches to a few "
            "shapes, drop the last batch (drop_last=True), or compile another step for it. This is said once.",
            self.plan.model,
            why,
            reason.summary,
        )

    def _run_eagerly(
        self,
        reason: InputMismatch,
        batch: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        update: bool,
        quiet: bool = False,
    ) -> torch.Tensor:
        """Run a step that has no plan eagerly, and offload saved activations on demand if there is a budget."""
        self._builder.give_back_arena()
        run = _call
        if self._on_mismatch != "eager":
            device = self._updating.traced.device
            passive = offload_within(self.plan, device) if quiet else offload_for(reason, self.plan, device)
            self.passive = passive
            run = _call if passive is None else passive.run
        loss = self._eager(self._module_guards, run, batch, kwargs, accumulate=self.accumulate, update=update)
        self.pending = (self.pending + 1) % self.accumulate
        return loss

    # -- measured steps ----------------------------------------------------------------------------------

    def _advanced(self, ready: _Ready) -> _Ready:
        """Return the call with the runner that replaces its runner from now on, if its guide has chosen one."""
        runner = ready.runner
        guide = next((g for g in self._builder.guides if g.runner is runner), None)
        if guide is None or not guide.ready:
            return ready
        try:
            new = guide.next_runner()
        finally:
            self._builder.guides = [g for g in self._builder.guides if not g.done]
        if guide.done:  # no other plan is tried
            new.forget_example()
        if new is runner:
            return ready
        for plan in self._builder.plans:
            for one in plan.programs:
                if one.runner is runner:
                    one.runner = new
        return replace(ready, runner=new, current=new.checked(ready.leaves))

    def _tangent(self, runner: Runner) -> torch.Tensor:
        """Return the gradient of the minimised objective with respect to the loss of a program."""
        loss = runner.traced.graph.values[runner.traced.results.fresh[0]]
        home = runner.traced.graph.storages[loss.storage].device
        key = tuple(loss.shape), loss.dtype, home
        if key not in self._tangents:
            self._tangents[key] = torch.full(
                loss.shape, 1 / self.accumulate, dtype=dtype_of(loss), device=torch.device(home)
            )
        return self._tangents[key]

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


def _kind(guards: StepGuards, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what decides whether a call can be planned: the layout of its batch and the state of the model."""
    kind = kind_of_call(batch, kwargs)
    device = next((x.device.type for x in kind[1] if isinstance(x, TensorKind)), "cpu")
    return kind, tuple(guards.modes()), autocast_dtype(device)


def _call(model: nn.Module, /, *batch: Any, **kwargs: Any) -> Any:
    return model(*batch, **kwargs)
