"""A compiled module among others and in the hands of other code: copied, nested, moved, wrapped, in several threads."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import memplan
from memplan.errors import InputMismatch, MemplanError, StaleActivationsError, UnsupportedCall
from memplan.runtime import CompiledModule, compile, compile_step
from memplan.runtime.api.module_builder import ModuleBuilder
from tests.slow import slow
from tests.steps import assert_same_step, same_tensors


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
    twin._orig_mod.layers.append(nn.Linear(4, 2))


def _double(twin: Any) -> None:
    twin.double()


@pytest.mark.parametrize(
    ("change", "evaluates"), [(_grown, False), slow(_double, False), slow(_grown, True), slow(_double, True)]
)
def test_a_copy_whose_model_changed_before_its_first_use_is_compiled_for_the_call(
    change: Callable[[Any], None], evaluates: bool
) -> None:
    twin = copy.deepcopy(compile(_net(), _x(), sanitize="poison"))
    change(twin)
    with pytest.raises(InputMismatch, match="at its first call"):
        twin.plan  # noqa: B018
    original, x = copy.deepcopy(twin._orig_mod), _x().to(next(twin.parameters()).dtype)
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
    build = ModuleBuilder.build

    def waits(self: ModuleBuilder, *args: Any, **kwargs: Any) -> Any:
        inside.set()
        assert over.wait(60)
        return build(self, *args, **kwargs)

    monkeypatch.setattr(ModuleBuilder, "build", waits)
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


@pytest.mark.parametrize("how", [copy.deepcopy, slow(lambda m: pickle.loads(pickle.dumps(m)))])
def test_a_copy_has_the_given_plan_and_what_calls_are_to_be_like(how: Any) -> None:
    model = _net()
    given = memplan.plan(model, _x(), schedule="traced", layout="tstack")
    twin = how(compile(model, _x(), plan=given, on_mismatch="error"))
    with pytest.raises(InputMismatch, match="made for"):
        twin(_x()[:1])
    twin(_x())
    assert twin.plan.solution.solver == given.solution.solver == "tstack"


class Scaled(nn.Module):
    """A model with a keyword, a default and a label."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, *, scale: float = 2.0) -> torch.Tensor:
        out: torch.Tensor = self.last(self.act(self.first(x))) * scale
        return out if labels is None else (out - labels).square().mean()


X = torch.linspace(-1, 1, 32).view(4, 8)
LABELS = torch.linspace(0, 1, 16).view(4, 4)


def _models() -> tuple[nn.Module, nn.Module]:
    """A model to compile, and its copy that stays as it is."""
    torch.manual_seed(0)
    model = Scaled()
    return model, copy.deepcopy(model)


def _require_same_step(called: Callable[..., Any], model: nn.Module, eager: nn.Module, *args: Any) -> None:
    """Fail unless `called` has the result and the gradients of `eager`."""
    names = assert_same_step(model, eager, called, *args)
    assert len(names) == len(list(model.parameters()))


def test_the_signature_and_the_class_name_are_the_originals() -> None:
    model, _ = _models()
    compiled = memplan.compile(model, (X, LABELS))
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    assert inspect.signature(compiled.__class__.forward).parameters.keys() == {"self", "x", "labels", "scale"}
    assert compiled.__class__.__name__ == "Scaled"
    assert isinstance(compiled, memplan.CompiledModule)
    assert not isinstance(compiled, Scaled)
    assert repr(compiled).startswith("CompiledModule(")


def test_an_average_of_weights_trains_and_runs_as_in_eager() -> None:
    results = []
    for compiles in (True, False):
        model, _ = _models()
        called = memplan.compile(model, (X, LABELS)) if compiles else model
        averaged = AveragedModel(called, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            called(X, LABELS).backward()
            optimizer.step()
            averaged.update_parameters(called)
        with torch.no_grad():
            results.append((averaged(X, LABELS), *averaged.state_dict().values()))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["in place", "torch.compile", "jit.trace", "memplan"])
def test_what_compiles_a_compiled_module_traces_the_original(how: str) -> None:
    model, eager = _models()
    compiled: Any = memplan.compile(model, X)
    if how == "in place":
        compiled.compile(backend="aot_eager")
    elif how == "torch.compile":
        compiled = torch.compile(compiled, backend="aot_eager")
    elif how == "memplan":
        again: Any = memplan.compile(torch.compile(compiled), X)  # type: ignore[arg-type]
        assert again.plan.fingerprint == compiled.plan.fingerprint
        assert memplan.plan(compiled, X).fingerprint == memplan.plan(model, X).fingerprint
        assert list(again.state_dict()) == list(model.state_dict())
        return
    else:
        jit: Any = torch.jit
        assert jit.script(memplan.compile(nn.Linear(8, 4), X))(X).shape == (4, 4)
        compiled = jit.trace(compiled, X)
    _require_same_step(compiled, model, eager, X)
    assert "Planned" not in type(compiled(X).grad_fn).__name__


def test_a_result_that_is_bound_does_not_hold_the_arena_after_its_backward() -> None:
    model, eager = _models()
    compiled = memplan.compile(model, X)
    kept = []
    fake = compiled(X)
    for _ in range(3):
        loss = fake.square().mean()
        model.zero_grad()
        loss.backward()
        kept.append((fake, loss))
        fake = compiled(X)  # while the old one, its graph and its loss are still bound
    expected = eager(X)
    assert all(torch.equal(result, expected) for result, _ in kept)


def test_a_result_is_let_go_when_its_backward_fails() -> None:
    model, eager = _models()
    compiled = memplan.compile(model, X)
    fake = compiled(X)
    with torch.no_grad():
        model.get_parameter("last.weight").mul_(1.0)
    with pytest.raises(MemplanError, match="changed in place"):
        fake.sum().backward()
    _require_same_step(compiled, model, eager, X)
