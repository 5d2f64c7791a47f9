"""Tests of gradients of divided loss heads that the forward computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.functional import cross_entropy

import memplan
from memplan.core.division import Division
from memplan.trace import capture_call
from memplan.trace.fused.early_gradients import EARLY
from memplan.trace.fused.row_division import divide_rows
from memplan.trace.fused.row_parts import BLOCK
from memplan.trace.passes.rewrite import aten, copy_of
from tests.models import Made
from tests.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BLOCKS = Division(blocks=4, sums=True)
DATA = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 64
Loss = Callable[[Any, torch.Tensor, torch.Tensor], Any]


class _PassedOn(torch.autograd.Function):
    """Passes its input on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class _Clamped(_PassedOn):
    """Passes the gradient on within bounds: no multiple of the gradient that comes in."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].clamp(-0.002, 0.002)


class _Rounded(_PassedOn):
    """Passes the gradient on in thousandths."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return (gradients[0] * 1000).to(torch.int32).to(gradients[0].dtype) / 1000


def _plain(model: Any, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model.head(x), classes, label_smoothing=0.1)


def _scaled(model: Any, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model.head(x) * model.scale, classes)


def _clamped(model: Any, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return cross_entropy(_Clamped.apply(model.head(x)), classes)  # type: ignore[no-untyped-call]


def _rounded(model: Any, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    logits = _Rounded.apply(model.head(x))  # type: ignore[no-untyped-call]
    return cross_entropy(logits, classes, reduction="sum")


def _squared(model: Any, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(model.head(x), classes)
    return loss * loss


def _two_heads(model: Any, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model.head(x), classes) + 0.5 * cross_entropy(model.other(x), classes)


def _also_below(model: Any, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model.head(x), classes) + x.square().mean()


def _two_losses(model: Any, x: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model.head(x)
    return cross_entropy(logits, classes), logits.logsumexp(1).square().mean()


def _by_rows(model: Any, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model.head(x), classes, reduction="none")


def _made(loss: Loss) -> Made:
    """A classifier with a wide head, and any loss."""
    torch.manual_seed(0)
    parts = {"below": nn.Linear(8, 8), "head": nn.Linear(8, 64), "other": nn.Linear(8, 64, bias=False)}
    scale = nn.Parameter(torch.tensor(0.7))
    return Made(lambda m, x, classes: loss(m, m.below(x).tanh(), classes), **parts, scale=scale)


def _joint(loss: Loss, dtype: torch.dtype = torch.float32) -> fx.Graph:
    model, (x, classes) = _made(loss).to(dtype), DATA
    return copy_of(capture_call(model, (x.to(dtype), classes), kernels="inductor").captured.graph_module.graph)


def _late(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on a gradient that comes in."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        given = node.op == "placeholder" and node.meta["desc"].is_tangent()
        if given or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


@pytest.mark.parametrize("loss", [_plain, _scaled, _squared, _two_heads, _also_below])
def test_the_backward_only_scales_what_the_forward_has_computed(loss: Loss) -> None:
    graph = _joint(loss)
    divide_rows(graph, BLOCKS)
    late = _late(graph)
    early = [node for node in graph.nodes if EARLY in node.meta]
    assert len(early) >= 2, "the gradients of what the head reads, and of its weights"
    assert not any(BLOCK in node.meta for node in late), "no block is computed for the backward"
    for node in early:
        assert node not in late
        assert [user.target for user in node.users if user in late] == [aten.mul.Tensor]


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        *((loss, torch.float32) for loss in (_clamped, _rounded, _two_losses, _by_rows)),
        (_plain, torch.float16),
    ],
)
def test_other_heads_wait_for_the_backward(loss: Loss, dtype: torch.dtype) -> None:
    graph = _joint(loss, dtype)
    divide_rows(graph, BLOCKS)
    assert any(BLOCK in node.meta for node in graph.nodes)
    assert not any(EARLY in node.meta for node in graph.nodes)


def _gradients(call: Any, model: nn.Module, factor: float, retain: bool = False) -> list[torch.Tensor]:
    model.zero_grad()
    found = call(*DATA)
    total = sum(found, start=torch.zeros(())) if isinstance(found, tuple) else found.sum()
    (total * factor).backward(retain_graph=retain)
    return [total.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "loss",
    [
        _scaled,
        *map(slow, (_two_heads, _plain, _rounded, _clamped, _squared, _also_below)),
        *map(slow, (_two_losses, _by_rows)),
    ],
)
def test_gradients_are_those_of_eager(loss: Loss) -> None:
    model = _made(loss)
    twin = copy.deepcopy(model)
    compiled = memplan.compile(model, DATA, kernels="inductor", divide=BLOCKS, sanitize="poison")
    for factor in (1.0, 100.0, -1 / 3):
        found, expected = _gradients(compiled, model, factor), _gradients(twin, twin, factor)
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
