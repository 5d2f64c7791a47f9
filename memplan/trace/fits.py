"""`memplan.fits`: say whether a training step fits a device, by its plans, before anything runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memplan.core.choices import Kernels
from memplan.core.gpus import GpuTarget
from memplan.core.plan import Plan
from memplan.core.timed import timed
from memplan.core.totals import beside_results
from memplan.distributed.fake_ranks import divided, fake_ranks
from memplan.errors import BudgetInfeasible, InvalidSize, MemplanError
from memplan.evict.costs import busy_seconds, cost_model
from memplan.planning.base_graph import eager_total
from memplan.planning.measured import as_after_a_trial, with_temporaries
from memplan.planning.memory_answer import Capacity, Fits, Need, capacity_of, need_of
from memplan.planning.options import DEFAULTS, Budget, Costs, PlanOptions
from memplan.targets.child import asked_for, require_child
from memplan.targets.stand_in import DEVICE
from memplan.trace.batches import largest_within
from memplan.trace.capture.effects import with_fake_tensors
from memplan.trace.kernel_scratch import KernelScratch
from memplan.trace.optimizer.update_bytes import NONE, MakeOptimizer, UpdateBytes, made_optimizer, update_bytes
from memplan.trace.planning import captured_step, plan_step
from memplan.trace.step_example import StepExample, batch_of, floating_type
from memplan.trace.traced import TracedGraph
from memplan.trace.tracing import CapturedCall
from memplan.trace.variants import first_variant
from memplan.trace.whole_step import plan_whole_step, require_planned_update

Make = Callable[[int], tuple[Any, ...]]
_log = logging.getLogger("memplan")


def fits(
    model: nn.Module | Make,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    target: str | int,
    budget: Budget | None = None,
    kernels: Kernels | None = None,
    batch: int | None = None,
    optimizer: str | MakeOptimizer = "AdamW",
    dtype: str | torch.dtype | None = None,
    train: bool | None = None,
    allowance: int | str | None = None,
    slack: int | float | str | None = None,
    costs: Costs | None = None,
    search: bool = True,
    ranks: int | None = None,
    on_progress: Callable[[str], object] | None = None,
) -> Fits:
    """Return whether a training step of `model` fits a device, what it needs by parts, and which plan would fit.

    The step is forward and backward in one arena, as `memplan.compile` runs them, and `optimizer.step()`. Nothing runs
    and no memory of the model's size is allocated. For a GPU that is named, its own kernels are traced, in a process
    where it stands in (as with `target=` of `memplan.plan`); for a size, the CPU's. What an accelerator's kernels
    allocate for themselves is not known, but for attention's backward, and belongs to the slack.

    Args:
        model: The module; its parameters may be real, fake or meta tensors. Or a function from a batch size to
            `(model, example_inputs)` or `(model, example_inputs, example_kwargs)`.
        example_inputs: As in `memplan.plan`; none for a function.
        example_kwargs: The keyword arguments; none for a function.
        target: A GPU, as that of `memplan.plan` names it ("h100", "sm90:80GiB"); "cpu", which is this machine; or
            the memory of an accelerator: bytes, or a text such as "24GiB".
        budget: Plan for this total ("min", "20GiB", 0.8), as in `memplan.plan`, with the optimizer's state; None: for
            none, and the cheapest plan that fits is searched for where the step does not.
        kernels: What computes the step, as in `memplan.plan`: on a named GPU the kernels that Inductor generates,
            unless "aten" asks for eager's.
        batch: The samples of a step: the first dimension of every tensor in the example; None takes the example's. A
            function is called with it (1 if None).
        optimizer: The name of a class of `torch.optim`, "none", or a function from parameters to an optimizer.
        dtype: The type of all floating-point tensors, such as "bfloat16"; None keeps them. The model is not changed.
        train: Forward, backward and update (True) or the forward alone (False); None follows `model.training`.
        allowance: Bytes for the device's context and libraries; None: 1 GiB for a named device, 0 for a size.
        slack: What stays free: bytes, or a share of the device (0.05, "5%"); None: 5 %.
        costs: The cost model for predicted times, as in `memplan.plan`; None: the device's, or "a100" for a size.
        search: Find the largest batch too, and, where the step does not fit, the cheapest plan that does.
        ranks: Ask for one of so many ranks, none of which has to exist: a plain model is divided among them as
            `fully_shard` would divide it, as in `memplan.plan`. The batch is that of each rank.
        on_progress: Called with a text when a stage begins.

    Returns:
        The answer. It is true if the step fits; `.total` (bytes), `.need`, `.largest_batch`, `.within`, `.smallest`.

    Raises:
        UnsupportedDevice: The device is unknown.
        InvalidSize: A size, share or type has no valid value, or the example has no batch to change.
        InvalidModel: There is no such optimizer, or it cannot update the model's parameters.
        UnsupportedGraph: The model cannot be traced as one graph.
        UnsupportedCall: `ranks` is no number of ranks, or this process is one of another number.

    Example:
        >>> answer = memplan.fits(model, batch, target="h100", optimizer="AdamW")
        >>> print(answer)
    """
    capacity = capacity_of(target, allowance=allowance, slack=slack)
    if batch is not None and (not isinstance(batch, int) or isinstance(batch, bool) or batch < 1):
        raise InvalidSize(f"{batch!r} is no number of samples", where="batch", hint="give a number of 1 or more")
    kind = None if dtype is None else floating_type(dtype)
    step = _StepPlans(
        example=StepExample(model, (example_inputs, example_kwargs), kind),
        optimizer=optimizer,
        capacity=capacity,
        options=replace(DEFAULTS, costs=costs or capacity.costs or "a100", budget=budget, kernels=kernels),
        train=train,
        ranks=ranks,
        tell=on_progress or (lambda stage: None),
    )

    def answer() -> Fits:
        """Return the answer, as one of the ranks."""
        with fake_ranks(ranks):
            return step.answer(batch, search=search)

    gpu = _target_of(capacity)
    if gpu is None:
        made = answer()
    else:
        step.tell(f"tracing and planning for {gpu.full_name}")
        step.there, step.tell = DEVICE, lambda stage: None  # the child has no terminal of its own
        made = asked_for(gpu, answer)
    return made if costs or capacity.costs else replace(made, seconds=None)  # the speed of a size is not known


def _target_of(capacity: Capacity) -> GpuTarget | None:
    """Return the GPU whose kernels are traced; None for a size and for the host, and where no GPU can stand in here."""
    if capacity.gpu is None:
        return None
    try:
        require_child()
    except MemplanError as why:
        _log.warning("the kernels are traced as the CPU's, which need more than a GPU's: %s", why.summary)
        return None
    return capacity.gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class _TracedStep:
    """A traced step of `model`; `captured` traces variants of it, `shown` is the batch that its inputs show."""

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    traced: TracedGraph
    captured: CapturedCall | None
    options: PlanOptions
    shown: int | None


@dataclass(slots=True, kw_only=True)
class _StepPlans:
    """Plans a step for sizes of its batch, and remembers what they need on a device.

    `there`: where the tensors are traced, if the device stands in here.
    """

    example: StepExample
    optimizer: str | MakeOptimizer
    capacity: Capacity
    options: PlanOptions
    train: bool | None
    ranks: int | None
    tell: Callable[[str], object]
    there: torch.device | None = None
    _update: UpdateBytes | None = None
    _needs: dict[int, int] = field(default_factory=dict)
    _scratch: KernelScratch = field(default_factory=KernelScratch)

    def answer(self, batch: int | None, *, search: bool) -> Fits:
        """Return the answer for a batch (None: the example's own)."""
        assert self.options.costs is not None  # `fits` has chosen some
        costs, step = cost_model(self.options.costs), self._traced(batch)
        plan, own = self._planned(step), step.shown if batch is None else batch
        need, update = self._need(plan), self._known_update
        if own is not None:
            self._needs[own] = need.total
        eagers = step.traced if step.options.kernels == "aten" else self._traced(batch, kernels="aten").traced
        scratch = self._scratch.of_graph(eagers.graph, eagers.kernels) if self.capacity.is_host else ()
        eager = eager_total(eagers.graph, beside_results(eagers.graph, scratch) if scratch else ()) + need.state
        made = Fits(
            model=plan.model,
            capacity=self.capacity,
            need=need,
            eager=max(eager, need.in_update) + self.capacity.allowance,
            compiled=self._compiled(step, need),
            batch=own,
            optimizer=update.name,
            dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in step.model.parameters()})),
            train=step.traced.graph.forward_ops < len(step.traced.graph.ops),
            largest_batch=None,
            seconds=sum(costs.seconds(plan.graph)),
            unmeasured=len(self._scratch.unknown),
            plan=plan,
        )
        if not search:
            return made
        within, smallest = (None, None) if made.fits else self._within(step, need)
        if smallest is not None and made.train and (loaded := self._loaded(batch)) is not None:
            within, smallest = loaded, None
            made = replace(made, lanes=busy_seconds(loaded.graph, costs))
        return replace(made, within=within, smallest=smallest, largest_batch=self._largest(made))

    def _traced(self, batch: int | None, *, kernels: Kernels | None = None) -> _TracedStep:
        """Return the step of a batch, with the kernels of the options unless others are asked for."""
        model, args, kwargs = self.example.made(batch)
        model = model if self.ranks is None else divided(model)
        shown = 1 if batch is None and self.example.is_function else batch_of((args, kwargs))
        if self.there is not None:
            model, (args, kwargs) = with_fake_tensors(model, (args, kwargs), device=str(self.there))
        options = self.options if kernels is None else replace(self.options, kernels=kernels)
        with self._stage(f"tracing {type(model).__name__}" + (f" with a batch of {shown}" if shown else "")):
            options, traced, captured = captured_step(model, args, kwargs, self.train, options)
        if self._update is None:
            captured.warn()
            trains = bool(model.training) if self.train is None else self.train
            name, host = self.optimizer if trains else NONE, self.capacity.is_host
            self._update = update_bytes(name, _updated_parameters(traced, model), foreach=not host, counters=host)
        if self.there is None:
            stand_in = torch.device("cpu" if self.capacity.is_host else "cuda")  # it decides the alignment
            traced = replace(traced, device=stand_in)
        retracer = captured if options.kernels == "inductor" else None
        return _TracedStep(
            model=model, inputs=(args, kwargs), traced=traced, captured=retracer, options=options, shown=shown
        )

    def _planned(self, step: _TracedStep, **limits: Any) -> Plan:
        """Return the plan of a step; on this machine, with what its kernels allocate for themselves."""
        traced, options = step.traced, replace(step.options, **limits)
        if options.has_budget:
            options = replace(options, reserve=self._known_update.state)
        if limits and step.captured is not None:
            traced = first_variant(step.captured, options)
        within = " within a budget" if options.has_budget else ""
        with self._stage(f"planning {len(traced.graph.ops):,} ops{within}"):
            if not self.capacity.is_host:
                made = plan_step(traced, step.captured, options)[1]
                return made if self.there is None else as_after_a_trial(made, options)
            transient = self._scratch.of_graph(traced.graph, traced.kernels)
            plan = plan_step(traced, None, options, transient=transient)[1]
            return plan if options.has_budget else with_temporaries(plan, transient)

    @contextmanager
    def _stage(self, doing: str) -> Iterator[None]:
        """Tell that a stage begins, and log it if it takes long."""
        self.tell(doing)
        with timed(doing):
            yield

    @property
    def _known_update(self) -> UpdateBytes:
        assert self._update is not None
        return self._update

    def _need(self, plan: Plan) -> Need:
        """Return what the step of a plan needs with its optimizer."""
        update = self._known_update
        return need_of(plan, state=update.state, temporaries=update.temporaries, is_host=self.capacity.is_host)

    def _compiled(self, step: _TracedStep, need: Need) -> int | None:
        """Return what a step needs that `torch.compile` runs by itself; None where that is not known, as the log says.

        It is asked of a training step with Inductor's kernels on a named GPU.
        """
        if self.there is None or step.options.kernels != "inductor" or not step.traced.graph.gradients:
            return None
        from memplan.trace.fused.partition import compiled_bytes  # imports Inductor

        with self._stage("counting what torch.compile allocates"):
            try:
                found = compiled_bytes(step.model, *step.inputs)
            except Exception as error:  # torch's own, of a model that it does not read as one graph
                _log.info("what torch.compile needs is not known: %s", str(error).strip().partition("\n")[0])
                return None
        return max(need.fixed + found.peak - found.standing, need.in_update) + self.capacity.allowance

    def _within(self, step: _TracedStep, need: Need) -> tuple[Plan | None, int | None]:
        """Return the cheapest plan within the device, and the fewest bytes of one where there is none.

        On the host nothing is offloaded: that is the same memory.
        """
        usable, least = self.capacity.usable, need.in_update
        policy = "recompute" if self.capacity.is_host else self.options.policy
        if least <= usable:
            try:
                return self._planned(step, budget=usable, policy=policy), None
            except BudgetInfeasible as error:
                least = error.smallest
        return None, least + self.capacity.allowance

    def _loaded(self, batch: int | None) -> Plan | None:
        """Return the plan of the whole step while model and state stay on the host; None where there is none.

        There is one on a named GPU, where what the model returns is the loss.
        """
        if self.there is None or self.ranks is not None or self._known_update.name == NONE:
            return None
        model, args, kwargs = self.example.made(batch)
        model, inputs = with_fake_tensors(model, (args, kwargs))
        options = replace(self.options, budget=self.capacity.usable, device=str(self.there))
        with suppress(MemplanError), self._stage("planning with the model on the host"):
            optimizer = made_optimizer(self.optimizer, [p for p in model.parameters() if p.requires_grad])
            require_planned_update(optimizer)
            return plan_whole_step(model, optimizer, inputs, options)
        return None

    def _over(self, batch: int) -> int:
        """Return the bytes by which a batch exceeds what may be used."""
        if batch not in self._needs:
            try:
                self._needs[batch] = self._need(self._planned(self._traced(batch))).total
            except BudgetInfeasible as error:  # of the options' own budget
                self._needs[batch] = max(error.smallest, self.capacity.usable + 1)
        return self._needs[batch] - self.capacity.usable

    def _largest(self, made: Fits) -> int | None:
        """Return the largest batch that fits with the slack; 0 if none does, None where it is not known.

        It is not where the batch cannot change, where what is needed does not depend on it, and where the sizes to try
        cannot be traced.
        """
        usable, batch = self.capacity.usable, made.batch
        if batch is None or not self.example.can_change_batch:
            return None
        if made.need.parameters + made.need.state > usable:
            return 0
        try:
            lowest = batch if made.fits else self._smallest(batch)
            if lowest is None or self._over(lowest) > 0:
                return None if lowest is None else 0
            highest = usable if made.fits else max(batch - 1, lowest)  # a sample has at least a byte
            found = largest_within(self._over, usable, lowest=lowest, highest=highest)
        except MemplanError as error:
            self.tell(f"the largest batch is not known: {error.summary}")
            return None
        return None if made.fits and found == highest else found

    def _smallest(self, batch: int) -> int | None:
        """Return the smallest of some sizes below a batch that can be planned; None if none can.

        A model with batch norm takes no batch of 1; another may take only even ones.
        """
        for size in (1, 2, *(batch >> n for n in reversed(range(1, batch.bit_length() - 1)))):
            with suppress(MemplanError):
                if size < batch:
                    self._over(size)
                    return size
        return None


def _updated_parameters(traced: TracedGraph, model: nn.Module) -> list[nn.Parameter]:
    """Return what this rank has of the parameters that the optimizer updates: those with a gradient of the step."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = dict.fromkeys(traced.bindings[i].name for i in traced.results.gradient_of)
    found = {id(parameters[name]): parameters[name] for name in names if name in parameters}
    parts = ((p, getattr(p, "_local_tensor", None)) for p in found.values())
    return [p if part is None else nn.Parameter(part, requires_grad=p.requires_grad) for p, part in parts]
