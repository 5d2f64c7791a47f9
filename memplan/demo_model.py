"""The model of `memplan demo`: a transformer of two layers that predicts the next token, small enough for any CPU.

memplan report memplan.demo_model:small
memplan diff memplan.demo_model:small memplan.demo_model:grown
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 512, 128, 4, 64, 8


class Layer(nn.Module):
    """A transformer layer: attention and a feed-forward net of `hidden` units, each with a residual connection."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.project(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = (heads[0] @ heads[1].transpose(-1, -2)) * (WIDTH // HEADS) ** -0.5
        x = x + self.join((scores.softmax(-1) @ heads[2]).transpose(1, 2).reshape(batch, length, WIDTH))
        fed: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + fed


class Model(nn.Module):
    """A model that takes tokens and returns the loss of predicting the next ones."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(Layer(hidden), Layer(hidden))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embed(tokens[:, :-1])))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def small() -> tuple[Model, tuple[Tensor]]:
    """Return the model and its example inputs."""
    return _make(4 * WIDTH)


def grown() -> tuple[Model, tuple[Tensor]]:
    """Return the model with wider feed-forward nets, as after a change that needs more memory."""
    return _make(6 * WIDTH)


def _make(hidden: int) -> tuple[Model, tuple[Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(hidden), (torch.randint(VOCABULARY, (BATCH, LENGTH)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The losses of the same steps in eager and in the arena, and whether losses and parameters are bitwise equal."""

    eager: tuple[float, ...]
    planned: tuple[float, ...]
    bitwise: bool
    arena_size: int


def train(steps: int = 3) -> Training:
    """Train `small` for `steps` steps, in eager and in one preallocated arena, and compare them."""
    import memplan

    model, (tokens,) = small()
    twin = copy.deepcopy(model)
    compiled = memplan.compile(model, (tokens,))
    eager, planned, equal = [], [], True
    for _ in range(steps):
        losses = [_step(twin, tokens), _step(compiled, tokens)]
        eager.append(losses[0])
        planned.append(losses[1])
        pairs = zip(twin.parameters(), compiled.parameters(), strict=True)
        equal = equal and losses[0] == losses[1] and all(torch.equal(a, b) for a, b in pairs)
    return Training(eager=tuple(eager), planned=tuple(planned), bitwise=equal, arena_size=compiled.plan.arena_size)


def _step(model: nn.Module, tokens: Tensor) -> float:
    """Run one step of gradient descent and return the loss before it."""
    loss = model(tokens)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    return float(loss.detach())
