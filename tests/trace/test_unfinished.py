"""Ops whose results arrive later are refused wherever a graph is planned, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import memplan
from memplan.errors import UnsupportedGraph
from tests.models import Made

collectives: Any = import_module("torch.distributed._functional_collectives")  # whose annotations say less


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # which has no threads
    yield
    dist.destroy_process_group()


def _talks(talk: Callable[[torch.Tensor], Any]) -> Made:
    return Made(lambda m, x: talk(x * m.weight) * m.weight, weight=nn.Parameter(torch.randn(4, 4)))


def _summed(y: torch.Tensor) -> Any:
    return collectives.all_reduce(y, "sum", dist.group.WORLD)


def _gathered(y: torch.Tensor) -> Any:
    return collectives.all_gather_tensor_autograd(y, 0, dist.group.WORLD)


def _scattered(y: torch.Tensor) -> Any:
    return collectives.reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD)


def _in_place(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    dist.all_reduce(y)
    return y


def _plan(net: nn.Module, x: torch.Tensor) -> Any:
    return memplan.plan(net, (x,))


def _compile(net: nn.Module, x: torch.Tensor) -> Any:
    return memplan.compile(net, (x,), fullgraph=True)


def _compile_step(net: nn.Module, x: torch.Tensor) -> Any:
    return memplan.compile_step(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.sum, (x,))


@pytest.mark.parametrize("run", [_plan, _compile, _compile_step])
@pytest.mark.parametrize("talk", [_summed, _gathered, _scattered, _in_place])
def test_collectives_are_refused(talk: Any, run: Any) -> None:
    torch._dynamo.reset()
    with pytest.raises(UnsupportedGraph, match=r"a collective .*arrives later") as caught:
        run(_talks(talk), torch.randn(4, 4))
    assert "torch.compiler.disable" in str(caught.value)


@pytest.mark.parametrize("talk", [_summed, _gathered, _scattered, _in_place])
def test_behind_torch_compile_collectives_run_as_eager(talk: Any) -> None:
    torch._dynamo.reset()
    net, x = _talks(talk), torch.randn(4, 4)
    expected = torch.compile(net, backend="aot_eager")(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(net, backend=memplan.Backend())(x), expected)


def test_a_wrapped_part_of_a_model_is_refused_with_the_way_round_that_works() -> None:
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(UnsupportedGraph, match="compile the module first, then wrap"):
        memplan.compile(nn.Sequential(nn.parallel.DistributedDataParallel(net)), (x,))
