"""Buffers and inputs that the backward of a user's autograd function writes hold eager's values after each call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import UnsupportedGraph
from tests.slow import slow

# dynamo makes an object of the function's class to look at it
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

Write = Callable[[torch.Tensor, torch.Tensor], Any]


def _largest(held: torch.Tensor, g: torch.Tensor) -> None:
    held.copy_(g.abs().amax())


def _counted(held: torch.Tensor, g: torch.Tensor) -> None:
    held.add_(1)


def _averaged(held: torch.Tensor, g: torch.Tensor) -> None:
    held.mul_(0.5).add_(g.abs().amax())


def _a_view(held: torch.Tensor, g: torch.Tensor) -> None:
    held[1].add_(g.sum())


class Layer(nn.Module):
    """A linear layer whose backward calls `write`, and whose forward calls `early`, on a buffer or on an input."""

    def __init__(
        self,
        write: Write,
        early: Write | None = None,
        shape: tuple[int, ...] = (),
        used: bool = False,
        last: bool = False,
    ) -> None:
        """`used`: the forward reads the buffer. `last`: the function comes last, so that its backward comes first."""
        super().__init__()

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
                ctx.held = held
                if early is not None:
                    early(held, x)
                return x * 2

            @staticmethod
            def backward(ctx: Any, g: torch.Tensor) -> Any:
                write(ctx.held, g)
                return g * 2, None

        self.linear, self.function, self.used, self.last = nn.Linear(8, 8), Twice, used, last
        self.held: torch.Tensor
        self.register_buffer("held", torch.ones(shape))

    def forward(self, x: torch.Tensor, held: torch.Tensor | None = None) -> torch.Tensor:
        h = self.linear(x)
        h = h * self.held.clone() if self.used else h
        found: torch.Tensor = self.function.apply(h, self.held if held is None else held)  # type: ignore[no-untyped-call]
        return found if self.last else found.square()


def _sharing() -> nn.Module:
    one, two = Layer(_averaged, shape=(3,)), Layer(_a_view, shape=(3,))
    two.held = one.held
    return nn.Sequential(one, nn.Tanh(), two)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "set": lambda: Layer(_largest),
    "average, used": lambda: Layer(_averaged, used=True),
    "layers": lambda: nn.Sequential(*[m for _ in range(3) for m in (Layer(_averaged, used=True), nn.Tanh())]),
    "shared": _sharing,
    "input": lambda: Layer(lambda held, g: held.copy_(g)),
    "average, used, first": lambda: Layer(_averaged, used=True, last=True),
    "set in both": lambda: Layer(_largest, lambda held, _: held.add_(1)),
    "counted in both": lambda: Layer(_counted, lambda held, _: held.mul_(2)),
}
REST = ("layers", "shared", "average, used, first", "counted in both")
EACH = [slow(name) if name in REST else name for name in MODELS]
COMPILED: dict[str, Callable[..., Any]] = {
    "compile": memplan.compile,
    "backend": lambda model, args: torch.compile(model, backend="memplan"),
    "least": lambda model, args: memplan.compile(model, args, arena_budget="min"),
}


def _inputs(name: str, seed: int) -> tuple[torch.Tensor, ...]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    return (x, torch.zeros(4, 8)) if name == "input" else (x,)


def _steps(model: nn.Module, call: Callable[..., Any], name: str, waiting: int) -> list[torch.Tensor]:
    """Buffers, inputs, gradients and results after each call; so many forwards wait for their backwards."""
    found: list[torch.Tensor] = []
    given: list[torch.Tensor] = []

    def see(*more: torch.Tensor) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.extend(t.detach().clone() for t in (*model.buffers(), *gradients, *given, *more))

    for seed in range(2):
        outs: list[Any] = []
        for k in range(waiting):
            given += _inputs(name, waiting * seed + k)
            outs.append(call(*given[-len(_inputs(name, 0)) :]))
            see(*outs)
        for out in outs:
            out.sum().backward()
            see(*outs)  # gradients are added up; a result may be what is written
    return found


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("how", COMPILED)
def test_each_call_leaves_eagers_values(how: str, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    eager = copy.deepcopy(model)
    compiled = COMPILED[how](model, _inputs(name, 0))
    for waiting in (1,) if how == "least" else (1, 2):  # one call in flight is all that the least budget has room for
        expected, found = (_steps(m, c, name, waiting) for m, c in ((eager, eager), (model, compiled)))
        assert len(expected) == len(found)
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("name", EACH)
def test_a_whole_step_leaves_eagers_values(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    eager = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, eager))
    step = memplan.compile_step(model, ours, torch.sum, _inputs(name, 0))
    for seed in range(3):
        one, two = _inputs(name, seed), _inputs(name, seed)
        step(*one)
        eager(*two).sum().backward()
        theirs.step()
        theirs.zero_grad()
        pairs = [(m.state_dict().values(), given) for m, given in ((model, one), (eager, two))]
        assert all(map(torch.equal, *([*state, *given] for state, given in pairs)))


def test_inductors_kernels_of_what_forward_and_backward_write_are_refused() -> None:
    with pytest.raises(UnsupportedGraph, match="which the forward has changed by then"):
        memplan.plan(MODELS["counted in both"](), _inputs("", 0), kernels="inductor")


def test_autograd_is_told_of_what_the_backward_writes() -> None:
    torch.manual_seed(0)
    model, x = Layer(_largest), torch.randn(4, 8)
    compiled = memplan.compile(model, x)
    compiled(x).sum().backward()
    reads: Any = torch.ones((), requires_grad=True) * model.held  # autograd saves the buffer
    compiled(x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        reads.backward()
