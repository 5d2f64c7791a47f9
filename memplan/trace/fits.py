"""`memplan.fits`: say whether a training step fits a device, from fake tensors, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.core.timed import timed
from memplan.core.units import format_bytes
from memplan.distributed.fake_ranks import divided, fake_ranks
from memplan.errors import BudgetInfeasible, InvalidSize, MemplanError
from memplan.evict.costs import cost_model
from memplan.planning.batch_search import largest_within
from memplan.planning.capacity import Capacity, capacity_of
from memplan.planning.eager_total import eager_total
from memplan.planning.memory_answer import Fits, Need, Remedy, need_of
from memplan.planning.options import DEFAULTS, Costs, PlanOptions
from memplan.trace.meta_model import batch_of, floating_type
from memplan.trace.optimizer.update_bytes import NONE, MakeOptimizer, UpdateBytes, update_bytes
from memplan.trace.planning import plan_traced
from memplan.trace.step_example import StepExample
from memplan.trace.traced import TracedGraph
from memplan.trace.tracing import trace

_RANKS = tuple(2**k for k in range(1, 13))
_TRIED_RANKS = 2  # numbers of ranks that are planned: an estimate says which
Make = Callable[[int], tuple[Any, ...]]


def fits(
    model: nn.Module | Make,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    device: str | int,
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
    """Return whether a training step of `model` fits a device, what it needs by parts, and what would make it fit.

    The step is forward and backward in one arena, as `memplan.compile` runs them, and `optimizer.step()`. Nothing runs
    and no memory of the model's size is allocated. Kernels are traced as the CPU's: what an accelerator's kernels
    allocate for themselves is not known, and belongs to the slack.

    Args:
        model: The module; its parameters may be real, fake or meta tensors. Or a function from a batch size to
            `(model, example_inputs)` or `(model, example_inputs, example_kwargs)`.
        example_inputs: As in `memplan.plan`; none for a function.
        example_kwargs: The keyword arguments; none for a function.
        device: "h100", "h200", "a100", "a100-40gb", "l4"; "cpu", which is this machine; or the memory of an
            accelerator: bytes, or a text such as "24GiB".
        batch: The samples of a step: the first dimension of every tensor in the example; None takes the example's. A
            function is called with it (1 if None).
        optimizer: The name of a class of `torch.optim`, "none", or a function from parameters to an optimizer.
        dtype: The type of all floating-point tensors, such as "bfloat16"; None keeps them. The model is not changed.
        train: Forward, backward and update (True) or the forward alone (False); None follows `model.training`.
        allowance: Bytes for the device's context and libraries; None: 1 GiB for a named device, 0 for a size.
        slack: What stays free: bytes, or a share of the device (0.05, "5%"); None: 5 %.
        costs: The cost model for predicted times, as in `memplan.plan`; None: the device's, or "a100" for a size.
        search: Find the largest batch too, and, where the step does not fit, what would make it fit.
        ranks: Ask for one of so many ranks, none of which has to exist: a plain model is divided among them as
            `fully_shard` would divide it, as in `memplan.plan`. The batch is that of each rank.
        on_progress: Called with a text when a stage begins.

    Returns:
        The answer. It is true if the step fits; `.total` (bytes), `.need`, `.largest_batch`, `.remedies`.

    Raises:
        UnsupportedDevice: The device is unknown.
        InvalidSize: A size, share or type has no valid value, or the example has no batch to change.
        InvalidModel: There is no such optimizer, or it cannot update the model's parameters.
        UnsupportedGraph: The model cannot be traced as one graph.
        UnsupportedCall: `ranks` is no number of ranks, or this process is one of another number.

    Example:
        >>> answer = memplan.fits(model, batch, device="h100", optimizer="AdamW")
        >>> print(answer)
    """
    capacity = capacity_of(device, allowance=allowance, slack=slack)
    if batch is not None and (not isinstance(batch, int) or isinstance(batch, bool) or batch < 1):
        raise InvalidSize(f"{batch!r} is no number of samples", where="batch", hint="give a number of 1 or more")
    kind = None if dtype is None else floating_type(dtype)
    example = StepExample(model, (example_inputs, example_kwargs), kind)
    options = replace(DEFAULTS, costs=costs or capacity.costs or "a100")
    asked = _Asked(example, optimizer, capacity, options, train, on_progress or (lambda stage: None), ranks)
    with fake_ranks(ranks):
        made = asked.answer(batch, search=search)
    return made if costs or capacity.costs else replace(made, seconds=None)  # the speed of a size is not known


@dataclass(slots=True)
class _Asked:
    """One question: plans sizes of the batch, and remembers what they need."""

    example: StepExample
    optimizer: str | MakeOptimizer
    capacity: Capacity
    options: PlanOptions
    train: bool | None
    tell: Callable[[str], object]
    ranks: int | None = None
    _update: UpdateBytes | None = None
    _needs: dict[int | None, Need] = field(default_factory=dict)

    def answer(self, batch: int | None, *, search: bool) -> Fits:
        """Return the answer for a batch (None: the example's own)."""
        traced, model, shown = self._traced(batch)
        plan = self._planned(traced, self.options)
        need = self._need(plan)
        own = shown if batch is None else batch
        self._needs[own] = need
        assert self._update is not None
        costs = cost_model(self.options.costs or "a100")
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
        made = Fits(
            model=plan.model,
            capacity=self.capacity,
            need=need,
            eager=self._eager(traced, need),
            batch=own,
            optimizer=self._update.name,
            dtypes=tuple(dtypes),
            train=traced.graph.forward_ops < len(traced.graph.ops),
            largest_batch=None,
            seconds=sum(costs.seconds(plan.graph)),
            plan=plan,
        )
        if not search:
            return made
        remedies = () if made.fits else tuple(self._remedies(batch, traced, model, need, made))
        return replace(made, remedies=remedies, largest_batch=self._largest(own, made))

    def _traced(self, batch: int | None) -> tuple[TracedGraph, nn.Module, int | None]:
        """Return the step, the model, and the size of the batch that its inputs show."""
        model, args, kwargs = self.example.made(batch)
        model = model if self.ranks is None else divided(model)
        shown = 1 if batch is None and self.example.is_function else batch_of((args, kwargs))
        with self._stage(f"tracing {type(model).__name__}" + (f" with a batch of {shown}" if shown else "")):
            traced = trace(model, args, kwargs, train=self.train, gradients_in_arena=self.options.gradients_in_arena)
        if self._update is None:
            trains = bool(model.training) if self.train is None else self.train
            name, foreach = self.optimizer if trains else NONE, not self.capacity.is_host
            self._update = update_bytes(name, _updated(traced, model), foreach=foreach)
        return replace(traced, device=_stand_in(self.capacity)), model, shown

    def _planned(self, traced: TracedGraph, options: PlanOptions) -> Plan:
        with self._stage(
            f"planning {len(traced.graph.ops):,} ops" + (" within a budget" if options.has_budget else "")
        ):
            return plan_traced(traced, options)

    @contextmanager
    def _stage(self, doing: str) -> Iterator[None]:
        """Tell that a stage begins, and log it if it takes long."""
        self.tell(doing)
        with timed(doing):
            yield

    def _need(self, plan: Plan) -> Need:
        assert self._update is not None
        return need_of(plan, state=self._update.state, temporaries=self._update.temporaries)

    def _eager(self, traced: TracedGraph, need: Need) -> int:
        """Return what eager is predicted to need: in forward and backward, or in the update."""
        graph = traced.graph
        gradients = need.gradients + need.kept
        update = need.fixed + gradients + need.temporaries
        return max(eager_total(graph) + need.state, update) + self.capacity.allowance

    def _remedies(
        self, batch: int | None, traced: TracedGraph, model: nn.Module, need: Need, made: Fits
    ) -> list[Remedy]:
        """Return what was tried to make the step fit."""
        found = []
        if need.kept + need.temporaries > need.during and not self.capacity.is_host:
            found.append(self._one_by_one(_updated(traced, model), need))
        least = need.fixed + need.gradients + need.kept + need.temporaries
        if least > self.capacity.usable:
            update = f", the state of {made.optimizer} and what its step() allocates" if need.state else ""
            text = f"the model, its inputs and gradients{update} need {format_bytes(least)} already"
            found.append(Remedy(how="budget", total=least + self.capacity.allowance, fits=False, text=text))
        else:
            found.append(self._within(traced, need))
        if self.ranks is None and not self.capacity.is_host and made.train:
            found += self._among_ranks(batch, need)
        if "float32" in made.dtypes:
            found.append(self._narrow(batch))
        return found

    def _one_by_one(self, parameters: list[nn.Parameter], need: Need) -> Remedy:
        """Return what the step needs where the optimizer updates one parameter after the other."""
        alone = update_bytes(self.optimizer, parameters, foreach=False)
        less = replace(need, temporaries=alone.temporaries)
        return Remedy(
            how="foreach=False",
            total=less.total + self.capacity.allowance,
            fits=less.total <= self.capacity.usable,
            text=f"{alone.name} updates one parameter after the other; memplan.compile_step plans such updates",
        )

    def _within(self, traced: TracedGraph, need: Need) -> Remedy:
        """Return the cheapest plan within the device, or the smallest that was found.

        On the host nothing is offloaded: that is the same memory.
        """
        is_host = self.capacity.is_host
        usable, allowance = self.capacity.usable, self.capacity.allowance
        beside_update = need.fixed + need.kept + need.temporaries
        options = replace(
            self.options,
            budget=usable,
            reserve=need.state,
            arena_budget=usable - beside_update,
            policy="recompute" if is_host else self.options.policy,
        )
        try:
            plan = self._planned(traced, options)
        except BudgetInfeasible as error:
            text = f"no plan was found within {format_bytes(usable)}: {error.summary}"
            return Remedy(how="budget", total=error.smallest + allowance, fits=False, text=text)
        kept = self._need(plan)
        budget = f"budget={usable}, reserve={need.state}" + (', policy="recompute"' if is_host else "")
        how = "computed again" if is_host else "computed again or offloaded"
        return Remedy(
            how="budget",
            total=kept.total + allowance,
            fits=kept.total <= usable,
            overhead=plan.eviction.overhead if plan.eviction is not None else None,
            text=f"memplan.compile(model, inputs, {budget}): part of the step is {how}",
        )

    def _narrow(self, batch: int | None) -> Remedy:
        """Return what the step needs with parameters in bfloat16."""
        example = replace(self.example, dtype=torch.bfloat16)
        narrow = _Asked(example, self.optimizer, self.capacity, self.options, self.train, self.tell, self.ranks)
        try:
            made = narrow.answer(batch, search=False)
        except MemplanError as error:
            return Remedy(how="bfloat16", total=0, fits=False, text=f"could not be planned: {error.summary}")
        text = "parameters, gradients and the optimizer's state in bfloat16; the numbers change"
        return Remedy(how="bfloat16", total=made.total, fits=made.fits, text=text)

    def _among_ranks(self, batch: int | None, need: Need) -> list[Remedy]:
        """Return what one rank needs of the fewest ranks, a power of two, that seem to be enough; none if none are."""
        divisible = need.parameters + need.state + need.gradients + need.temporaries
        rest = max(need.total - divisible, 0)
        enough = (n for n in _RANKS if divisible / n + rest <= self.capacity.usable)
        last: list[Remedy] = []
        for ranks in islice(enough, _TRIED_RANKS):
            one = _Asked(self.example, self.optimizer, self.capacity, self.options, self.train, self.tell, ranks)
            try:
                with fake_ranks(ranks):
                    made = one.answer(batch, search=False)
            except MemplanError as error:
                text = f"could not be planned: {error.summary}"
                return [*last, Remedy(how=f"{ranks} ranks", total=0, fits=False, text=text)]
            text = "torch's fully_shard divides parameters, gradients and state; each rank has a batch of this size"
            last = [Remedy(how=f"{ranks} ranks", total=made.total, fits=made.fits, text=text)]
            if made.fits:
                break
        return last

    def _largest(self, batch: int | None, made: Fits) -> int | None:
        """Return the largest batch that fits with the slack; 0 if none does, None where it is not known.

        It is not where the batch cannot change, where what is needed does not depend on it, and where the sizes to try
        cannot be traced.
        """
        if batch is None or not self.example.can_change_batch:
            return None
        usable = self.capacity.usable
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

    def _over(self, batch: int) -> int:
        """Return the bytes by which a batch exceeds what may be used."""
        if batch not in self._needs:
            self._needs[batch] = self._need(self._planned(self._traced(batch)[0], self.options))
        return self._needs[batch].total - self.capacity.usable


def _updated(traced: TracedGraph, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the optimizer updates: those for which the step returns a gradient."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = dict.fromkeys(traced.bindings[i].name for i in traced.results.gradient_of)
    found = {id(parameters[name]): parameters[name] for name in names if name in parameters}
    return [_own_part(p) for p in found.values()]


def _own_part(p: nn.Parameter) -> nn.Parameter:
    """Return the part of a parameter that this rank has: all of it, unless it is divided."""
    local = getattr(p, "_local_tensor", None)
    return p if local is None else nn.Parameter(local, requires_grad=p.requires_grad)


def _stand_in(capacity: Capacity) -> torch.device:
    """Return the device whose alignment a plan has: an accelerator's, except for the memory of this machine."""
    return torch.device("cpu" if capacity.is_host else "cuda")
