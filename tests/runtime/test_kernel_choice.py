"""`kernels="auto"`: both kinds of kernels run on the example, and the better one is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from benchmarks.peak_measure import live_bytes
from memplan.errors import BudgetInfeasible, UnsupportedCall, UnsupportedGraph
from memplan.runtime.api import kernel_choice
from memplan.runtime.api.kernel_choice import TriedKernels, choose
from memplan.runtime.execute import step_time
from memplan.runtime.execute.runner import Runner
from memplan.runtime.execute.step_time import step_seconds
from memplan.runtime.options import CompileOptions


def _tried(kernels: Any, seconds: float, total: int) -> TriedKernels:
    return TriedKernels(kernels=kernels, seconds=seconds, total=total)


@pytest.mark.parametrize(
    ("fused", "prefer", "within_budget", "kept"),
    [
        ((0.9, 90), "time", False, "inductor"),
        ((0.9, 101), "time", False, "aten"),  # faster, but at a higher peak
        ((0.9, 101), "time", True, "inductor"),  # both keep the budget
        ((0.995, 101), "time", True, "aten"),  # as fast, and needs more
        ((1.005, 99), "time", False, "inductor"),  # as fast, and needs less
        ((0.9900, 100.5), "time", True, "inductor"),  # eager's take 1.0101 of this: more than 1 % longer
        ((1.011, 50), "time", False, "aten"),
        ((1.1, 50), "time", False, "aten"),
        ((1.1, 50), "memory", False, "inductor"),
        ((0.5, 101), "memory", True, "aten"),
        ((0.5, 100), "memory", False, "inductor"),
    ],
)
def test_the_better_kernels_are_kept(fused: Any, prefer: Any, within_budget: bool, kept: str) -> None:
    aten, inductor = _tried("aten", 1.0, 100), _tried("inductor", *fused)
    assert choose(aten, inductor, prefer=prefer, within_budget=within_budget).kernels == kept


def test_how_close_times_are_alike_is_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    aten, inductor = _tried("aten", 1.0, 100), _tried("inductor", 0.995, 101)
    assert choose(aten, inductor, prefer="time", within_budget=True) is aten
    monkeypatch.setattr(kernel_choice, "_ALIKE", 0.001)
    assert choose(aten, inductor, prefer="time", within_budget=True) is inductor


class Counting(nn.Module):
    """A model whose step changes buffers and its input, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        out: torch.Tensor = self.layers(x)
        return out


def _example() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, 32).view(8, 4), torch.zeros(2)


def test_measuring_steps_leaves_all_tensors_and_random_numbers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = Counting(), _example()
    compiled = memplan.compile(model, inputs)
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    runs: list[int] = []
    step = step_time._step

    def counted(*given: Any) -> None:
        runs.append(1)
        step(*given)

    monkeypatch.setattr(step_time, "_step", counted)
    assert step_seconds(compiled._calls.selector.main, inputs) > 0
    assert len(runs) > step_time._LEAST_STEPS + 1
    monkeypatch.setattr(step_time, "_SECONDS", 0)
    monkeypatch.setattr(step_time, "_LEAST_STEPS", 2)
    runs.clear()
    step_seconds(compiled._calls.selector.main, inputs)
    assert len(runs) == 3
    monkeypatch.setattr(step_time, "_SECONDS", 60)
    monkeypatch.setattr(step_time, "_MOST_STEPS", 4)
    step_seconds(compiled._calls.selector.main, inputs)
    assert len(runs) == 3 + 5
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(inputs[1], torch.zeros(2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    compiled(*inputs).sum().backward()
    assert [int(b) for name, b in model.named_buffers() if name.endswith("tracked")] == [1]


@pytest.mark.parametrize(("seconds", "kept"), [((1.0, 2.0), "inductor"), ((2.0, 1.0), "aten")])
def test_the_report_says_which_kernels_were_chosen_and_why(
    seconds: Any, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.linspace(-1, 1, 32).view(8, 4)
    found = iter([*reversed(seconds), *(9.0, 9.0), *(9.0, 9.0)])  # of eager's kernels and Inductor's, in each turn
    monkeypatch.setattr(kernel_choice, "step_seconds", lambda *_: next(found))
    compiled = memplan.compile(model, x, kernels="auto")
    plan = compiled.plan
    assert any(op.target.startswith("inductor.") for op in plan.graph.ops) is (kept == "inductor")
    assert plan.kernels.startswith(f"{kept}: 1e+03 ms and ")
    assert f"kernels: {plan.kernels}" in str(plan.report())
    result = compiled(x[:4])  # of another shape: with the same kernels
    result.sum().backward()
    named = memplan.compile(copy.deepcopy(model), x[:4], kernels=kept)
    assert torch.equal(named(x[:4]), result)


def test_both_programs_run_in_turns_in_one_arena_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.linspace(-1, 1, 512).view(8, 64)
    turns: list[str] = []
    beside: list[int] = []  # bytes that are alive beside one arena

    def timed(runner: Runner, example: Any) -> float:
        turns.append("inductor" if any(op.target.startswith("inductor.") for op in runner.plan.graph.ops) else "aten")
        beside.append(live_bytes() - before - runner.arena.nbytes)
        return step_seconds(runner, example)

    before = live_bytes()
    monkeypatch.setattr(kernel_choice, "step_seconds", timed)
    memplan.compile(model, x, kernels="auto")
    assert turns == ["aten", "inductor"] * kernel_choice._TURNS
    assert max(beside) < 1024


def test_eagers_kernels_are_kept_where_inductors_cannot_be_had() -> None:
    x = torch.linspace(-1, 1, 32).view(8, 4)
    compiled = memplan.compile(nn.Linear(4, 4), x, kernels="auto", divide=2)
    assert compiled.plan.kernels.startswith("aten: inductor's cannot be had: divide: Inductor's kernels hold no tensor")


def test_inductors_kernels_are_kept_where_eagers_keep_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*_: Any, options: CompileOptions, **__: Any) -> None:
        if options.kernels == "aten":
            raise BudgetInfeasible("none", op="", smallest=1)

    monkeypatch.setattr(kernel_choice, "_built", built)
    options = CompileOptions(kernels="auto", budget="1GiB")
    chosen = kernel_choice.with_chosen_kernels(nn.Linear(1, 1), (), {}, options=options, train=True, given=None)
    assert (chosen.kernels, chosen.why_kernels) == ("inductor", "inductor: no plan with eager's keeps the budget")


@pytest.mark.parametrize(("failing", "kept"), [("aten", "inductor"), ("inductor", "aten")])
def test_where_one_kind_cannot_run_the_other_is_kept(failing: str, kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(runner: Runner, example: Any) -> float:
        if any(op.target.startswith("inductor.") for op in runner.plan.graph.ops) is (failing == "inductor"):
            raise torch.OutOfMemoryError("too much")
        return step_seconds(runner, example)

    monkeypatch.setattr(kernel_choice, "step_seconds", timed)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.linspace(-1, 1, 32).view(8, 4)
    compiled = memplan.compile(model, x, kernels="auto")
    assert compiled.plan.kernels.startswith(f"{kept}: ")
    assert compiled.plan.kernels.endswith("cannot run: too much")
    compiled(x).sum().backward()


def test_where_no_kind_can_run_the_error_is_that_of_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> float:
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(kernel_choice, "step_seconds", fail)
    with pytest.raises(torch.OutOfMemoryError, match="too much"):
        memplan.compile(nn.Linear(4, 4), torch.zeros(2, 4), kernels="auto")


def test_inductors_kernels_are_kept_where_eagers_cannot_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*_: Any, options: CompileOptions, **__: Any) -> None:
        if options.kernels == "aten":
            raise UnsupportedGraph("op", "no", "none")

    monkeypatch.setattr(kernel_choice, "_built", built)
    options = CompileOptions(kernels="auto")
    chosen = kernel_choice.with_chosen_kernels(nn.Linear(1, 1), (), {}, options=options, train=True, given=None)
    assert chosen.kernels == "inductor"
    assert chosen.why_kernels.startswith("inductor: eager's cannot be had: ")


def test_a_choice_is_refused_where_nothing_can_be_tried() -> None:
    model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    with pytest.raises(UnsupportedCall, match="nothing is run here"):
        memplan.plan(model, x, kernels="auto")
    with pytest.raises(UnsupportedCall, match="kernels='auto'"):
        memplan.Backend(kernels="auto")
    with pytest.raises(UnsupportedCall, match="kernels='auto'"):
        memplan.compile_step(model, torch.optim.SGD(model.parameters()), lambda out: out, x, kernels="auto")
    with pytest.raises(UnsupportedCall, match="there is no choice of kernels"):
        memplan.compile(model, x, prefer="memory")
    with pytest.raises(UnsupportedCall, match="plan: cannot be combined with kernels='auto'"):
        memplan.compile(model, x, kernels="auto", plan=memplan.plan(model, x))
    with pytest.raises(UnsupportedCall, match="costs='measure': cannot be combined"):
        memplan.compile(model, x, kernels="auto", costs="measure", arena_budget=0.9)
