"""Plans of a training step for sizes of its batch, and what each needs on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.core.timed import timed
from memplan.distributed.fake_ranks import divided
from memplan.evict.costs import cost_model
from memplan.evict.workload import Policy
from memplan.planning.caller_side import CallerSide
from memplan.planning.capacity import Capacity
from memplan.planning.eager_total import eager_total
from memplan.planning.measured import AsEager, with_temporaries
from memplan.planning.memory_answer import Fits, Need, need_of
from memplan.planning.options import PlanOptions
from memplan.trace.eager_step import eager_step
from memplan.trace.kernel_scratch import KernelScratch
from memplan.trace.meta_model import batch_of
from memplan.trace.optimizer.update_bytes import NONE, MakeOptimizer, UpdateBytes, update_bytes
from memplan.trace.planning import plan_step, plan_traced
from memplan.trace.step_example import StepExample
from memplan.trace.traced import TracedGraph, number_bytes
from memplan.trace.tracing import trace


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a model."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, with the traced step and the model that it is for."""

    fits: Fits
    traced: TracedGraph
    model: nn.Module


@dataclass(slots=True)
class StepQuestion:
    """Plans a step for sizes of its batch on a device, and remembers what they need."""

    example: StepExample
    optimizer: str | MakeOptimizer
    capacity: Capacity
    options: PlanOptions
    train: bool | None
    tell: Callable[[str], object]
    ranks: int | None = None
    _update: UpdateBytes | None = None
    _needs: dict[int | None, Need] = field(default_factory=dict)
    _scratch: KernelScratch = field(default_factory=KernelScratch)

    def about(self, example: StepExample, ranks: int | None) -> StepQuestion:
        """Return the same question about another example, or for another number of ranks."""
        return StepQuestion(example, self.optimizer, self.capacity, self.options, self.train, self.tell, ranks)

    def answer(self, batch: int | None, *, eager: bool = True) -> Answered:
        """Return the answer for a batch (None: the example's own), and what it was made of.

        `eager`: predict what eager needs, too.
        """
        traced, called, shown = self.traced(batch)
        model = called.model
        plan = self.planned(traced, self.options)
        need = self.need(plan)
        own = shown if batch is None else batch
        self._needs[own] = need
        assert self._update is not None
        costs = cost_model(self.options.costs or "a100")
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
        made = Fits(
            model=plan.model,
            capacity=self.capacity,
            need=need,
            eager=self.eager(traced, called, need) if eager else 0,
            batch=own,
            optimizer=self._update.name,
            dtypes=tuple(dtypes),
            train=traced.graph.forward_ops < len(traced.graph.ops),
            largest_batch=None,
            seconds=sum(costs.seconds(plan.graph)),
            unmeasured=len(self._scratch.unknown),
            plan=plan,
        )
        return Answered(made, traced, model)

    def over(self, batch: int) -> int:
        """Return the bytes by which a batch exceeds what may be used."""
        if batch not in self._needs:
            self._needs[batch] = self.need(self.planned(self.traced(batch)[0], self.options))
        return self._needs[batch].total - self.capacity.usable

    def traced(self, batch: int | None) -> tuple[TracedGraph, Called, int | None]:
        """Return the step, the call that was traced, and the size of the batch that its inputs show."""
        model, args, kwargs = self.example.made(batch)
        model = model if self.ranks is None else divided(model)
        shown = 1 if batch is None and self.example.is_function else batch_of((args, kwargs))
        with self._stage(f"tracing {type(model).__name__}" + (f" with a batch of {shown}" if shown else "")):
            traced = trace(model, args, kwargs, train=self.train, gradients_in_arena=self.options.gradients_in_arena)
        if self._update is None:
            trains = bool(model.training) if self.train is None else self.train
            name, host = self.optimizer if trains else NONE, self.capacity.is_host
            self._update = update_bytes(name, updated_parameters(traced, model), foreach=not host, counters=host)
        return replace(traced, device=_stand_in(self.capacity)), Called(model, args, kwargs), shown

    def planned(self, traced: TracedGraph, options: PlanOptions) -> Plan:
        """Return the plan of a traced step, with what this machine's own kernels allocate."""
        with self._stage(
            f"planning {len(traced.graph.ops):,} ops" + (" within a budget" if options.has_budget else "")
        ):
            if not self.capacity.is_host:
                return plan_traced(traced, options)
            transient = self._scratch.of_graph(traced.graph, traced.kernels)
            numbers = number_bytes(traced.graph, traced.kernels)
            plan = replace(plan_step(traced, None, options, transient=transient)[1], numbers=numbers)
            update = self._update
            measured = update is not None and hasattr(torch.optim, update.name)  # compile measures no other optimizers
            after = update.temporaries if update is not None and measured else 0
            return plan if options.has_budget else _as_compiled(plan, traced, transient, options, after)

    @contextmanager
    def _stage(self, doing: str) -> Iterator[None]:
        """Tell that a stage begins, and log it if it takes long."""
        self.tell(doing)
        with timed(doing):
            yield

    def need(self, plan: Plan) -> Need:
        """Return what the step of a plan needs with its optimizer."""
        assert self._update is not None
        return need_of(plan, state=self._update.state, temporaries=self._update.temporaries)

    def eager(self, traced: TracedGraph, called: Called, need: Need) -> int:
        """Return what eager is predicted to need: in forward and backward, or in the update."""
        with self._stage("predicting eager's peak"):
            scratch = self._scratch if self.capacity.is_host else None
            trains = traced.graph.forward_ops < len(traced.graph.ops)
            found = eager_step(called.model, called.args, called.kwargs, train=trains, scratch=scratch)
        if found is None:  # by the trace, in which eager's own variables do not hold what is dead
            update = need.fixed + need.gradients + need.kept + need.temporaries
            return max(eager_total(traced.graph) + need.state, update) + self.capacity.allowance
        return need.fixed + max(found.peak, found.kept + need.temporaries) + self.capacity.allowance


def _as_compiled(plan: Plan, traced: TracedGraph, transient: Sequence[int], options: PlanOptions, after: int) -> Plan:
    """Return the plan that `memplan.compile` has in the place of one without a budget: at most what eager needs.

    `after`: the bytes that the optimizer's `step()` allocates, for which `compile` plans from the second step on.
    """

    def within(total: int, policy: str | Policy) -> Plan:
        """Return a plan within a total by a policy."""
        asked = replace(options, budget=total, policy=policy, divide=None, reserve=options.reserved + plan.numbers)
        made = plan_step(traced, None, asked, transient=transient)[1]
        return replace(made, reserve=options.reserved, numbers=plan.numbers)

    step = AsEager(graph=traced.graph, transient=transient, options=options, replan=within, saved=True, copies=False)
    plan = with_temporaries(plan, transient)
    found = step.instead_of(plan) or plan
    return (step.beside_caller(found, CallerSide(), after, lambda: plan) if after else None) or found


def updated_parameters(traced: TracedGraph, model: nn.Module) -> list[nn.Parameter]:
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
