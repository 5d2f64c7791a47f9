"""Small models that several test files train; a model of one file only is in that file, with a name of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.zoo import ZOO
from memplan.trace.traced import TracedGraph
from memplan.trace.tracing import CapturedCall, capture_call


@cache
def _captured_nano(name: str) -> CapturedCall:
    return capture_call(*ZOO[name]("nano"))


def traced_nano(name: str, *, in_place: bool = True) -> TracedGraph:
    """The step of a nano model of the zoo, captured once in a process: tests must not change tensors of the model."""
    captured = _captured_nano(name)
    return replace(captured, options=replace(captured.options, in_place=in_place)).retrace()


class Made(nn.Module):
    """A model that returns `function(self, *inputs)` and has these parts: modules, parameters, tensors as buffers."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class Layers(nn.Module):
    """`layers` linear layers of width 16 that keep their results for the backward, with dropout if it is above 0.

    Returns a loss.
    """

    def __init__(self, layers: int = 6, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(layer(x).tanh())
        return x.square().sum()


class TwoLayers(nn.Module):
    """Two linear layers, `width` to `hidden` and back, with a tanh between them. Returns what they make."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(torch.tanh(self.one(x)))
        return out


class Shared(nn.Module):
    """Blocks that run several times, and an output layer that is the embedding. Returns a loss."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2))
        self.times = times

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(self.times):
            for block in self.blocks:
                x = x + block(x)
        return nn.functional.cross_entropy(x @ self.embedding.weight.t(), tokens)


class Halves(nn.Module):
    """Two parts, one after the other, with a break of dynamo's graph between them."""

    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        torch._dynamo.graph_break()
        out: torch.Tensor = self.two(hidden)
        return out


class Apply(nn.Module):
    """`function(w, *inputs)`, with a parameter `w` of no dimensions."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.25))
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self.w, *inputs)


class Counted(nn.Module):
    """A model of `size` parameters whose backward needs what was computed from the old value of a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, size))
        self.register_buffer("count", torch.zeros(()))
        self.count: torch.Tensor

    def forward(self) -> torch.Tensor:
        found = (self.weight + self.count).sin().sum()
        self.count.add_(1)
        return found


class Saves(nn.Module):
    """Keeps for the backward what is alive when the arena is fullest, and dead when a convolution needs much."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.two(torch.relu(self.one(x))))
        return nn.functional.max_pool2d(torch.tanh(x), 2).mean((2, 3))


class BreaksInEval(nn.Module):
    """Looks at its results in evaluation only, where no graph can hold it."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, hidden), nn.Linear(hidden, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x).tanh()
        if not self.training and hidden.sum() > 0:
            hidden = hidden * 2
        out: torch.Tensor = self.two(hidden)
        return out
