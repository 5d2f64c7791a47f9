"""What a graph of tensors cannot hold is refused before anything is allocated: Python state, random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from memplan.errors import UnsupportedGraph
from memplan.runtime import compile as memplan_compile
from memplan.runtime import compile_step
from memplan.trace import plan
from memplan.trace.dynamic.symbolic import trace_symbolic
from tests.models import Made

COUNTS = {"calls": 0}
CALLS = 0


def _applies(function: Callable[..., Any], inner: nn.Module | None = None) -> Any:
    """`function(self, linear(x), *rest)`."""
    linear = nn.Linear(4, 4) if inner is None else inner
    return Made(lambda m, x, *rest: function(m, m.linear(x), *rest), linear=linear, calls=0, log=[])


def _global(model: Any, y: torch.Tensor) -> torch.Tensor:
    global CALLS  # noqa: PLW0603
    CALLS += 1
    return y * CALLS


def _entry(model: Any, y: torch.Tensor) -> torch.Tensor:
    COUNTS["calls"] += 1
    return y * COUNTS["calls"]


def _enclosed() -> Callable[..., torch.Tensor]:
    calls = 0

    def function(model: Any, y: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return y * calls

    return function


@pytest.mark.parametrize("function", [_global, _entry, _enclosed()])
def test_python_state_that_forward_changes_is_refused_wherever_it_is(function: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedGraph, match="changes Python state"):
        plan(_applies(function), torch.ones(2, 4))


def _by_python(model: Any, y: torch.Tensor) -> torch.Tensor:
    return y * random.random()


def _by_integers(model: Any, y: torch.Tensor) -> torch.Tensor:
    return y * random.randint(1, 5)


def _by_numpy(model: Any, y: torch.Tensor) -> torch.Tensor:
    return y * float(np.random.rand())


def _seeded(model: Any, y: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return F.dropout(y)


def _forked(model: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        noise = torch.rand(4)
    return F.dropout(y) * noise


def _of_a_generator(model: Any, y: torch.Tensor) -> torch.Tensor:
    return y * torch.rand(4, generator=torch.Generator())


@pytest.mark.parametrize("function", [_by_python, _by_integers, _by_numpy, _seeded, _forked, _of_a_generator])
def test_random_numbers_that_no_kernel_draws_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedGraph):
        plan(_applies(function), torch.ones(2, 4))


def _itself(model: Any, y: torch.Tensor) -> torch.Tensor:
    return y


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("trace", [False, True])
def test_scripts_are_refused_and_named(trace: bool) -> None:
    x = torch.ones(2, 4)
    inner = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    script: Any = torch.jit.trace(inner, x) if trace else torch.jit.script(inner)  # type: ignore[no-untyped-call]
    for model in (script, nn.Sequential(script), _applies(_itself, nn.Sequential(nn.Linear(4, 4), script))):
        for ask in (plan, partial(memplan_compile, fullgraph=True)):
            with pytest.raises(UnsupportedGraph, match="ScriptModule") as caught:
                ask(model, x)
            assert "torch.jit.script" in str(caught.value.hint)
        with pytest.raises(UnsupportedGraph, match="ScriptModule"):
            trace_symbolic(model, (x,), {}, dynamic_shapes={"x": {0: torch.export.Dim("n")}}, train=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UnsupportedGraph, match="ScriptModule"):
            compile_step(model, optimizer, torch.sum, x)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_are_compiled_after_their_first_call() -> None:
    first = nn.LazyLinear(3)
    model, x = nn.Sequential(first, nn.LazyBatchNorm1d()), torch.randn(4, 5)
    with pytest.raises(UnsupportedGraph, match="shapes are not known") as caught:
        memplan_compile(model, x, fullgraph=True)
    assert "call the model once" in str(caught.value.hint)
    assert nn.parameter.is_lazy(first.weight)
    model(x)
    assert torch.equal(memplan_compile(model, x)(x), model(x))


def test_what_dynamo_skips_is_refused_as_one_graph() -> None:
    torch.manual_seed(0)
    fake_quantize = torch.ao.quantization.FusedMovingAvgObsFakeQuantize(
        observer=torch.ao.quantization.MovingAveragePerChannelMinMaxObserver,
        qscheme=torch.per_channel_symmetric,
        dtype=torch.qint8,
        quant_min=-128,
        quant_max=127,
    )
    model, x = nn.Sequential(nn.Linear(4, 4), fake_quantize), torch.randn(4, 4)
    with pytest.raises(UnsupportedGraph, match="cannot be traced as one graph"):
        memplan_compile(model, x, fullgraph=True)
    model(x)
    assert torch.equal(memplan_compile(model, x)(x), model(x))
