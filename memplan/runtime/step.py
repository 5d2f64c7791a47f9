"""A step in flight: the one link between a program and autograd, and the rules that keep it honest.

The arena holds one step's activations. So a forward may not start while another one's backward is still to
come, a backward runs once, and nothing that it reads may have changed in between. Each breach raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memplan.errors import StaleActivationsError, UnsupportedCall


class InFlight:
    """The activations of one forward. Lives as long as its autograd graph; `done` after its backward."""

    __slots__ = ("__weakref__", "done", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.done = False


class Ledger:
    """Which step owns the arena. Shared by all programs that run in one arena."""

    def __init__(self) -> None:
        self.steps = 0
        self._current: Callable[[], InFlight | None] = lambda: None

    def begin(self, *, keep: bool) -> InFlight:
        """Start a step, or raise `StaleActivationsError` when one is in flight; `keep`: a backward will follow."""
        pending = self.pending
        self.steps += 1
        if pending is not None:
            raise StaleActivationsError(
                f"forward {self.steps} would overwrite the activations of forward {pending.number}, "
                "whose backward has not run",
                hint="call backward first, or run forwards that need none under torch.no_grad(), "
                "or drop the outputs of the earlier forward",
            )
        step = InFlight(self.steps)
        self._current = weakref.ref(step) if keep else lambda: None
        return step

    @property
    def pending(self) -> InFlight | None:
        """The step whose backward is still to come, if its autograd graph is still alive."""
        step = self._current()
        return None if step is None or step.done else step

    def end(self, step: InFlight) -> None:
        """The backward of `step` begins; raise unless the arena still holds what it needs."""
        if step.done:
            raise StaleActivationsError(
                f"backward ran twice for forward {step.number}; its activations were given up by the first",
                hint="run the forward again, or add the losses before one backward",
            )
        if self._current() is not step:
            raise StaleActivationsError(
                f"the activations of forward {step.number} were overwritten by forward {self.steps}",
                hint="call backward before the next forward",
            )
        step.done = True


class PlannedStep(torch.autograd.Function):
    """Forward and backward of a program as one autograd node; parameters are inputs so that gradients arrive."""

    @staticmethod
    def forward(ctx: Any, runner: Any, inputs: Sequence[torch.Tensor], *differentiable: torch.Tensor) -> Any:
        step = runner.ledger.begin(keep=True)
        fresh, saved = runner.program.forward(*inputs)
        ctx.runner, ctx.step, ctx.count = runner, step, len(differentiable)
        # An output saved as itself would keep its own graph alive for ever.
        ctx.saved = [t.detach() for t in saved]
        ctx.versions = [t._version for t in ctx.saved], [t._version for t in runner.watched()]
        ctx.mark_non_differentiable(*(t for t, dual in zip(fresh, runner.tangents, strict=True) if dual is None))
        return fresh

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        runner, step = ctx.runner, ctx.step
        if torch.is_grad_enabled():
            raise UnsupportedCall(
                "a planned step has no second derivative (create_graph=True)",
                hint="run this step on the original model",
            )
        runner.ledger.end(step)
        saved, ctx.saved = ctx.saved, None
        _require_unchanged(ctx.versions, saved, runner.watched(), step)
        gradients = runner.program.backward(*saved, *runner.tangents_from(grads))
        return (None, None, *runner.in_order(gradients))


def _require_unchanged(
    versions: tuple[list[int], list[int]],
    saved: Sequence[torch.Tensor],
    watched: Sequence[torch.Tensor],
    step: InFlight,
) -> None:
    if versions == ([t._version for t in saved], [t._version for t in watched]):
        return
    pairs = zip((*saved, *watched), (*versions[0], *versions[1]), strict=True)
    changed = next(t for t, version in pairs if t._version != version)
    raise StaleActivationsError(
        f"a tensor of shape {tuple(changed.shape)} that the backward of forward {step.number} needs was changed in place "
        "after the forward (an input, an output or a parameter)",
        hint="change it after the backward, or change a copy",
    )
