"""`torch.compile` with `memplan.Backend(kernels="inductor")`: the bits of Inductor, graph by graph, in one arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import UnsupportedCall
from tests.slow import slow
from tests.steps import Outcome, outcome_of, same_outcomes

# torch's own compilation, which is the reference, imports modules of torch that warn
pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


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


def _steps(call: Callable[..., Any], model: nn.Module) -> list[Outcome]:
    return [outcome_of(model, call, _batch(), seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def expected() -> list[Outcome]:
    """Return what `torch.compile` computes for two batches."""
    torch._dynamo.reset()
    model = _model()
    found = _steps(torch.compile(model, dynamic=False), model)
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("options", [{"sanitize": "poison"}, slow({"budget": "min"})])
def test_graphs_have_the_bits_of_torch_compile_in_one_arena(options: Any, expected: list[Outcome]) -> None:
    model, backend = _model(), memplan.Backend(kernels="inductor", **options)
    compiled: Any = torch.compile(model, backend=backend)
    assert same_outcomes(_steps(compiled, model), expected)
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
    assert same_outcomes(_steps(compiled, model), expected)
    assert any(op.target.startswith("inductor.cpp_fused_") for op in compiled.plan.graph.ops)


def test_what_graphs_of_generated_kernels_do_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedCall) as refused:
        memplan.Backend(kernels="inductor", checkpoint="plan")
    assert refused.value.see == "inductor-options"
