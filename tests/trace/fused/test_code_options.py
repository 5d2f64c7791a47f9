"""Inductor's code: when it is compiled, its layouts and partitions, and what planning makes of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import BudgetInfeasible, UnsupportedGraph
from memplan.trace import capture_call
from memplan.trace.fused import code_generation, step
from memplan.trace.fused.deferred import DeferredKernel
from memplan.trace.traced import GeneratedCall, TracedGraph
from tests.models import Made
from tests.slow import slow

# torch's own compilation, which is the reference, imports modules of torch that warn
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def _loops() -> Made:
    """Loops that have nothing to do with each other, which Inductor writes into one kernel."""
    return Made(lambda m, *given: tuple(x.sin() + i for i, x in enumerate(given)))


def _images() -> Any:
    """Convolutions whose weights need more than their images do."""
    one, two = nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(32, 8, 3, padding=1)
    return Made(lambda m, x: m.two(m.one(x).relu()).square().mean(), one=one, two=two)


class Wide(nn.Module):
    """Layers whose activations are cheap to compute again, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.drop(nn.functional.gelu(layer(x)).tanh())
        return x.square().mean()


class Layer(nn.Sequential):
    """A product and what is fused."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16), nn.GELU())


def _kernels(traced: TracedGraph) -> list[GeneratedCall]:
    return [k for k in traced.kernels if isinstance(k, GeneratedCall) and k.kernel.source]


def test_nothing_is_compiled_before_a_program_needs_it() -> None:
    traced = capture_call(_loops(), (torch.ones(4),), kernels="inductor", train=False).retrace()
    (call,) = _kernels(traced)
    later = call.kernel.later
    assert isinstance(later, DeferredKernel)
    assert later._result is None
    x, out = torch.ones(4), torch.zeros(4)
    call.kernel.ready()(x, out)
    assert call.kernel.ready() is call.kernel.ready()
    assert torch.equal(out, torch.ones(4).sin())


def test_a_kernel_that_the_compiler_refuses_is_an_error_in_words() -> None:
    with pytest.raises(UnsupportedGraph, match="CppCompileError") as refused:
        DeferredKernel(["float*"], "this is no C++").compiled()
    assert refused.value.see == "inductor-refuses"


@pytest.mark.parametrize("layout", [slow(torch.contiguous_format), torch.channels_last])
def test_convolutions_keep_the_layout_of_the_model(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model, x = _images().to(memory_format=layout), torch.randn(1, 8, 4, 4).to(memory_format=layout)
    twin = copy.deepcopy(model)
    compiled = memplan.compile(model, x, kernels="inductor")
    torch._dynamo.reset()
    reference = torch.compile(twin, options={"layout_optimization": False})
    pairs: tuple[Any, ...] = ((compiled, model), (reference, twin))
    for call, module in pairs:
        call(x).backward()
        assert module.one.weight.grad is not None
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    torch._dynamo.reset()


def test_a_partition_that_would_draw_twice_is_refused() -> None:
    from torch._functorch import config

    captured = capture_call(Wide(), torch.randn(8, 16), kernels="inductor")
    with (
        config.patch(activation_memory_budget=0.0),
        pytest.raises(UnsupportedGraph, match="draws inductor_seeds_default twice"),
    ):
        captured.retrace()


@pytest.mark.parametrize("model", [Wide(), nn.Sequential(*(Layer() for _ in range(3)))])
@pytest.mark.parametrize("budget", [{}, {"budget": 0.95}, {"arena_budget": 0.8}, {"budget": "min"}])
def test_code_is_generated_once(model: nn.Module, budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, own = list[int](), code_generation.generate

    def counted(*args: Any, **options: Any) -> Any:
        made.append(options["returned"])
        return own(*args, **options)

    monkeypatch.setattr(step, "generate", counted)
    memplan.plan(model, torch.randn(512, 16), kernels="inductor", **budget)
    assert len(made) == 1


def test_a_budget_that_no_variant_keeps_names_the_smallest() -> None:
    with pytest.raises(BudgetInfeasible) as refused:
        memplan.plan(Wide(), torch.randn(64, 16), kernels="inductor", budget=1 << 10)
    assert refused.value.smallest > 1 << 10
