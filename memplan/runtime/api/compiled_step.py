"""`CompiledStep`, which `memplan.compile_step` returns: it runs one training step per call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.errors import InputMismatch, UnsupportedCall
from memplan.runtime.api.select import require_autocast
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.optimizer_state import StepGuards
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards import transforms
from memplan.runtime.memory.arena import dtype_of
from memplan.runtime.on_demand.on_demand_offload import OnDemandOffload, offload_for
from memplan.runtime.profiling.profile_guided import MeasuredStep, ProfileGuide


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
        module_guards: StepGuards,
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
        self._module_guards = module_guards
        self._adding = adding
        self._updating = updating
        self._modes = module_guards.modes()
        loss = updating.traced.graph.values[updating.traced.results.fresh[0]]
        home = torch.device(updating.traced.graph.storages[loss.storage].device)
        self._tangent = torch.full(loss.shape, 1 / accumulate, dtype=dtype_of(loss), device=home)

    def __call__(self, *batch: Any, **kwargs: Any) -> torch.Tensor:
        """Run a step on a batch like the example batch.

        Args:
            batch: The parts of the batch: tensors with the shapes, dtypes and devices of the example.
            kwargs: Keyword arguments of the model.

        Returns:
            The loss, detached.

        Raises:
            InputMismatch: The batch, the model or the optimizer differs from what was compiled.
            UnsupportedCall: A hook was added that a compiled step would not call, or a transform is active.
            StaleActivationsError: Another thread is running a step in this arena.

        Example:
            ```python
            loss = step(inputs, targets)
            ```
        """
        transforms.refuse((batch, kwargs), self._module_guards.model)
        runner = self._updating
        if self._adding is not None and self.pending + 1 < self.accumulate:
            runner = self._adding
        try:
            self._module_guards.require_modes(self._modes)
            require_autocast(runner)
            leaves = runner.input_guards.flatten(batch, kwargs, training=True)
        except InputMismatch as error:
            if self._passive is None:
                raise
            return self._run_on_demand(error, batch, kwargs, update=runner is self._updating)
        self._module_guards.synchronize()
        if self._guides:
            runner = self._advance(runner)
        loss = runner.whole_step(leaves, self._tangent)
        if runner is self._updating:
            self._module_guards.optimizer._opt_called = True  # type: ignore[attr-defined]  # learning rate schedulers check it
        self.pending = (self.pending + 1) % self.accumulate
        return loss

    def _run_on_demand(
        self, reason: InputMismatch, batch: tuple[Any, ...], kwargs: dict[str, Any], *, update: bool
    ) -> torch.Tensor:
        """Run a step that has no plan eagerly, and offload saved activations on demand."""
        passive = self.passive = offload_for(reason, self.plan, self._updating.traced.device)
        run = _call if passive is None else passive.run
        assert self._passive is not None
        loss = self._passive(self._module_guards, run, batch, kwargs, accumulate=self.accumulate, update=update)
        self.pending = (self.pending + 1) % self.accumulate
        return loss

    def _advance(self, runner: Runner) -> Runner:
        """Return the runner that replaces `runner` from now on, if its guide has chosen one, else `runner`."""
        guide = next((g for g in self._guides if g.runner is runner), None)
        if guide is None or not guide.ready:
            return runner
        try:
            new = guide.next_runner()
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


def _call(model: nn.Module, /, *batch: Any, **kwargs: Any) -> Any:
    return model(*batch, **kwargs)
