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

from memplan.errors import InputMismatch, StaleActivationsError, UnsupportedCall
from memplan.runtime import CompiledModule, compile, compile_step
from memplan.runtime.api.builder import Builder
from tests.slow import slow


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


@pytest.mark.parametrize("how", COPIES)
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
    ours = _gradients(compiled, _x(1), scale=2.0)
    assert all(torch.equal(a, b) for a, b in zip(ours, _gradients(twin, _x(1), scale=2.0), strict=True))
    assert twin.plan.fingerprint == compiled.plan.fingerprint
    torch.optim.SGD(compiled.parameters(), lr=0.1).step()
    assert all(torch.equal(a, b) for a, b in zip(before, twin.parameters(), strict=True))
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


def test_copies_of_a_model_and_its_optimizer_get_a_step_of_their_own() -> None:
    net = _net()
    adamw = torch.optim.AdamW(net.parameters(), fused=True)
    step = compile_step(net, adamw, lambda out: out.square().sum(), _x(), on_mismatch="error")
    step(_x(1))
    twin, other = copy.deepcopy((net, adamw))
    of_twin = compile_step(twin, other, lambda out: out.square().sum(), _x())
    for seed in range(2):
        assert torch.equal(step(_x(seed)), of_twin(_x(seed)))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert p is not q
        assert torch.equal(p, q)
        assert float(other.state[q]["step"]) == 3
    net.to(torch.float64)
    with pytest.raises(InputMismatch, match="float64"):
        step(_x(1))


def test_compiled_parts_of_a_model_that_is_not() -> None:
    """One compiled layer between plain ones, and two compiled layers in a row, whose activations live together."""
    eager = nn.Sequential(nn.Linear(8, 8), _net(), nn.Linear(4, 8), _net())
    parts = copy.deepcopy(eager)
    parts[1], parts[3] = (compile(parts[i], _x().requires_grad_(), sanitize="poison") for i in (1, 3))
    for seed in range(3):
        assert all(
            torch.allclose(a, b, rtol=1e-5, atol=1e-6)
            for a, b in zip(_gradients(parts, _x(seed)), _gradients(eager, _x(seed)), strict=True)
        )
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
        ours, theirs = _gradients(outer, _x(seed)), _gradients(eager, _x(seed))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_moving_to_another_type_raises_and_moving_back_works() -> None:
    compiled = compile(_net(), _x(), on_mismatch="error")
    before = _gradients(compiled, _x(1))
    compiled.to(torch.float64)
    with pytest.raises(InputMismatch, match="float64"):
        compiled(_x(1))
    compiled.to(torch.float32)
    compiled.to("cpu")
    assert all(torch.equal(a, b) for a, b in zip(before, _gradients(compiled, _x(1)), strict=True))
    compiled.to("meta")
    with pytest.raises(InputMismatch, match="meta"):
        compiled(_x(1))


def test_threads_with_a_module_each() -> None:
    compiled = [compile(_net(), _x()) for _ in range(2)]
    eager = _net()
    expected = {seed: _gradients(eager, _x(seed)) for seed in range(20)}
    outcomes: list[bool] = []

    def work(module: CompiledModule) -> None:
        for seed in range(20):
            ours = _gradients(module, _x(seed))
            outcomes.append(all(torch.equal(a, b) for a, b in zip(ours, expected[seed], strict=True)))

    threads = [threading.Thread(target=work, args=(module,)) for module in compiled]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 40


def test_threads_compile_at_the_same_time() -> None:
    """Torch notes in flags of the process that it traces; crossing threads would leave them up, for ever."""
    x, nets = _x(), [_net(), _net()]  # drawn here: the threads share torch's generator
    expected = _gradients(_net(), x)
    outcomes: list[bool] = []
    ready = threading.Barrier(2)

    def work() -> None:
        net = nets.pop()
        ready.wait()
        for _ in range(2):
            ours = _gradients(compile(net, x), x)
            outcomes.append(all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 4
    assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()


def test_a_step_is_planned_while_another_thread_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, compiled = _net(), compile(_net(), _x())
    other = _net()
    step = compile_step(other, torch.optim.SGD(other.parameters(), lr=0.1), lambda out: out.square().sum(), _x())
    for flag in ("_is_compiling_flag", "_is_exporting_flag"):  # as torch.export raises them, for all threads
        monkeypatch.setattr(torch.compiler, flag, True)
    steps = compiled._calls.arena.ownership.steps
    ours, theirs = _gradients(compiled, _x(1)), _gradients(eager, _x(1))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert compiled._calls.arena.ownership.steps == steps + 1
    assert torch.equal(step(_x(1)), _net()(_x(1)).square().sum())
    with pytest.raises(IndexError, match="out of range"):  # of eager's type
        _lookups()(torch.tensor([7]))


def _lookups() -> CompiledModule:
    """A compiled model whose example's indices are in range."""
    net = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    with pytest.MonkeyPatch.context() as flags:
        for flag in ("_is_compiling_flag", "_is_exporting_flag"):
            flags.setattr(torch.compiler, flag, False)
        return compile(net, torch.tensor([1]))


def test_a_copy_of_a_copy_that_only_evaluated_trains_by_the_plan_of_the_first() -> None:
    compiled = compile(_net(), _x(), budget="min")
    twin = copy.deepcopy(compiled).eval()
    with torch.no_grad():
        twin(_x())
    for again in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        again.train()
        assert len(_gradients(again, _x())) == len(list(again.parameters()))
        assert again.plan.fingerprint == compiled.plan.fingerprint


def _grown(twin: Any) -> None:
    twin._original.layers.append(nn.Linear(4, 2))


def _shorter(twin: Any) -> None:
    del twin._original.layers[2]


def _double(twin: Any) -> None:
    twin.double()


@pytest.mark.parametrize(
    ("change", "evaluates"),
    [(_grown, False), (_shorter, False), (_double, False), slow(_grown, True), (_shorter, True), slow(_double, True)],
)
def test_a_copy_whose_model_changed_before_its_first_use_is_compiled_for_the_call(
    change: Callable[[Any], None], evaluates: bool
) -> None:
    twin = copy.deepcopy(compile(_net(), _x(), sanitize="poison"))
    change(twin)
    original, x = copy.deepcopy(twin._original), _x().to(next(twin.parameters()).dtype)
    if evaluates:
        for module in (twin.eval(), original.eval()):
            with torch.no_grad():
                out = module(x)
        assert torch.equal(out, twin(x))
        twin.train(), original.train()
    assert all(torch.equal(a, b) for a, b in zip(_gradients(twin, x), _gradients(original, x), strict=True))
    assert twin.plan.graph.forward_ops < len(twin.plan.graph.ops)


def test_a_copy_that_one_graph_cannot_hold_runs_as_several(
    caplog: pytest.LogCaptureFixture,
) -> None:
    twin = copy.deepcopy(compile(_net(), _x()))
    twin.double()
    twin._original.forward = lambda x: twin._original.layers(x) * float(x.sum() > 1e9)  # no graph holds this
    for _ in range(2):
        assert not twin(_x().double()).any()
    assert sum("as several graphs" in record.message for record in caplog.records) == 1


def test_a_copy_with_a_given_plan_evaluates_with_frozen_parameters() -> None:
    compiled = compile(_net(), _x())
    twin = copy.deepcopy(compile(_net(), _x(), plan=compiled.plan))
    twin.requires_grad_(False)
    assert torch.equal(twin(_x()), copy.deepcopy(compiled)(_x()).detach())


@pytest.mark.parametrize("as_copy", [False, True])
def test_a_second_thread_is_refused_while_a_module_is_compiled_again(
    as_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile(_net(), _x())
    if as_copy:
        compiled = copy.deepcopy(compiled)
    inside, over = threading.Event(), threading.Event()
    build = Builder.build

    def slow(self: Builder, *args: Any, **kwargs: Any) -> Any:
        inside.set()
        assert over.wait(60)
        return build(self, *args, **kwargs)

    monkeypatch.setattr(Builder, "build", slow)
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
