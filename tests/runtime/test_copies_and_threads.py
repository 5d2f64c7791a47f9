"""A compiled module among others: copied, pickled, nested, moved, in several threads."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import InputMismatch, StaleActivationsError, UnsupportedCall
from memplan.runtime import CompiledModule, compile, compile_step
from memplan.runtime.api.builder import Builder
from tests.runtime.reference import same_gradients
from tests.slow import slow
from tests.steps import same_tensors


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        out: torch.Tensor = self.layers(x) * scale
        return out


def _x(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def _net() -> Normed:
    torch.manual_seed(0)
    return Normed()


def _gradients(model: nn.Module, x: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    model.zero_grad()
    model(x, **kwargs).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _saved(module: CompiledModule) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[CompiledModule], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _saved,
}


@pytest.mark.parametrize("how", [slow("deepcopy"), "pickle", slow("torch.save")])
def test_a_copy_is_compiled_and_independent(how: str) -> None:
    compiled = compile(_net(), _x(), {"scale": 2.0}, sanitize="poison", gradients="outside")
    compiled.eval()
    twin = COPIES[how](compiled)
    assert isinstance(twin, CompiledModule)
    assert not twin.training
    with pytest.raises(InputMismatch, match="its first call"):
        twin.plan  # noqa: B018
    for module in (compiled, twin):
        module.train()
    before = [p.clone() for p in twin.parameters()]
    assert same_tensors(_gradients(compiled, _x(1), scale=2.0), _gradients(twin, _x(1), scale=2.0))
    torch.optim.SGD(compiled.parameters(), lr=0.1).step()
    assert same_tensors(before, list(twin.parameters()))
    assert not any(torch.equal(p, q) for p, q in zip(compiled.parameters(), twin.parameters(), strict=True))


def test_a_shallow_copy_shares_parameters_and_not_the_arena() -> None:
    compiled = compile(_net(), _x())
    twin = copy.copy(compiled)
    assert all(p is q for p, q in zip(compiled.parameters(), twin.parameters(), strict=True))
    one, two = compiled(_x(1)), twin(_x(2))  # both in flight: each has activations of its own
    (one.sum() + two.sum()).backward()


def test_what_cannot_be_copied_says_so() -> None:
    net = nn.Linear(8, 4)
    step = compile_step(net, torch.optim.SGD(net.parameters(), lr=0.1), lambda out: out.sum(), _x())
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(UnsupportedCall, match="bound to its model"):
            attempt(step)


def test_compiled_parts_of_a_model_that_is_not() -> None:
    """One compiled layer between plain ones, and two compiled layers in a row, whose activations live together."""
    eager = nn.Sequential(nn.Linear(8, 8), _net(), nn.Linear(4, 8), _net())
    parts = copy.deepcopy(eager)
    parts[1], parts[3] = (compile(parts[i], _x().requires_grad_(), sanitize="poison") for i in (1, 3))
    for seed in range(3):
        torch.testing.assert_close(_gradients(parts, _x(seed)), _gradients(eager, _x(seed)), rtol=1e-5, atol=1e-6)
    assert list(parts.state_dict()) == list(eager.state_dict())
    parts.load_state_dict(eager.state_dict())
    parts.eval()
    assert not parts[1].training


def test_a_compiled_part_of_a_compiled_model_is_traced_through() -> None:
    eager = nn.Sequential(nn.Linear(8, 8), _net())
    nested = copy.deepcopy(eager)
    nested[1] = compile(nested[1], _x())
    outer = compile(nested, _x(), sanitize="poison")
    assert outer.plan.fingerprint == compile(eager, _x(), sanitize="poison").plan.fingerprint
    for seed in range(2):
        assert same_tensors(_gradients(outer, _x(seed)), _gradients(eager, _x(seed)))


def test_threads_compile_at_the_same_time() -> None:
    """Torch notes in flags of the process that it traces; crossing threads would leave them up, for ever."""
    x, nets = _x(), [_net(), _net()]  # drawn here: the threads share torch's generator
    expected = _gradients(_net(), x)
    outcomes: list[bool] = []
    ready = threading.Barrier(2)

    def work() -> None:
        net = nets.pop()
        ready.wait()
        outcomes.append(same_tensors(_gradients(compile(net, x), x), expected))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 2
    assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()


def _grown(twin: Any) -> None:
    twin._original.layers.append(nn.Linear(4, 2))


def _double(twin: Any) -> None:
    twin.double()


@pytest.mark.parametrize(
    ("change", "evaluates"),
    [(_grown, False), slow(_double, False), slow(_grown, True), slow(_double, True)],
)
def test_a_copy_whose_model_changed_before_its_first_use_is_compiled_for_the_call(
    change: Callable[[Any], None], evaluates: bool
) -> None:
    twin = copy.deepcopy(compile(_net(), _x(), sanitize="poison"))
    change(twin)
    with pytest.raises(InputMismatch, match="at its first call"):
        twin.plan  # noqa: B018
    original, x = copy.deepcopy(twin._original), _x().to(next(twin.parameters()).dtype)
    if evaluates:
        for module in (twin.eval(), original.eval()):
            with torch.no_grad():
                out = module(x)
        assert torch.equal(out, twin(x))
        twin.train(), original.train()
    assert same_tensors(_gradients(twin, x), _gradients(original, x))
    assert twin.plan.graph.forward_ops < len(twin.plan.graph.ops)


def test_a_second_thread_is_refused_while_a_module_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile(_net(), _x())
    inside, over = threading.Event(), threading.Event()
    build = Builder.build

    def waits(self: Builder, *args: Any, **kwargs: Any) -> Any:
        inside.set()
        assert over.wait(60)
        return build(self, *args, **kwargs)

    monkeypatch.setattr(Builder, "build", waits)
    first = threading.Thread(target=lambda: compiled(_x()[:4]).sum().backward())
    first.start()
    try:
        assert inside.wait(60)
        with pytest.raises(StaleActivationsError, match="another thread"):
            compiled(_x())
    finally:
        over.set()
        first.join()
    assert all(p.grad is not None for p in compiled.parameters())
    compiled.zero_grad()
    assert len(_gradients(compiled, _x())) == len(list(compiled.parameters()))


class Chooses(nn.Module):
    """Returns numbers in training and indices in evaluation; `breaks`: no graph holds a training call."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.breaks = nn.Linear(8, 8), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        if self.training and self.breaks and y.sum() > 1e9:
            return y * 2
        return y if self.training else y.argmax(-1)


def test_an_evaluation_of_other_sizes_runs_while_a_call_waits() -> None:
    model = Chooses()
    eager, compiled = copy.deepcopy(model), compile(model, torch.randn(8, 8))
    waiting, expected = compiled(torch.ones(8, 8)), eager(torch.ones(8, 8))
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(compiled.eval()(x), eager.eval()(x))
    for out, net in ((waiting, compiled), (expected, eager)):
        out.sum().backward()
        net.train()(x).square().sum().backward()
    assert same_gradients(model, eager)


def test_a_copy_that_one_graph_cannot_hold_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = copy.deepcopy(compile(Chooses(breaks=True).eval(), torch.randn(8, 8)))
    build, built = Builder.build, list[bool]()

    def counted(self: Builder, args: Any, kwargs: Any, train: bool, *rest: Any) -> Any:
        built.append(train)
        return build(self, args, kwargs, train, *rest)

    monkeypatch.setattr(Builder, "build", counted)
    with torch.no_grad():
        twin(torch.randn(8, 8))
    for _ in range(3):
        twin.train()(torch.randn(8, 8)).sum().backward()
    assert built.count(True) == 1


def test_a_copy_that_was_evaluated_trains_while_a_call_waits() -> None:
    twin = copy.deepcopy(compile(_net(), _x()))
    eager = copy.deepcopy(twin._original)
    outs = [(net.eval()(_x()), net.train()(_x())) for net in (twin, eager)]
    for one, two in outs:
        (one.sum() + two.sum()).backward()
    assert same_gradients(twin, eager)


@pytest.mark.parametrize("how", [copy.deepcopy, slow(lambda m: pickle.loads(pickle.dumps(m)))])
def test_a_copy_has_the_given_plan_and_what_calls_are_to_be_like(how: Any) -> None:
    model = _net()
    given = memplan.plan(model, _x(), schedule="traced", layout="tstack")
    twin = how(compile(model, _x(), plan=given, on_mismatch="error"))
    with pytest.raises(InputMismatch, match="made for"):
        twin(_x()[:1])
    twin(_x())
    assert twin.plan.solution.solver == given.solution.solver == "tstack"
