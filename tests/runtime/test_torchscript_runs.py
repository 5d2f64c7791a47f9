"""Runs of ops that torch's own interpreter executes: the same bits, errors, memory and freedom as from Python."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import functional_export
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.zoo import ZOO
from memplan.errors import StaleActivationsError
from memplan.runtime import CompiledModule, compile_step
from memplan.runtime import compile as memplan_compile
from memplan.runtime.codegen import torchscript_runs
from memplan.runtime.codegen.torchscript_runs import AVAILABLE
from memplan.runtime.execute import program as programs
from tests.slow import slow
from tests.steps import Outcome, outcome_of, outcomes_of, same_outcomes

_interpreted = pytest.mark.skipif(not AVAILABLE, reason="this torch has no TorchScript graphs")


@contextmanager
def _by_python() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "AVAILABLE", False)
        yield


def _runs(compiled: CompiledModule) -> list[str]:
    return [name for name in compiled._calls.selector.main.program.namespace.names if name.startswith("s")]


@_interpreted
@pytest.mark.parametrize("name", ["gpt2", slow("mixtral"), slow("t5"), slow("resnet"), "lstm"])
def test_the_same_bits_as_from_python(name: str) -> None:
    model, inputs = ZOO[name]("nano")
    other = copy.deepcopy(model)
    compiled = memplan_compile(model, inputs)
    with _by_python():
        plain = memplan_compile(other, inputs)
    assert _runs(compiled)
    assert not _runs(plain)
    assert same_outcomes(
        outcomes_of(model, compiled, *inputs, steps=2, seed=1), outcomes_of(other, plain, *inputs, steps=2, seed=1)
    )


class Scaled(nn.Module):
    """Ops whose operands have no dimensions and other numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))
        self.rows = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, largest = (x * self.rows).mean(), x.amax()
        made: torch.Tensor = (self.rows * mean * largest + mean).sum() * self.weight / largest - largest * mean
        return made


@_interpreted
@pytest.mark.parametrize("constants", [True, False])
def test_what_changes_in_the_arena_is_read_anew(constants: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this torch would compute with a graph's constants ahead, and they are given in a list instead."""
    monkeypatch.setattr("memplan.runtime.codegen.torchscript_runs._constants_are_memory", lambda: constants)
    model, xs = Scaled(), [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    eager, compiled = copy.deepcopy(model), memplan_compile(model, xs[0])
    assert _runs(compiled)
    for x in xs:
        assert same_outcomes(
            outcomes_of(model, compiled, x, steps=2, seed=1), outcomes_of(eager, eager, x, steps=2, seed=1)
        )


@_interpreted
def test_this_torch_reads_and_writes_constants_when_it_runs() -> None:
    assert torchscript_runs._constants_are_memory()


class Tower(nn.Module):
    """Enough ops in a row, after rows by number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(self.embed(x)).square().mean()
        return made


def _tower() -> tuple[Tower, torch.Tensor]:
    torch.manual_seed(0)
    return Tower(), torch.tensor([1, 4, 2])


@_interpreted
def test_what_fails_for_its_numbers_fails_as_in_eager() -> None:
    model, x = _tower()
    compiled = memplan_compile(model, x)
    expected = model(x)
    with pytest.raises(IndexError, match="out of range"):
        compiled(torch.tensor([1, 5, 2]))
    assert torch.equal(compiled(x), expected)


BY_NUMBER: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index_select": lambda x, i: x.index_select(1, i),
    "index_add": lambda x, i: x.index_add(0, i, x[:3]),
    "index_add to numbers": lambda x, i: x[:, 0].sin().index_add(0, i, x[:3, 1]),
    "gather": lambda x, i: x.gather(0, i[:, None]),
    "scatter": lambda x, i: x.scatter(0, i[:, None], x[:3, :1]),
    "scatter_add": lambda x, i: x.scatter_add(1, i[None], x[:1, :3]),
    "index": lambda x, i: x[i],
    "index columns": lambda x, i: x[:, i],
    "index rows and columns": lambda x, i: x[i[:, None], i],
    "index_put": lambda x, i: x.index_put((i,), x[:3]),
    "index_put that adds": lambda x, i: x.index_put((i,), x[:3], accumulate=True),
    "index after gather": lambda x, i: x.gather(0, (i % 5)[:, None].expand(3, 5))[:, i],
    "gather after index": lambda x, i: x[i % 5].gather(1, i[:, None]),
    "cross_entropy": lambda x, i: nn.functional.cross_entropy(x[:3], i),
    "embedding": lambda x, i: nn.functional.embedding(i, x),
}


class ByNumber(nn.Module):
    """Something told by numbers between enough ops in a row."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.before, self.after = (nn.Sequential(*(nn.Sigmoid() for _ in range(4))) for _ in range(2))
        self.function = BY_NUMBER[name]

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.after(self.function(self.before(x), index)).sum()
        return made


@_interpreted
@pytest.mark.parametrize("number", [7, -9])
@pytest.mark.parametrize("name", BY_NUMBER)
def test_numbers_out_of_range_are_told_as_in_eager(name: str, number: int) -> None:
    model, x = ByNumber(name), torch.randn(5, 5, requires_grad=True)
    compiled = memplan_compile(model, (x, torch.tensor([1, 4, 2])))
    assert _runs(compiled)
    wrong = torch.tensor([1, number, 2])
    with pytest.raises((IndexError, RuntimeError)) as eager:
        model(x, wrong)
    with pytest.raises((IndexError, RuntimeError)) as ours:
        compiled(x, wrong)
    assert (type(ours.value), str(ours.value)) == (type(eager.value), str(eager.value))
    right = torch.tensor([0, 4, 3])
    (expected,) = torch.autograd.grad(model(x, right), x)
    assert torch.equal(torch.autograd.grad(compiled(x, right), x)[0], expected)


@_interpreted
def test_parameters_that_move_are_followed() -> None:
    model, x = _tower()
    eager = copy.deepcopy(model)
    compiled = memplan_compile(model, x)
    for round_ in range(3):
        for one, two in zip(model.parameters(), eager.parameters(), strict=True):
            moved = torch.randn(one.shape, generator=torch.Generator().manual_seed(round_))
            one.data, two.data = moved.clone(), moved.clone()
        assert same_outcomes(
            outcomes_of(model, compiled, x, steps=2, seed=1), outcomes_of(eager, eager, x, steps=2, seed=1)
        )
    assert _runs(compiled)


@_interpreted
def test_parameters_are_followed_only_while_no_other_thread_runs() -> None:
    model, x = _tower()
    eager = copy.deepcopy(model)
    compiled = memplan_compile(model, x)
    for one, two in zip(model.parameters(), eager.parameters(), strict=True):
        one.data = (one * 2).detach()
        two.data = (two * 2).detach()
    names = compiled._calls.selector.main.program.namespace.names
    before = {name: names[name] for name in names if name.startswith("v")}
    with compiled._calls.selector.main.arena.ownership, pytest.raises(StaleActivationsError, match="another thread"):
        compiled(x)  # as if another thread held it
    assert all(names[name] is tensor for name, tensor in before.items())
    assert torch.equal(compiled(x), eager(x))


@_interpreted
def test_the_executor_is_left_as_it_was() -> None:
    model, x = _tower()
    compiled = memplan_compile(model, x)
    for optimise in (True, False):
        torch._C._set_graph_executor_optimize(optimise)
        try:
            compiled(x).backward()
            assert torch._C._get_graph_executor_optimize() is optimise
            with pytest.raises(IndexError):
                compiled(torch.tensor([1, 5, 2]))
            assert torch._C._get_graph_executor_optimize() is optimise
        finally:
            torch._C._set_graph_executor_optimize(True)


@_interpreted
def test_a_dropped_module_takes_its_runs_and_their_tensors_along() -> None:
    model, x = _tower()
    compiled = memplan_compile(model, x)
    compiled(x).backward()
    arena = weakref.ref(compiled._calls.selector.main.arena)
    weight = weakref.ref(model.layers[0].weight)
    assert _runs(compiled)
    del model, compiled
    gc.collect()
    assert arena() is None
    assert weight() is None


@_interpreted
def test_several_threads_each_with_a_module_of_its_own() -> None:
    cases = [_tower() for _ in range(3)]
    compiled = [memplan_compile(model, x) for model, x in cases]
    alone = copy.deepcopy(cases[0][0])
    expected = outcome_of(alone, alone, cases[0][1])
    found: dict[int, Outcome] = {}

    def work(i: int) -> None:
        for _ in range(20):
            model, x = cases[i]
            found[i] = outcome_of(model, compiled[i], x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == set(range(len(cases)))
    assert all(outcome.same_as(expected) for outcome in found.values())
    assert len(expected.gradients) == len(list(cases[0][0].parameters()))


@_interpreted
def test_hyperparameters_are_read_at_every_step() -> None:
    model, x = _tower()
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, eager)]
    step = compile_step(model, optimizers[0], lambda out: out, x)
    for lr in (1e-2, 1e-3, 5e-1):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr
        step(x)
        optimizers[1].zero_grad()
        eager(x).backward()
        optimizers[1].step()
        for one, two in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(one, two)


@_interpreted
def test_kernels_written_in_python_stay_in_python() -> None:
    @torch.library.custom_op("memplan_native_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        if bool((x > 1e3).any()):
            raise KeyError("too large")
        return x * 2

    twice.register_fake(torch.empty_like)

    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = twice(x.sin().cos().sin())
            made: torch.Tensor = twice(x).sin().cos().sin().exp() + y
            return made

    model, x = Calls(), torch.randn(4)
    with torch.no_grad():
        compiled = memplan_compile(model, x, train=False)
        assert torch.equal(compiled(x), model(x))
        with pytest.raises(KeyError, match="too large"):
            compiled(torch.full((4,), 1e4))
        assert torch.equal(compiled(x), model(x))


@_interpreted
def test_ops_that_return_lists_of_tensors_stay_in_python() -> None:
    class Lists(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two, three = torch._foreach_mul([x.sin().cos().sin(), x.exp(), x.cos()], 2.0)
            rows: list[torch.Tensor] = torch.ops.aten.unbind_copy.int((one + two).sin() * three)
            made: torch.Tensor = torch.stack(rows).cos().sin().exp()
            return made

    model, x = Lists(), torch.randn(4, 3)
    with torch.no_grad():
        compiled = memplan_compile(model, x, train=False)
        assert _runs(compiled)
        assert torch.equal(compiled(x), model(x))


@_interpreted
def test_errors_of_kernels_keep_their_words() -> None:
    class Entropy(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = nn.functional.binary_cross_entropy(x.sin().cos().square(), y).sin().exp()
            return made

    model, x, y = Entropy(), torch.rand(4, requires_grad=True), torch.rand(4)
    compiled = memplan_compile(model, (x, y))
    assert _runs(compiled)
    found = []
    for call in (compiled, model):
        with pytest.raises(RuntimeError) as caught:
            call(x, y + 2)
        found.append((type(caught.value), str(caught.value)))
    assert found[0] == found[1]
    assert torch.equal(compiled(x, y), model(x, y))


class Raises(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts ops, and raises an error of its own at the first that is named so."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        if self.name is not None and self.name in str(func):
            raise KeyError("the mode's own")
        return func(*args, **(kwargs or {}))


@_interpreted
def test_modes_see_all_ops_and_raise_what_they_raise() -> None:
    model, x = _tower()
    eager = copy.deepcopy(model)
    compiled = memplan_compile(model, x)
    with _by_python():
        plain = memplan_compile(copy.deepcopy(model), x)
    expected = outcomes_of(eager, eager, x, steps=2, seed=1)
    seen = []
    for call, of in ((compiled, model), (plain, plain)):
        with Raises() as mode:
            found = outcomes_of(of, call, x, steps=2, seed=1)
        assert same_outcomes(found, expected)
        seen.append(mode.seen)
    assert seen[0] == seen[1]
    assert any("gelu_backward" in name for name in seen[0])
    model.zero_grad()
    with Raises("gelu"), pytest.raises(KeyError, match="the mode's own"):
        compiled(x)
    assert same_outcomes(outcomes_of(model, compiled, x, steps=2, seed=1), expected)


@_interpreted
def test_flops_are_eagers() -> None:
    model, inputs = ZOO["gpt2"]("nano")
    compiled = memplan_compile(model, inputs)
    counted = []
    for call in (compiled, model):
        with FlopCounterMode(display=False) as flops:
            call(*inputs).backward()
        counted.append(flops.get_total_flops())
    assert counted[0] == counted[1] > 0


@_interpreted
def test_torch_is_not_asked_where_no_run_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _tower()
    compiled = memplan_compile(model, x)
    expected = compiled(x).detach()
    asked: list[Any] = []
    monkeypatch.setattr(torchscript_runs, "_finds_overload", lambda line, layout: asked.append(line))
    with compiled.hooks.add(lambda event: None):  # hooks stand between all ops
        assert torch.equal(compiled(x).detach(), expected)
    assert not asked


def test_what_others_compile_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo puts what it compiles among a function's globals, whoever asks for it."""
    found: dict[str, Any] = nn.Sequential.forward.__globals__
    real = functional_export.dynamo_graph_capture_for_export
    before = set(found)

    def front(model: nn.Module) -> Any:
        def capture(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setitem(found, "__compiled_fn_of_another_thread", abs)
            return real(model)(*args, **kwargs)

        return capture

    monkeypatch.setattr(functional_export, "dynamo_graph_capture_for_export", front)
    memplan_compile(_tower()[0].layers, torch.randn(3, 8))
    assert {n for n in set(found) - before if n.startswith("__compiled_fn")} == {"__compiled_fn_of_another_thread"}
