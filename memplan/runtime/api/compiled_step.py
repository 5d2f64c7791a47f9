"""`CompiledStep`, which `memplan.compile_step` returns: it runs one training step per call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from memplan.core.plan import Plan
from memplan.errors import InputMismatch, MemplanError, UnsupportedCall
from memplan.runtime.api.compiled_module import in_short
from memplan.runtime.api.module_programs import require_autocast
from memplan.runtime.api.on_demand_offload import OnDemandOffload, offload_within, run_within
from memplan.runtime.api.step_builder import StepBuilder, StepPlan
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards import refused_calls
from memplan.runtime.guards.input_guards import TensorKind, kind_of_call
from memplan.runtime.memory.arena import dtype_of
from memplan.runtime.profiling.profile_guided import MeasuredStep
from memplan.runtime.programs import TooManyPrograms
from memplan.trace.capture.joint_graph import autocast_dtype

_log = logging.getLogger("memplan")


_EAGERLY = "%s: a call runs eagerly, because %s. It differs from the last plan: %s. Next step: %s. This is said once."
_FEWER = "pad or bucket batches to a few shapes, drop the last batch (drop_last=True), or compile another step for it"


_Ready = tuple[Runner, list[Any], list[torch.Tensor]]  # a checked call: its leaves, and current parameters and state


class CompiledStep(MeasuredStep):
    """One training step. `memplan.compile_step` makes it; `step(*batch, **kwargs)` returns the loss, detached.

    It changes the parameters and the optimizer's state in place, as `optimizer.step()` does. Gradients exist in the
    arena only; `.grad` is not changed.

    Attributes:
        plan: The plan that it runs.
        hooks: The hooks that are called with the events of its steps. If a hook raises, what the step has done is not
            undone: once updates have begun, the next call raises `TornStep` until a checkpoint is loaded.
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
    accumulate = 1
    pending = 0

    def __init__(self, builder: StepBuilder, main: StepPlan) -> None:
        """Make a step of the plan of its example batch. `builder` makes others."""
        self.passive: OnDemandOffload | None = None
        self.hooks = builder.hooks
        self._builder, self._module_guards = builder, builder.guards
        self._on_mismatch = builder.options.on_mismatch
        self._main = self._last = main
        self._warned = False
        self._measurements = next((g.measurements for g in builder.guides), [])
        self._tangents: dict[Any, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"<compiled step: {in_short(self)}>"

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
            TornStep: The last step was ended in the middle of its update, by an error or by Ctrl-C.

        Example:
            ```python
            loss = step(inputs, targets)
            ```
        """
        with self._builder.ranks:
            return self._call(batch, kwargs)

    def _call(self, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        loss_module: Any = self._module_guards.model
        refused_calls.refuse((batch, kwargs), loss_module)
        self._module_guards.require_whole()
        if len(batch) == 1 and isinstance(batch[0], (list, tuple)):
            batch = loss_module.parts_of(batch)
        try:
            ready = self._ready(self._last, batch, kwargs)
        except InputMismatch as error:
            found = self._otherwise(error, batch, kwargs)
            if isinstance(found, torch.Tensor):
                return found
            ready = found
        if self._builder.guides:
            ready = self._advanced(*ready)
        runner, leaves, current = ready
        loss = runner.whole_step(leaves, self._tangent(runner), current)
        # which learning rate schedulers check
        self._module_guards.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _ready(self, plan: StepPlan, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> _Ready:
        """Return what runs a call by a plan, after all checks. Raises `InputMismatch` if it is not for the call."""
        guards = self._module_guards
        guards.require_modes(plan.modes)
        runner = plan.program
        require_autocast(runner)
        leaves = runner.input_guards.flatten(batch, kwargs, training=True)
        self._last = plan
        current = runner.checked(leaves)
        with runner.arena.ownership as ownership:
            ownership.order_streams()  # the step before may still read, on another stream, what this writes
            guards.synchronize()
        self._builder.ranks.agree(runner.collectives, [runner.collectives])
        return runner, leaves, current

    @property
    def plan(self) -> Plan:
        """The plan that it runs."""
        return self._main.program.plan

    # -- calls that differ -------------------------------------------------------------------------------

    def _otherwise(
        self, reason: InputMismatch, batch: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Ready | torch.Tensor:
        """Return what runs a call that differs from the last plan, or its loss if it ran eagerly."""
        if self._on_mismatch == "error":
            raise reason
        if self._on_mismatch != "replan":
            return self._run_eagerly(reason, batch, kwargs)
        builder = self._builder
        several = builder.parallelism is not None  # then a step by torch alone would run other collectives
        if not builder.plans_update:  # any more; the guards stay, so that each such call comes here
            if several:
                raise reason
            why = "its update is no longer one of torch's fused kernels"
            return self._run_eagerly(reason, batch, kwargs, why=why, hint="compile the step again")
        loss: Any = self._module_guards.model
        batch = loss.parts_of(batch)
        kind, hint = self._kind_of(batch, kwargs), _FEWER
        if (ready := self._by_another_plan(kind, batch, kwargs)) is not None:
            return ready
        try:
            plan = builder.plans.of(kind, lambda: builder.build(batch, kwargs), reason, model=self.plan.model)
        except UnsupportedCall:
            raise
        except TooManyPrograms as full:
            why = str(full)
        except MemplanError as error:
            if several or error.see == "optimizer-state":  # eager would fail too, in the middle of its update
                raise
            why, hint = f"it cannot be planned ({error.what.splitlines()[0]})", error.hint or _FEWER
        else:
            return self._ready(plan, batch, kwargs)
        if several:
            hint = "pad or bucket batches to a few shapes; a step of several ranks does not run eagerly"
            raise UnsupportedCall(f"{reason.what}, and {why}", where=reason.where, hint=hint, see="ranks-refused")
        return self._run_eagerly(reason, batch, kwargs, why=why, hint=hint)

    def _by_another_plan(self, kind: tuple[Any, ...], batch: tuple[Any, ...], kwargs: dict[str, Any]) -> _Ready | None:
        """Return what runs a call by the plan of its kind, or by another one that takes it; None if none does.

        Calls of several kinds have one plan where they differ in strides, or in how their arguments are passed alone.
        """
        plans = self._builder.plans
        for plan in (plans.find(kind), *plans):
            if plan is not None and plan.update_key == kind[-1]:
                with contextlib.suppress(InputMismatch):
                    return self._ready(plan, batch, kwargs)
        plans.drop(lambda known: known == kind)  # the model has changed
        return None

    def _kind_of(self, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the kind of a call with the model and the optimizer as they are now; last is what its update is."""
        guards, call = self._module_guards, kind_of_call(batch, kwargs)
        try:
            guards.modes()
        except InputMismatch:
            guards.refresh()
        guards.require_known()
        device = next((x.device.type for x in call[1] if isinstance(x, TensorKind)), "cpu")
        return call, tuple(guards.modes()), autocast_dtype(device), guards.update_key

    def _run_eagerly(
        self, reason: InputMismatch, batch: tuple[Any, ...], kwargs: dict[str, Any], *, why: str = "", hint: str = ""
    ) -> torch.Tensor:
        """Run a step that has no plan eagerly, and offload saved activations on demand if there is a budget.

        `why`: why it has none, which is logged once with a `hint`, unless eager fails too; "": it shall have none.
        """
        self._builder.give_back_arena()
        offload = None
        if self._on_mismatch != "eager":
            device = self._main.program.traced.device
            offload = offload_within(self.plan, device, None if why else reason)
            self.passive = offload
        guards, optimizer = self._module_guards, self._module_guards.optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        with gradients_apart({*parameters, *guards.model.parameters()}):
            with torch.enable_grad():
                loss = run_within(offload, guards.model, batch, kwargs)
                if hint and not self._warned:
                    self._warned = True
                    _log.warning(_EAGERLY, self.plan.model, why, reason.summary, hint)
                loss.backward()
            clip = self._builder.options.clip_grad_norm
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
        result: torch.Tensor = loss.detach()
        return result

    # -- measured steps ----------------------------------------------------------------------------------

    def _advanced(self, runner: Runner, leaves: list[Any], current: list[torch.Tensor]) -> _Ready:
        """Return the call with the runner that replaces its runner from now on, if its guide has chosen one."""
        guide = next((g for g in self._builder.guides if g.runner is runner), None)
        if guide is None or not guide.ready:
            return runner, leaves, current
        try:
            new = guide.next_runner()
        finally:
            self._builder.guides = [g for g in self._builder.guides if not g.done]
        if guide.done:  # no other plan is tried
            new.forget_example()
        if new is not runner:
            for plan in self._builder.plans:
                plan.program = new if plan.program is runner else plan.program
            current = new.checked(leaves)
        return new, leaves, current

    def _tangent(self, runner: Runner) -> torch.Tensor:
        """Return the gradient of the minimised objective with respect to the loss of a program."""
        loss = runner.traced.graph.values[runner.traced.results.fresh[0]]
        home = runner.traced.graph.storages[loss.storage].device
        key = tuple(loss.shape), loss.dtype, home
        if key not in self._tangents:
            self._tangents[key] = torch.ones(loss.shape, dtype=dtype_of(loss), device=torch.device(home))
        return self._tangents[key]

    @property
    def pool_bytes(self) -> int:
        """Bytes outside the arena that its CUDA graph keeps in a private pool."""
        return self._main.program.pool_bytes

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedCall(
            "a compiled step is bound to its model and optimizer, and cannot be copied or pickled",
            hint="save their state_dicts, or copy both together, and compile a step for the copies",
            see="bound-step",
        )


@contextlib.contextmanager
def gradients_apart(
    parameters: Collection[torch.Tensor], sums: Mapping[Any, torch.Tensor | None] = MappingProxyType({})
) -> Iterator[None]:
    """Set the `.grad` of parameters to sums so far, and back to what they were afterwards."""
    before = {p: p.grad for p in parameters}
    try:
        for p in parameters:
            p.grad = sums.get(p)
        yield
    finally:
        for p, gradient in before.items():
            p.grad = gradient
