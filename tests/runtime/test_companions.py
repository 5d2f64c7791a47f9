"""Compiled modules in the hands of other code, which wraps, copies, compiles, inspects and hooks them."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

import memplan
from memplan.errors import InputMismatch, MemplanError
from memplan.runtime.api.shared_module import shown_as


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
    model.zero_grad()
    eager.zero_grad()
    result, expected = called(*args), eager(*args)
    result.sum().backward()
    expected.sum().backward()
    assert torch.equal(result, expected)
    pairs = list(zip(model.parameters(), eager.parameters(), strict=True))
    assert all(p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)


# -- what libraries read -----------------------------------------------------------------------------------


def test_the_signature_and_the_class_name_are_the_originals() -> None:
    model, _ = _models()
    compiled = memplan.compile(model, (X, LABELS))
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    assert inspect.signature(compiled.__class__.forward).parameters.keys() == {"self", "x", "labels", "scale"}
    assert compiled.__class__.__name__ == "Scaled"
    assert isinstance(compiled, memplan.CompiledModule)
    assert not isinstance(compiled, Scaled)
    assert repr(compiled).startswith("CompiledModule(")


def test_a_model_without_a_signature_shows_that_of_the_compiled_module() -> None:
    model = nn.Linear(8, 4)
    model.forward = type  # type: ignore[assignment]
    assert shown_as(memplan.CompiledModule, model) is memplan.CompiledModule


def test_labels_and_columns_are_found_as_transformers_finds_them() -> None:
    generic = pytest.importorskip("transformers.utils.generic")
    model, _ = _models()
    compiled = memplan.compile(model, (X, LABELS))
    assert generic.find_labels(compiled.__class__) == ["labels"]
    assert not generic.can_return_loss(compiled.__class__)

    class MatchesPairs(Scaled):
        def forward(self, x: torch.Tensor, return_loss: bool = True) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)

    assert generic.can_return_loss(memplan.compile(MatchesPairs(), X).__class__)


@pytest.mark.parametrize("example", [((X, LABELS), {}), ((X,), {"labels": LABELS}), ((), {"labels": LABELS, "x": X})])
def test_arguments_by_position_and_by_keyword_are_the_same_call(example: Any) -> None:
    model, eager = _models()
    compiled = memplan.compile(model, *example)
    for args, kwargs in (((X, LABELS), {}), ((X,), {"labels": LABELS}), ((), {"x": X, "labels": LABELS, "scale": 2.0})):
        assert torch.equal(compiled(*args, **kwargs), eager(*args, **kwargs))


# -- copies and wrappers -----------------------------------------------------------------------------------


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


def test_a_copy_has_parameters_of_its_own_and_looks_alike() -> None:
    model, eager = _models()
    compiled = memplan.compile(model, X)
    other = copy.deepcopy(compiled)
    with torch.no_grad():
        model.get_parameter("first.weight").zero_()
    _require_same_step(other, other, eager, X)
    assert other.__class__.__name__ == "Scaled"


def test_data_parallel_inside_and_outside_runs_as_eager() -> None:
    model, eager = _models()
    _require_same_step(nn.DataParallel(memplan.compile(model, X)), model, eager, X)
    model, eager = _models()
    _require_same_step(memplan.compile(nn.DataParallel(model), X), model, eager, X)


# -- other compilers ---------------------------------------------------------------------------------------


def test_torch_compile_of_a_compiled_module_traces_the_original() -> None:
    model, eager = _models()
    compiled = torch.compile(memplan.compile(model, X), backend="aot_eager")
    _require_same_step(compiled, model, eager, X)
    assert "Planned" not in type(compiled(X).grad_fn).__name__


def test_nn_module_compile_of_a_compiled_module_traces_the_original() -> None:
    model, eager = _models()
    compiled = memplan.compile(model, X)
    compiled.compile(backend="aot_eager")
    _require_same_step(compiled, model, eager, X)


@pytest.mark.parametrize("how", ["in place", "torch.compile", "memplan.compile"])
def test_what_another_compiler_has_compiled_is_planned(how: str) -> None:
    model, eager = _models()
    given = model
    if how == "in place":
        model.compile(backend="aot_eager")
    elif how == "torch.compile":
        given = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    else:
        given = memplan.compile(model, X)
    compiled = memplan.compile(given, X)
    _require_same_step(compiled, model, eager, X)
    assert "Planned" in type(compiled(X).grad_fn).__name__


# -- hooks -------------------------------------------------------------------------------------------------


def test_hooks_on_the_compiled_module_itself_are_called() -> None:
    model, _ = _models()
    compiled = memplan.compile(model, X)
    seen: list[Any] = []
    handle = compiled.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    compiled(X)
    handle.remove()
    compiled(X)
    assert seen == [(4, 4)]


def test_hooks_that_compute_are_part_of_the_plan() -> None:
    model, eager = _models()
    for one in (model, eager):
        one.get_submodule("act").register_forward_hook(lambda module, args, out: out * 3)
    _require_same_step(memplan.compile(model, X), model, eager, X)


def test_a_summary_by_hooks_on_submodules_is_refused_in_words() -> None:
    model, eager = _models()
    compiled = memplan.compile(model, X, on_mismatch="error")
    rows: list[Any] = []
    handles = [m.register_forward_hook(lambda m, args, out: rows.append(out.shape)) for m in compiled.modules()]
    with pytest.raises(InputMismatch, match="module hooks were added or removed") as caught:
        compiled(X)
    assert "take the original model" in (caught.value.hint or "")
    for handle in handles:
        handle.remove()
    _require_same_step(compiled, model, eager, X)
    assert rows == []


def _append(rows: list[torch.Tensor], _: nn.Module, __: Any, out: torch.Tensor) -> None:
    rows.append(out.detach().clone())


def test_hooks_that_keep_what_they_see_run_between_graphs() -> None:
    """One graph cannot hold such a model; several can, and the hooks see what eager's see."""
    model, eager = _models()
    seen: dict[str, list[torch.Tensor]] = {"ours": [], "eagers": []}
    for one, rows in ((model, seen["ours"]), (eager, seen["eagers"])):
        one.get_submodule("act").register_forward_hook(
            lambda m, args, out, rows=rows: rows.append(out.detach().clone())
        )
    with pytest.raises(MemplanError, match="would leave unchanged"):
        memplan.compile(model, X, fullgraph=True)
    compiled = memplan.compile(model, X)
    assert seen["ours"] == []
    _require_same_step(compiled, model, eager, X)
    assert len(seen["ours"]) == len(seen["eagers"]) > 0
    assert all(map(torch.equal, seen["ours"], seen["eagers"]))


def test_hooks_on_all_modules_are_called_for_the_whole_and_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = _models()
    compiled = memplan.compile(model, X)
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    with caplog.at_level(logging.WARNING, logger="memplan"):
        compiled(X)
        compiled(X)
    handle.remove()
    assert seen == ["Scaled", "Scaled"]
    assert [r.message for r in caplog.records if "hooks on all modules" in r.message] == [caplog.records[-1].message]


def test_a_counter_of_operations_counts_a_planned_step() -> None:
    model, eager = _models()
    counts = []
    for called in (memplan.compile(model, X), eager):
        with FlopCounterMode(display=False) as counter:
            called(X).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# -- outputs that are still bound --------------------------------------------------------------------------


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
