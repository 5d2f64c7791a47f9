"""Whole steps, graphs and copies with `kernels="inductor"`: the bits of `torch.compile`, in one arena."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from benchmarks.zoo import ZOO
from memplan.core.evictions import Action
from memplan.core.graph import Phase
from memplan.core.happens_before import follow, require_no_races
from memplan.core.plan import Plan
from memplan.errors import MemplanError, UnsupportedCall
from memplan.runtime import CompiledStep
from memplan.runtime.memory import arena
from memplan.trace import capture_call
from tests.models import Made
from tests.runtime.budgets import plan_of_everything
from tests.runtime.late_copies import LateCopies
from tests.runtime.reference import same_parameters
from tests.runtime.test_inductor_kernels import Block, _tokens
from tests.slow import slow
from tests.steps import Outcome, itself, outcome_of, same_outcomes

# torch's own compilation, which is the reference, imports modules of torch that warn
pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _loss(model: Any, x: torch.Tensor) -> Any:
    return model.layers(x).square().mean()


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def _dropping() -> tuple[nn.Module, tuple[Any, ...]]:
    """Dropout, and a buffer that the forward changes."""
    layers = (nn.Linear(16, 48), nn.BatchNorm1d(48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 4))
    return Made(_loss, layers=nn.Sequential(*layers)), (torch.linspace(-1, 1, 160).view(10, 16),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, an optimizer and the options of a step. `targets`: how the targets of planned updates begin."""

    model: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    optimizer: Make = _adamw
    options: dict[str, Any] = field(default_factory=dict)
    targets: str = "aten._fused_adamw_"


CASES = {
    "mlp": Case(model=lambda: ZOO["mlp"]("nano"), options={"sanitize": "poison"}),
    "gpt2 in the smallest budget": Case(model=lambda: ZOO["gpt2"]("nano"), options={"budget": "min"}),
    "dropout, momentum": Case(
        model=_dropping,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        options={"sanitize": "poison"},
        targets="aten._fused_sgd_",
    ),
    "dropout, own update": Case(
        model=_dropping,
        optimizer=lambda p: torch.optim.Adagrad(p, lr=0.1),
        options={"accumulate": 2, "clip_grad_norm": 0.05},
        targets="",
    ),
}


def _updates(call: Callable[..., Any], model: nn.Module, optimizer: Any, batch: Any, case: Case) -> list[torch.Tensor]:
    """The losses of four updates by torch's compiled forward and backward and the optimizer's own step."""
    count, norm = case.options.get("accumulate", 1), case.options.get("clip_grad_norm")
    losses = []
    for number in range(4 * count):
        torch.manual_seed(number)
        loss = call(*batch)
        (loss / count if count > 1 else loss).backward()
        losses.append(loss.detach())
        if number % count == count - 1:
            if norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _seeded(step: CompiledStep, batch: tuple[Any, ...], count: int) -> list[torch.Tensor]:
    losses = []
    for number in range(count):
        torch.manual_seed(number)
        losses.append(step(*batch))
    return losses


@pytest.mark.parametrize("name", [name if name == "dropout, momentum" else slow(name) for name in CASES])
def test_updates_are_bitwise_those_of_torch_compile_and_the_optimizer(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model, batch = case.model()
    twin = copy.deepcopy(model)
    ours, theirs = case.optimizer(model.parameters()), case.optimizer(twin.parameters())
    step = memplan.compile_step(model, ours, itself, batch, kernels="inductor", on_mismatch="error", **case.options)
    expected = _updates(torch.compile(twin, dynamic=False), twin, theirs, batch, case)
    losses = _seeded(step, batch, len(expected))
    assert all(torch.equal(one, two) for one, two in zip(losses, expected, strict=True))
    held = zip((*model.named_parameters(), *model.named_buffers()), (*twin.parameters(), *twin.buffers()), strict=True)
    assert [key for (key, one), two in held if not torch.equal(one, two)] == []
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is None
        for key, value in theirs.state[q].items():
            assert ours.state[p][key] is value or torch.equal(torch.as_tensor(ours.state[p][key]), value), key
    targets = [op.target for op in step.plan.graph.ops]
    assert any(target.startswith("inductor.cpp_fused_") for target in targets)
    assert any(target.startswith(case.targets) for target in targets)


def test_gradients_that_no_update_takes_are_not_computed() -> None:
    """Where the head alone is trained, the first layer has no backward, and the bits are torch.compile's."""
    torch.manual_seed(0)
    model, batch = _dropping()
    twin = copy.deepcopy(model)
    ours, theirs = (_adamw(one.get_submodule("layers.4").parameters()) for one in (model, twin))
    step = memplan.compile_step(model, ours, itself, batch, kernels="inductor", sanitize="poison")
    backward = [op for op in step.plan.graph.ops if op.phase is Phase.BACKWARD]
    assert not any(op.origin.module == "model.layers.0" for op in backward)
    expected = _updates(torch.compile(twin, dynamic=False), twin, theirs, batch, CASES["dropout, momentum"])
    assert all(torch.equal(*pair) for pair in zip(_seeded(step, batch, len(expected)), expected, strict=True))
    assert same_parameters(model, twin)


_REFUSED: tuple[dict[str, Any], ...] = (
    {"divide": True},
    {"compress": "int8"},
    {"device": ["cpu:0", "cpu:1"]},
    {"checkpoint": "plan"},
)


def test_what_a_step_of_generated_kernels_does_not_have_is_refused() -> None:
    model, batch = _dropping()
    for options in _REFUSED:
        with pytest.raises(UnsupportedCall) as refused:
            memplan.compile_step(model, _adamw(model.parameters()), itself, batch, kernels="inductor", **options)
        assert refused.value.see == "inductor-options"
    with pytest.raises(MemplanError, match="kernels='triton'"):
        memplan.compile_step(model, _adamw(model.parameters()), itself, batch, kernels="triton")  # type: ignore[arg-type]


class Breaking(nn.Module):
    """Two graphs with dropout, between which Python looks at a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 48), nn.Linear(48, 4), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.up(x).tanh())
        hidden = hidden * 2 if hidden.sum() > 1e9 else hidden * 3
        found: torch.Tensor = self.down(hidden).sigmoid()
        return found.square().mean()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Breaking()


def _batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 160).view(10, 16)


def _graph_steps(call: Callable[..., Any], model: nn.Module) -> list[Outcome]:
    return [outcome_of(model, call, _batch(), seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def expected() -> list[Outcome]:
    """Return what `torch.compile` computes for two batches."""
    torch._dynamo.reset()
    model = _model()
    found = _graph_steps(torch.compile(model, dynamic=False), model)
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("options", [{"sanitize": "poison"}, slow({"budget": "min"})])
def test_graphs_have_the_bits_of_torch_compile_in_one_arena(options: Any, expected: list[Outcome]) -> None:
    model, backend = _model(), memplan.Backend(kernels="inductor", **options)
    compiled: Any = torch.compile(model, backend=backend)
    assert same_outcomes(_graph_steps(compiled, model), expected)
    one, two = (graph.instances[0].plan for graph in backend.graphs[:2])
    assert all(any(op.target.startswith("inductor.cpp_fused_") for op in p.graph.ops) for p in (one, two))
    backend.place()
    assert backend.arena_size <= sum(graph.instances[-1].plan.arena_size for graph in backend.graphs)


@pytest.mark.slow
def test_a_model_with_graph_breaks_compiles_to_several_graphs_of_generated_kernels(
    expected: list[Outcome], caplog: pytest.LogCaptureFixture
) -> None:
    model = _model()
    compiled = memplan.compile(model, _batch(), kernels="inductor")
    assert "is planned as several graphs" in caplog.text
    assert same_outcomes(_graph_steps(compiled, model), expected)
    assert any(op.target.startswith("inductor.cpp_fused_") for op in compiled.plan.graph.ops)


def test_what_graphs_of_generated_kernels_do_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedCall) as refused:
        memplan.Backend(kernels="inductor", checkpoint="plan")
    assert refused.value.see == "inductor-options"


def _stacked() -> Made:
    """Convolutions one after another, each with a batch norm, whose statistics the forward changes."""
    layers = [layer for _ in range(2) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    return Made(lambda m, x: m.layers(x).mean(), layers=nn.Sequential(*layers))


def _copied_steps(call: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[Outcome]:
    return [outcome_of(model, lambda x: call(x).square().sum(), x, seed=seed) for seed in range(2)]


def _offloads(plan: Plan) -> int:
    require_no_races(plan)
    found = sum(e.action is Action.OFFLOAD for e in plan.evictions)
    assert follow(plan).copies >= 2 * found > 0  # to the host, and back
    return found


@pytest.mark.parametrize("kind", [slow("attention"), "convolutions"])
def test_everything_goes_to_the_host_and_comes_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy runs at its wait, and what it overwrites is poisoned when it starts."""
    torch.manual_seed(0)
    model, x = (
        (Block(), _tokens()) if kind == "attention" else (_stacked(), torch.linspace(-1, 1, 512).view(2, 4, 8, 8))
    )
    twin = copy.deepcopy(model)
    traced = capture_call(model, x, kernels="inductor", copy_gradients=True).retrace()
    plan = plan_of_everything(traced)
    assert _offloads(plan) > 2
    monkeypatch.setattr(arena, "make_copies", lambda *_: LateCopies())
    compiled = memplan.compile(
        model, x, plan=plan, kernels="inductor", gradients="outside", sanitize="poison", on_mismatch="error"
    )
    free = memplan.plan(model, x, kernels="inductor", gradients="outside")
    assert compiled.plan.arena_size < free.arena_size
    reference = torch.compile(twin, options={"layout_optimization": False})
    assert same_outcomes(_copied_steps(compiled, model, x), _copied_steps(reference, twin, x))
