"""Models that no plan can hold run as eager behind `torch.compile` and `memplan.compile`: one per refusal."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplan
from memplan.errors import BudgetInfeasible, UnsupportedGraph
from tests.slow import slow


class Net(nn.Module):
    """Two layers, and a function that says what forward does with them."""

    def __init__(self, run: Callable[..., Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b, self.run = layer or nn.Linear(8, 8), nn.Linear(8, 8), run
        self.count = 0

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


@torch.library.custom_op("memplan_tests::write_twice", mutates_args={"y"})
def _write_twice(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x * 2)


@_write_twice.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> None:
    return None


def _x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def _z() -> torch.Tensor:
    return torch.complex(_x(), _x())


def _cond(net: Any, x: Any) -> Any:
    h = net.a(x)
    h = torch.cond(h.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (h,))
    return net.b(h)


def _custom(net: Any, x: Any) -> Any:
    h = net.a(x)
    y = torch.empty_like(h)
    torch.ops.memplan_tests.write_twice(h.detach(), y)
    return net.b(h + y)


def _prints(net: Any, x: Any) -> Any:
    h = net.a(x)
    torch.ops.aten._print("printed")
    return net.b(h)


def _views(net: Any, x: Any) -> Any:
    h: Any = torch.view_as_complex(net.a(x).view(4, 4, 2))
    return h.real, h.imag, h


def _counts(net: Any, x: Any) -> Any:
    net.count += 1
    return net.b(net.a(x)) * net.count


def _first(net: Any, x: Any) -> Any:
    h = net.a(x)
    if net.count == 0:
        net.count, h = 1, h * 3
    return net.b(h)


def _window(net: Any, x: Any) -> Any:
    x[0].add_(1)
    return net.b(net.a(x))


def _hooked() -> nn.Module:
    net = Net(lambda net, x: net.b(net.a(x)))
    net.b.register_full_backward_hook(lambda module, inputs, outputs: inputs)
    return net


def _written_leaf(net: Any, x: Any) -> Any:
    h = net.a(x)
    torch._dynamo.graph_break()
    h[:, 0] = 0
    return net.b(h)


Case = tuple[Callable[[], nn.Module], Callable[[], Any]]
# Of each kind that memplan refuses to plan, and says so: its model and its input; docs/refused.md has them all.
CASES: dict[str, Case] = {
    "cond": (lambda: Net(_cond), _x),
    "custom op that writes": (lambda: Net(_custom), _x),
    "prints": (lambda: Net(_prints), _x),
    "sparse gradient": (
        lambda: Net(lambda net, i: net.b(net.a(i)), nn.Embedding(10, 8, sparse=True)),
        lambda: torch.tensor([1, 2, 2, 5]),
    ),
    "lazy conjugate given": (lambda: Net(lambda net, z: net.b(net.a((z * 2).abs()))), lambda: _z().conj()),
    "lazy conjugate returned": (lambda: Net(lambda net, x, z: (net.b(net.a(x)), z.conj())), lambda: (_x(), _z())),
    "views of another type": (lambda: Net(_views), _x),
    "graph break writes its input": (lambda: Net(_written_leaf), _x),
    "shared bytes written": (lambda: Net(_window), lambda: torch.zeros(32).as_strided((4, 8), (4, 1))),
    "Python state": (lambda: Net(_counts), _x),
    "first call": (lambda: Net(_first), _x),
    "random": (lambda: Net(lambda net, x: net.b(net.a(x)) * random.uniform(0, 1)), _x),
    "branch": (lambda: Net(lambda net, x: net.b(net.a(x)) if x.sum() > 0 else net.a(x)), _x),
    "backward hook": (_hooked, _x),
}
_OTHERS = {"cond", "lazy conjugate given", "views of another type", "first call", "random", "branch"}


def _steps(model: nn.Module, call: Callable[..., Any], inputs: tuple[Any, ...]) -> list[Any]:
    """Train for two steps; return all results, gradients and the state."""
    seen: list[Any] = []
    for step in range(2):
        torch.manual_seed(step)
        random.seed(step)
        results = call(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        sum(t.abs().sum() for t in results if t.requires_grad).backward()
        seen += [t.detach().resolve_conj().clone() for t in results]
        gradients = [p.grad if p.grad is None else p.grad.to_dense() for p in model.parameters()]
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        model.zero_grad()
        seen += gradients
    return [*seen, *inputs, *model.state_dict().values()]


def _same(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(
        a is b or torch.equal(a.resolve_conj(), b.resolve_conj()) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("name", [slow(name) if name in _OTHERS else name for name in CASES])
def test_what_no_plan_can_hold_has_eagers_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, inputs = CASES[name]
    refused = UnsupportedGraph.__init__
    raised: list[UnsupportedGraph] = []

    def noted(self: UnsupportedGraph, *args: Any, **kwargs: Any) -> None:
        raised.append(self)
        refused(self, *args, **kwargs)

    monkeypatch.setattr(UnsupportedGraph, "__init__", noted)

    def given() -> tuple[Any, ...]:
        made = inputs()
        return made if isinstance(made, tuple) else (made,)

    def net() -> nn.Module:
        torch.manual_seed(7)
        return make()

    eager = net()
    expected = _steps(eager, eager, given())
    for compiled in (lambda m: torch.compile(m, backend=memplan.Backend()), lambda m: memplan.compile(m, given())):
        torch._dynamo.reset()
        with caplog.at_level(logging.WARNING, logger="memplan"):
            model = net()
            run: Any = compiled(model)  # type: ignore[no-untyped-call]
            assert _same(_steps(model, run, given()), expected)
    assert raised
    assert [r for r in caplog.records if r.name == "memplan"]


def _clamps(net: Any, x: Any) -> Any:
    net.b.weight.data.clamp_(-0.2, 0.2)
    return net.b(net.a(x))


PLANNED: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
    "clamped parameter": (lambda: Net(_clamps), [(_x(),)] * 3),
    "used before it is clamped": (lambda: Net(lambda net, x: net.b(_clamps(net, x))), [(_x(),)] * 3),
    "max_norm": (
        lambda: Net(lambda net, i: net.b(net.a(i)), nn.Embedding(10, 8, max_norm=0.5)),
        [(torch.tensor([1, 2, 2, 5]),)] * 3,
    ),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
@pytest.mark.parametrize("name", PLANNED)
def test_what_was_refused_is_planned(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, calls = PLANNED[name]
    seen: list[list[Any]] = []
    for backend in (None, memplan.Backend()):
        torch._dynamo.reset()
        torch.manual_seed(7)
        model = make()
        run = model if backend is None else torch.compile(model, backend=backend)
        seen.append([x for call in calls for x in _steps(model, run, call) if isinstance(x, torch.Tensor)])
    assert _same(*seen)
    assert not [r for r in caplog.records if "runs as eager" in r.message]


def _masked_checkpoint(net: Any, x: Any) -> Any:
    def block(h: Any) -> Any:
        y = torch.empty_like(h)
        torch.ops.memplan_tests.write_twice(h.detach(), y)
        return torch.nn.functional.dropout(net.b(h) + y, 0.5).tanh()

    return checkpoint(block, net.a(x), use_reentrant=False)


def test_a_checkpoint_that_runs_as_eager_draws_its_mask_once(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo's graph of a checkpoint would draw another mask in the backward."""
    seen = []
    for backend in (None, memplan.Backend()):
        torch._dynamo.reset()
        torch.manual_seed(7)
        model = Net(_masked_checkpoint)
        seen.append(_steps(model, model if backend is None else torch.compile(model, backend=backend), (_x(),)))
    assert _same(*seen)
    assert "runs as eager" in caplog.text


def test_promises_refuse() -> None:
    for options in ({"fullgraph": True}, {"budget": "1GiB"}):
        with pytest.raises((UnsupportedGraph, BudgetInfeasible)):
            memplan.compile(Net(_prints), _x(), **options)
    with pytest.raises(UnsupportedGraph):
        memplan.plan(Net(_prints), _x())
    model = Net(_prints)
    with pytest.raises(UnsupportedGraph):
        memplan.compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda out: out.sum(), _x())
    budgeted = torch.compile(Net(_prints), backend=memplan.Backend(budget="1GiB"))
    with pytest.raises(UnsupportedGraph):
        budgeted(_x())


class Counting(nn.Module):
    """Writes to a tensor that is no buffer: an attribute, or one of a list."""

    def __init__(self, held: str) -> None:
        super().__init__()
        count = torch.zeros(4)
        self.inner = nn.Linear(4, 4)
        self.held: Any = count if held == "attribute" else [count]

    @property
    def count(self) -> torch.Tensor:
        """The tensor."""
        count: torch.Tensor = self.held[0] if isinstance(self.held, list) else self.held
        return count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = self.held if isinstance(self.held, torch.Tensor) else self.held[0]
        count.add_(1)
        scaled: torch.Tensor = self.inner(x) * count
        return scaled


@pytest.mark.parametrize("by_backend", [False, True])
@pytest.mark.parametrize("held", ["attribute", "list"])
@pytest.mark.filterwarnings("ignore:.*planned as several graphs", "ignore:.*runs as eager")
def test_a_tensor_that_is_no_buffer_counts_the_steps_and_not_the_traces(held: str, by_backend: bool) -> None:
    torch.manual_seed(0)
    model, x = Counting(held), torch.randn(2, 4)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="memplan") if by_backend else memplan.compile(model, x)
    assert not model.count.any()
    for _ in range(3):
        assert torch.equal(compiled(x), eager(x))
        assert torch.equal(model.count, eager.count)


class Changed(nn.Module):
    """Changes a buffer or an input in place, through autograd."""

    def __init__(self, how: Callable[[nn.Module, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(4, 4), how
        self.register_buffer("buffer", torch.zeros(4, 4))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.how(self, self.inner(x), other)


CHANGES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "a row of a buffer": lambda m, h, c: (m.buffer.__setitem__(2, h[2]), h, m.buffer)[1:],
    "a buffer, read": lambda m, h, c: (h, m.buffer.add_(h) * 2),
    "an input, returned": lambda m, h, c: (h, c.add_(h)),
    "an input, read": lambda m, h, c: (h, c.add_(h) * 2),
    "a row of an input, a view": lambda m, h, c: (c[0].copy_(h[0]), h, c[0:2])[1:],
}


@pytest.mark.parametrize("by_backend", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_through_autograd_has_eagers_gradients(change: str, by_backend: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Changed(CHANGES[change]), torch.randn(4, 4)
    eager, other = copy.deepcopy(model), torch.ones(4, 4)
    compiled = torch.compile(model, backend="memplan") if by_backend else memplan.compile(model, (x, other.clone()))
    found = []
    for run, owner in ((compiled, model), (eager, eager)):
        given = other.clone()
        results = [*run(x, given), given, owner.buffer]
        loss = sum(((t * t).sum() * (i + 1) for i, t in enumerate(results)), torch.zeros(()))
        loss.backward()
        found.append([[t.detach() for t in results], [p.grad for p in owner.parameters()]])
        found[-1].append([torch.tensor(t.requires_grad) for t in results])
    for ours, theirs in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_forward_set_on_the_object_runs_as_several_graphs_and_is_no_plan() -> None:
    net = Net(lambda net, x: net.b(net.a(x)))
    inner, x = net.forward, _x()
    net.forward = lambda x: inner(x) * 2  # type: ignore[method-assign,misc]
    with pytest.raises(UnsupportedGraph, match="forward was replaced"):
        memplan.plan(net, x)
    expected = net(x)
    assert torch.equal(memplan.compile(net, x)(x), expected)
