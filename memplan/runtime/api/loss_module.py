"""The module that `memplan.compile_step` traces: a model and its loss function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memplan.errors import UnsupportedGraph


class LossModule(nn.Module):
    """A model and its loss as one module: the loss is traced too, so that the only tangent is that of the loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.with_targets = _positional_arguments(loss_fn) > 1

    def parts_of(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the parts of an example batch; a list of both parts, as a `DataLoader` yields, is taken apart.

        Raises `UnsupportedGraph` if it does not have the parts that `loss_fn` takes.
        """
        if self.with_targets and len(batch) == 1 and isinstance(batch[0], list) and len(batch[0]) == 2:
            batch = tuple(batch[0])
        if self.with_targets and len(batch) != 2:
            what = f"loss_fn takes several arguments, but the batch has {len(batch)} parts"
            hint = "pass (inputs, targets), or a loss_fn of one argument"
            if not batch:
                what = f"{what}: a dict is the model's keywords"
                hint = "pass a loss_fn of one argument, the model's result"
            raise UnsupportedGraph("example_batch", what, hint, see="loss-arguments")
        return batch

    def forward(self, *batch: Any, **kwargs: Any) -> torch.Tensor:
        if not self.with_targets:
            return self.loss_fn(self.model(*batch, **kwargs))
        inputs, targets = batch
        output = self.model(*inputs, **kwargs) if isinstance(inputs, tuple) else self.model(inputs, **kwargs)
        return self.loss_fn(output, *targets) if isinstance(targets, tuple) else self.loss_fn(output, targets)


def _positional_arguments(function: Callable[..., Any]) -> int:
    """Return how many positional arguments without defaults a function (or a module's forward) takes.

    Builtin functions such as `torch.sum` have no signature; they count as reductions of one argument.
    """
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)
