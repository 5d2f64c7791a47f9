"""What one forward and backward leaves, for tests that hold two runs of a model against each other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import memplan


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


def itself(loss: torch.Tensor) -> torch.Tensor:
    """The loss function of a model that returns its loss."""
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The plainest optimizer of a model, for `Training`."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Training:
    """A step of `memplan.compile_step`, and eager's copy of its model, which train on the same batches."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Any], Any],
        loss_fn: Callable[..., Any],
        *example: Any,
        eager: nn.Module | None = None,
        clip: float | None = None,
        accumulate: int = 1,
        **options: Any,
    ) -> None:
        """`make` returns the optimizer of a model; `eager` is needed where the model cannot be copied."""
        self.model, self.eager = model, eager or copy.deepcopy(model)
        self.ours, self.theirs = make(self.model), make(self.eager)
        self.loss_fn, self.clip, self.accumulate, self.calls = loss_fn, clip, accumulate, 0
        self.step = memplan.compile_step(
            model, self.ours, loss_fn, example, clip_grad_norm=clip, accumulate=accumulate, **options
        )

    def both(self, *batch: Any, seed: int = 0) -> torch.Tensor:
        """The loss of a batch; fails where it, or a parameter or a buffer afterwards, is not eager's bit by bit."""
        torch.manual_seed(seed)
        loss = self.step(*batch)
        torch.manual_seed(seed)
        with_target = self.loss_fn is nn.functional.mse_loss
        expected = self.loss_fn(self.eager(batch[0]), batch[1]) if with_target else self.loss_fn(self.eager(*batch))
        (expected / self.accumulate if self.accumulate > 1 else expected).backward()
        self.calls += 1
        if self.calls % self.accumulate == 0:
            if self.clip is not None:
                nn.utils.clip_grad_norm_(list(self.eager.parameters()), self.clip)
            self.theirs.step()
            self.theirs.zero_grad()
        assert torch.equal(loss, expected.detach())
        for (name, one), two in zip(self.model.state_dict().items(), self.eager.state_dict().values(), strict=True):
            assert torch.equal(one, two), name
        return loss

    def assert_same_state(self) -> None:
        """Fail unless both optimizers have the same `state_dict`."""
        assert_same_state(self.ours, self.theirs)


def assert_same_state(one: Any, two: Any) -> None:
    """Fail unless two optimizers have the same `state_dict`, bit by bit, in the same order."""
    ours, theirs = one.state_dict(), two.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    for index, state in theirs["state"].items():
        assert list(ours["state"][index]) == list(state), index
        for key, value in state.items():
            mine = ours["state"][index][key]
            assert type(mine) is type(value), (index, key)
            assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, (index, key)
