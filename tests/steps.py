"""What one forward and backward leaves, for tests that hold two runs of a model against each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a forward and backward left: the loss, and copies of the gradients and buffers by name."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]

    def same_as(self, other: Outcome) -> bool:
        """Whether both have the same names and the same values, bit by bit."""
        return torch.equal(self.loss, other.loss) and all(
            one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
            for one, two in ((self.gradients, other.gradients), (self.buffers, other.buffers))
        )


def loss_of(call: Callable[..., Any], *args: Any, seed: int | None = None) -> torch.Tensor:
    """The loss that `call(*args)` returned, after its backward, which adds to the gradients that are there.

    The random numbers are those of `seed`; None: those that come next.
    """
    if seed is not None:
        torch.manual_seed(seed)
    loss: torch.Tensor = call(*args)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients of the parameters that have one, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def outcome_after(model: nn.Module, loss: torch.Tensor) -> Outcome:
    """The outcome of a step whose backward has run, and whose loss was `loss`."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Outcome(loss=loss.detach(), gradients=gradients_of(model), buffers=buffers)


def outcome_of(model: nn.Module, call: Callable[..., Any], *args: Any, seed: int | None = None) -> Outcome:
    """The outcome of a forward and backward by `call`, which has the parameters of `model`; no gradients at first."""
    model.zero_grad()
    return outcome_after(model, loss_of(call, *args, seed=seed))


def outcomes_of(model: nn.Module, call: Callable[..., Any], *args: Any, steps: int, seed: int) -> list[Outcome]:
    """The outcomes of `steps` steps, as by `outcome_of`, with random numbers that follow one another from `seed` on."""
    torch.manual_seed(seed)
    return [outcome_of(model, call, *args) for _ in range(steps)]


def same_tensors(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    """Whether both are as many tensors, each with the same values bit by bit."""
    return len(ours) == len(theirs) and all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


def same_outcomes(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> bool:
    """Whether both are as many steps, each with the same outcome bit by bit."""
    return len(ours) == len(theirs) and all(one.same_as(two) for one, two in zip(ours, theirs, strict=True))


def under_autocast(call: Callable[..., Any], *, enabled: bool = True) -> Callable[..., Any]:
    """`call`, under autocast to bfloat16 on the CPU, which ends before the backward begins."""

    def cast(*args: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            return call(*args)

    return cast


def assert_same_step(one: nn.Module, two: nn.Module, call: Callable[..., Any], *args: Any) -> frozenset[str]:
    """The names of the parameters that got a gradient in a step of `one` by `call` and of `two` by itself.

    Fails where the losses (the mean of the squared results), the gradients or the buffers differ in a bit.
    """

    def step(model: nn.Module, forward: Callable[..., Any]) -> Outcome:
        return outcome_of(model, lambda *values: forward(*values).square().mean(), *args)

    first, second = step(one, call), step(two, two)
    assert torch.equal(first.loss, second.loss)
    assert first.gradients.keys() == second.gradients.keys()
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name]), name
    assert first.same_as(second)
    return frozenset(first.gradients)
