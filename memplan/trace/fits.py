"""`memplan.fits`: say whether a training step fits a device, from fake tensors, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from memplan.core.units import format_bytes
from memplan.distributed.fake_ranks import fake_ranks
from memplan.errors import BudgetInfeasible, InvalidSize, MemplanError
from memplan.planning.batch_search import largest_within
from memplan.planning.capacity import capacity_of
from memplan.planning.memory_answer import Fits, Need, Remedy
from memplan.planning.options import DEFAULTS, Costs
from memplan.trace.meta_model import floating_type
from memplan.trace.optimizer.update_bytes import MakeOptimizer, update_bytes
from memplan.trace.step_example import StepExample
from memplan.trace.step_question import Answered, StepQuestion, updated_parameters
from memplan.trace.traced import TracedGraph

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
    asked = StepQuestion(example, optimizer, capacity, options, train, on_progress or (lambda stage: None), ranks)
    with fake_ranks(ranks):
        made = _searched(asked, batch) if search else asked.answer(batch).fits
    return made if costs or capacity.costs else replace(made, seconds=None)  # the speed of a size is not known


def _searched(asked: StepQuestion, batch: int | None) -> Fits:
    """Return the answer with the largest batch, and with what would make the step fit."""
    answered = asked.answer(batch)
    made = answered.fits
    remedies = () if made.fits else tuple(_remedies(asked, batch, answered))
    return replace(made, remedies=remedies, largest_batch=_largest(asked, made.batch, made))


def _remedies(asked: StepQuestion, batch: int | None, answered: Answered) -> list[Remedy]:
    """Return what was tried to make the step fit."""
    made, traced, model = answered.fits, answered.traced, answered.model
    need = made.need
    found = []
    if need.kept + need.temporaries > need.during and not asked.capacity.is_host:
        found.append(_one_by_one(asked, updated_parameters(traced, model), need))
    least = need.fixed + need.gradients + need.kept + need.temporaries
    if least > asked.capacity.usable:
        update = f", the state of {made.optimizer} and what its step() allocates" if need.state else ""
        text = f"the model, its inputs and gradients{update} need {format_bytes(least)} already"
        found.append(Remedy(how="budget", total=least + asked.capacity.allowance, fits=False, text=text))
    else:
        found.append(_within(asked, traced, need))
    if asked.ranks is None and not asked.capacity.is_host and made.train:
        found += _among_ranks(asked, batch, need)
    if "float32" in made.dtypes:
        found.append(_narrow(asked, batch))
    return found


def _one_by_one(asked: StepQuestion, parameters: list[nn.Parameter], need: Need) -> Remedy:
    """Return what the step needs where the optimizer updates one parameter after the other."""
    alone = update_bytes(asked.optimizer, parameters, foreach=False)
    less = replace(need, temporaries=alone.temporaries)
    return Remedy(
        how="foreach=False",
        total=less.total + asked.capacity.allowance,
        fits=less.total <= asked.capacity.usable,
        text=f"{alone.name} updates one parameter after the other; memplan.compile_step plans such updates",
    )


def _within(asked: StepQuestion, traced: TracedGraph, need: Need) -> Remedy:
    """Return the cheapest plan within the device, or the smallest that was found.

    On the host nothing is offloaded: that is the same memory.
    """
    is_host = asked.capacity.is_host
    usable, allowance = asked.capacity.usable, asked.capacity.allowance
    beside_update = need.fixed + need.kept + need.temporaries
    options = replace(
        asked.options,
        budget=usable,
        reserve=need.state,
        arena_budget=usable - beside_update,
        policy="recompute" if is_host else asked.options.policy,
    )
    try:
        plan = asked.planned(traced, options)
    except BudgetInfeasible as error:
        text = f"no plan was found within {format_bytes(usable)}: {error.summary}"
        return Remedy(how="budget", total=error.smallest + allowance, fits=False, text=text)
    kept = asked.need(plan)
    budget = f"budget={usable}, reserve={need.state}" + (', policy="recompute"' if is_host else "")
    how = "computed again" if is_host else "computed again or offloaded"
    return Remedy(
        how="budget",
        total=kept.total + allowance,
        fits=kept.total <= usable,
        overhead=plan.eviction.overhead if plan.eviction is not None else None,
        text=f"memplan.compile(model, inputs, {budget}): part of the step is {how}",
    )


def _narrow(asked: StepQuestion, batch: int | None) -> Remedy:
    """Return what the step needs with parameters in bfloat16."""
    example = replace(asked.example, dtype=torch.bfloat16)
    narrow = asked.about(example, asked.ranks)
    try:
        made = narrow.answer(batch, eager=False).fits
    except MemplanError as error:
        return Remedy(how="bfloat16", total=0, fits=False, text=f"could not be planned: {error.summary}")
    text = "parameters, gradients and the optimizer's state in bfloat16; the numbers change"
    return Remedy(how="bfloat16", total=made.total, fits=made.fits, text=text)


def _among_ranks(asked: StepQuestion, batch: int | None, need: Need) -> list[Remedy]:
    """Return what one rank needs of the fewest ranks, a power of two, that seem to be enough; none if none are."""
    divisible = need.parameters + need.state + need.gradients + need.temporaries
    rest = max(need.total - divisible, 0)
    enough = (n for n in _RANKS if divisible / n + rest <= asked.capacity.usable)
    last: list[Remedy] = []
    for ranks in islice(enough, _TRIED_RANKS):
        one = StepQuestion(
            asked.example, asked.optimizer, asked.capacity, asked.options, asked.train, asked.tell, ranks
        )
        try:
            with fake_ranks(ranks):
                made = one.answer(batch, eager=False).fits
        except MemplanError as error:
            text = f"could not be planned: {error.summary}"
            return [*last, Remedy(how=f"{ranks} ranks", total=0, fits=False, text=text)]
        text = "torch's fully_shard divides parameters, gradients and state; each rank has a batch of this size"
        last = [Remedy(how=f"{ranks} ranks", total=made.total, fits=made.fits, text=text)]
        if made.fits:
            break
    return last


def _largest(asked: StepQuestion, batch: int | None, made: Fits) -> int | None:
    """Return the largest batch that fits with the slack; 0 if none does, None where it is not known.

    It is not where the batch cannot change, where what is needed does not depend on it, and where the sizes to try
    cannot be traced.
    """
    if batch is None or not asked.example.can_change_batch:
        return None
    usable = asked.capacity.usable
    if made.need.parameters + made.need.state > usable:
        return 0
    try:
        lowest = batch if made.fits else _smallest(asked, batch)
        if lowest is None or asked.over(lowest) > 0:
            return None if lowest is None else 0
        highest = usable if made.fits else max(batch - 1, lowest)  # a sample has at least a byte
        found = largest_within(asked.over, usable, lowest=lowest, highest=highest)
    except MemplanError as error:
        asked.tell(f"the largest batch is not known: {error.summary}")
        return None
    return None if made.fits and found == highest else found


def _smallest(asked: StepQuestion, batch: int) -> int | None:
    """Return the smallest of some sizes below a batch that can be planned; None if none can.

    A model with batch norm takes no batch of 1; another may take only even ones.
    """
    for size in (1, 2, *(batch >> n for n in reversed(range(1, batch.bit_length() - 1)))):
        with suppress(MemplanError):
            if size < batch:
                asked.over(size)
                return size
    return None
