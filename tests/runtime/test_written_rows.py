"""Programs that write parts of tensors in place, as loops over rows do: eager's bits in at most eager's peak."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memplan
from memplan.devices.measure import peak_bytes
from tests.runtime.reference import same_gradients
from tests.slow import slow

CPU = torch.device("cpu")
ROWS, TIMES, WIDTH = 8, 4, 64


def _delta_rule(layer: nn.Module, x: Tensor) -> Tensor:
    """The chunked gated delta rule: rows of an inverse by forward substitution, then a scan over chunks."""
    key = layer(x).view(ROWS, 2, TIMES // 2, WIDTH)
    system = -(0.01 * key @ key.transpose(-1, -2)).tril(-1)
    for i in range(1, TIMES // 2):
        row, sub = system[..., i, :i].clone(), system[..., :i, :i].clone()
        system[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    values = (system + torch.eye(TIMES // 2)) @ key
    out, state = torch.zeros_like(values), torch.zeros(ROWS, WIDTH, WIDTH)
    for i in range(2):
        new = values[:, i] - key[:, i] @ state
        out[:, i] = key[:, i] @ state + new
        state = state * 0.9 + 0.01 * key[:, i].transpose(-1, -2) @ new
    return out


def _recurrent(make: Callable[..., Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    def program(layer: nn.Module, x: Tensor) -> Tensor:
        out, h = make(x), torch.zeros(ROWS, WIDTH)
        for t in range(TIMES):
            h = torch.tanh(layer(x[:, t]) + h)
            out[:, t] = h
        return out

    return program


def _reads_what_it_wrote(layer: nn.Module, x: Tensor) -> Tensor:
    out = torch.zeros(ROWS, TIMES, WIDTH)
    for t in range(1, TIMES):
        out[:, t] = torch.tanh(layer(x[:, t])) + out[:, t - 1].clone()
    return out


def _cumulative(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    for t in range(1, TIMES):
        y[:, t] += y[:, t - 1] * 0.5
    return y


def _tails(layer: nn.Module, x: Tensor) -> Tensor:
    sums = torch.zeros(ROWS, TIMES, WIDTH)
    for t in range(1, TIMES):
        sums[:, t:] += layer(x[:, t]).unsqueeze(1)
    return sums


def _every_row(write: Callable[[Tensor, int, Tensor], Any]) -> Callable[[nn.Module, Tensor], Tensor]:
    def program(layer: nn.Module, x: Tensor) -> Tensor:
        out = torch.zeros(ROWS, TIMES, WIDTH)
        for t in range(TIMES):
            write(out, t, layer(x[:, t : t + 1]))
        return out

    return program


def _every_second(change: Callable[[Tensor, Tensor], Any]) -> Callable[[nn.Module, Tensor], Tensor]:
    def program(layer: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        for t in range(0, TIMES, 2):
            change(y, x > 0.2 * t)
        return y

    return program


def _experts(layer: nn.Module, x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    out = torch.zeros_like(flat)
    for expert in range(4):
        rows = torch.arange(expert, len(flat), 4)
        out.index_add_(0, rows, torch.tanh(layer(flat[rows])))
    return out


def _put(y: Tensor, t: int, row: Tensor) -> None:
    y[:, torch.tensor([t])] = row


def _zero(y: Tensor, mask: Tensor) -> None:
    y[mask] = 0


PROGRAMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "delta rule": _delta_rule,
    "zeros": _recurrent(torch.zeros_like),
    "empty": _recurrent(torch.empty_like),
    "a slice of more": _recurrent(lambda x: torch.zeros(ROWS, 2 * TIMES, WIDTH)[:, TIMES:]),
    "read again": _reads_what_it_wrote,
    "cumulative": _cumulative,
    "tails": _tails,
    "index_put": _every_row(_put),
    "index_add_": _every_row(lambda y, t, row: y.index_add_(1, torch.tensor([t]), row)),
    "masked": _every_second(_zero),
    "diagonal": _every_second(lambda y, mask: y.diagonal(dim1=-2, dim2=-1).mul_(0.9)),
    "experts": _experts,
}


_QUICK = ("delta rule", "a slice of more", "read again", "cumulative", "tails", "index_put", "masked", "diagonal")


class Writes(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.program = nn.Linear(WIDTH, WIDTH), PROGRAMS[name]

    def forward(self, x: Tensor) -> Tensor:
        y = self.program(self.layer, x)
        return (y * y.detach().cos()).mean() if self.training else y


def _call(model: Callable[[Tensor], Tensor], x: Tensor, train: bool) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.set_grad_enabled(train):
            out = model(x)
            if train:
                torch.autograd.backward(out)
            return out

    return call


_EACH = [name if name in _QUICK else slow(name) for name in PROGRAMS]


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", _EACH)
def test_parts_are_written_in_place(name: str, train: bool) -> None:
    model = Writes(name).train(train)
    reference, x = copy.deepcopy(model), torch.randn(ROWS, TIMES, WIDTH)
    compiled = memplan.compile(model, x, train=train)
    calls = [_call(reference, x, train), _call(compiled, x, train)]
    assert torch.equal(*(call() for call in calls))
    assert same_gradients(model, reference)
    for module in (model, reference):
        module.zero_grad()
    eager, measured = (peak_bytes([call], CPU)[0] for call in calls)  # type: ignore[list-item]
    arena = compiled.plan.arena_size
    row = ROWS * WIDTH * 4  # a number that is written is one in eager, and a row of them in a graph
    assert measured + arena <= eager + compiled.plan.padding + row


MIN = {"arena_budget": "min", "policy": "recompute"}


class Cached(nn.Module):
    """Writes rows to a buffer and to an input, and reads what it wrote."""

    keys: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("keys", torch.zeros(ROWS, 2 * TIMES, WIDTH))

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        self.keys[:, 2:].mul_(0.5)
        for t in range(3):
            self.keys[:, t] = self.layer(x[:, t]).detach()
            cache.index_copy_(1, torch.tensor([t]), x[:, t : t + 1] * 2)
        cache[:, 5] += 1
        found: Tensor = (self.layer(x[:, 0]) * self.keys[:, 0].clone()).sum() + cache.sum()
        return found


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"sanitize": "poison"}, MIN], ids=str)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_buffers_and_inputs_are_written_in_place(train: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x, cache = Cached(), torch.randn(ROWS, TIMES, WIDTH), torch.randn(ROWS, 2 * TIMES, WIDTH)
    reference, given = copy.deepcopy(model), cache.clone()
    compiled = memplan.compile(model, (x, cache.clone()), train=train, **options)
    if not options:
        gradients = sum(p.nbytes for p in model.parameters()) if train else 0
        assert compiled.plan.arena_size < gradients + cache.nbytes // 2
    for _ in range(3):
        with torch.set_grad_enabled(train):
            found, expected = compiled(x, cache), reference(x, given)
        if train:
            found.backward()
            expected.backward()
        for one, two in ((found, expected), (cache, given), (model.keys, reference.keys)):
            assert torch.equal(one, two)
    assert same_gradients(model, reference)
