"""Results that are no values: an op that returns its random state and a number, as fused attention on CUDA does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from memplan.core.choices import Sanitize
from memplan.runtime import compile
from tests.steps import gradients_of, loss_of, same_tensors


@pytest.fixture(scope="module", autouse=True)
def _ops() -> Iterator[None]:
    """`attend` draws a mask from a seed that it draws itself; its backward draws the same mask from that seed."""
    library: Any = getattr(torch.library, "Library")("memplan_test", "DEF")  # noqa: B009  (untyped)
    tags = (torch.Tag.nondeterministic_seeded,)
    library.define(
        "attend(Tensor x) -> (Tensor output, Tensor? none, int rows, Tensor philox_seed, Tensor mask)", tags=tags
    )
    library.define("attend_backward(Tensor grad, Tensor? none, int rows, Tensor philox_seed) -> Tensor")

    def mask(like: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(seed))
        return torch.rand(like.shape, generator=generator).gt(0.5).to(like.dtype) * 2

    def attend(x: torch.Tensor) -> Any:
        seed = torch.randint(1 << 30, ())
        return x * mask(x, seed), None, x.shape[0], seed, torch.empty(0)

    def attend_backward(grad: torch.Tensor, none: None, rows: int, seed: torch.Tensor) -> torch.Tensor:
        assert none is None
        assert rows == grad.shape[0]
        return grad * mask(grad, seed)

    library.impl("attend", attend, "CPU")
    library.impl("attend_backward", attend_backward, "CPU")

    def fake(x: torch.Tensor) -> Any:
        return torch.empty_like(x), None, x.shape[0], x.new_empty((), dtype=torch.int64), x.new_empty(0)

    torch.library.register_fake("memplan_test::attend", fake, lib=library)
    torch.library.register_fake(
        "memplan_test::attend_backward", lambda grad, none, rows, seed: torch.empty_like(grad), lib=library
    )

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rows = output[2]
        ctx.save_for_backward(output[3])

    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> torch.Tensor:
        found: torch.Tensor = torch.ops.memplan_test.attend_backward(grad, None, ctx.rows, *ctx.saved_tensors)
        return found

    torch.library.register_autograd("memplan_test::attend", backward, setup_context=keep, lib=library)
    yield
    library._destroy()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.ops.memplan_test.attend(self.one(x).tanh())[0]
        loss: torch.Tensor = self.two(x).square().mean()
        return loss


def _train(model: nn.Module, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The losses of three steps, and the sums of their gradients."""
    losses = [loss_of(call, x, seed=seed) for seed in range(3)]
    return [*losses, *gradients_of(model).values()]


@pytest.mark.parametrize("sanitize", [None, "poison"])
def test_the_backward_gets_the_forwards_own_state(sanitize: Sanitize | None) -> None:
    torch.manual_seed(0)
    model, x = Attends(), torch.randn(4, 8)
    eager = copy.deepcopy(model)
    compiled = compile(model, x, sanitize=sanitize)
    traced = compiled._calls.programs.main.traced
    assert traced.opaque_count == 2
    assert all("int64" not in v.dtype for v in traced.graph.values), "the states have no place in the arena"
    assert same_tensors(_train(model, compiled, x), _train(eager, eager, x))
