"""Small programs that a planner gets silently wrong, budgets too: each equals eager, or raises a typed error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from memplan.errors import InputMismatch
from memplan.planning.options import PlanOptions
from memplan.runtime import CompiledModule
from memplan.runtime import compile as memplan_compile
from memplan.trace import plan_traced, trace
from tests.models import Made
from tests.runtime.budgets import FAST_LINK, QUICK
from tests.slow import slow
from tests.steps import gradients_of, outcome_of


def _fn(function: Callable[..., Any]) -> Any:
    """`function(self, *inputs)` with a 4 x 4 parameter `w` and a buffer `n` of 4."""
    torch.manual_seed(0)
    return Made(function, w=nn.Parameter(torch.randn(4, 4)), n=torch.ones(4))


class EarlyGradient(torch.autograd.Function):
    """Its backward returns a tensor that its forward made."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w.sin())
        return w * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (sine,) = ctx.saved_tensors
        return sine


def _early(w: torch.Tensor) -> Any:
    return EarlyGradient.apply(w)  # type: ignore[no-untyped-call]


def _x(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape or (4, 4), generator=torch.Generator().manual_seed(seed))


def _let(h: torch.Tensor, body: Callable[[torch.Tensor], Any]) -> Any:
    return body(h)


ALIASES: dict[str, Callable[..., Any]] = {
    "a gradient made in the forward": lambda s, x: _early(s.w) + x,
    "detached": lambda s, x: _let(x * s.w, lambda h: (h, h.detach(), h.view(-1).detach(), s.w.detach()[0], x.detach())),
    "views and slices": lambda s, x: _let(x * s.w, lambda h: (h.sin(), h.view(-1), h[1], h.t(), h.expand(2, 4, 4), h)),
    "a parameter, an input and its views": lambda s, x: (s.w, x, x.view(-1), x.view(torch.int32), (x @ s.w).relu()),
    "in-place ops": lambda s, x: (x * s.w).add_(x).mul_(2).relu_(),
    "in-place on a view": lambda s, x: _let(x * s.w, lambda h: (h[0].mul_(3), h)[1]),
    "a scalar": lambda s, x: (x * s.w).sum(),
    "checkpointed": lambda s, x: torch.utils.checkpoint.checkpoint(lambda h: (h * s.w).sin(), x, use_reentrant=False),
}
OPS: dict[str, tuple[Callable[..., Any], ...]] = {
    "types": (
        lambda s, x: (x.half() * s.w.half()).float().sin(),
        lambda s, x: (x.bfloat16() @ s.w.bfloat16()).relu(),
        lambda s, x: (x.double() @ s.w.double()).softmax(-1),
        lambda s, x: torch.fft.fft(x * s.w).abs(),
        lambda s, x: torch.view_as_real(torch.fft.fft(x * s.w)),
        lambda s, x: x[:0] * s.w[:0],
        lambda s, x: F.embedding(torch.arange(40) % 4, s.w.bfloat16()).sin(),
    ),
    "random": (
        lambda s, x: torch.ops.aten.native_dropout(x * s.w, 0.3, None)[0],
        lambda s, x: x * s.w + torch.rand_like(x) + torch.randn(4),
        lambda s, x: F.dropout(x * s.w, 1.0),
    ),
    "normalisation": (
        lambda s, x: F.batch_norm(x * s.w, None, None, training=True),
        lambda s, x: F.batch_norm(x * s.w, s.n, s.n + 1),
        lambda s, x: F.batch_norm((x * s.w).bfloat16(), s.n.bfloat16(), s.n.bfloat16(), training=True),
        lambda s, x: F.layer_norm(x * s.w, (4,)) + F.group_norm((x * s.w)[None], 2)[0],
    ),
    "indices": (
        lambda s, x: (x * s.w)[-3:-1, ::2] * 2,
        lambda s, x: F.pad(x * s.w, (-1, 2, 1, -2)),
        lambda s, x: torch.where(x > 0, x * s.w, 0.0).masked_fill(x < -1, 5.0),
        lambda s, x: torch.index_put(x * s.w, (torch.arange(4) > 1,), torch.tensor(2.0)),
        lambda s, x: (x * s.w).cumsum(0).sort(dim=1).values,
    ),
    "others": (
        lambda s, x: torch.ops.aten.sub.Scalar(x * s.w, 1, 2),
        lambda s, x: torch._foreach_mul([x * s.w], 2.0)[0],
        lambda s, x: F.conv2d(x[None, None], s.w[None, None, :3, :3], padding=1),
        lambda s, x: F.conv2d(_channels_last(x.expand(1, 3, 4, 4)), s.w[:3, :3].expand(2, 3, 3, 3)),
        lambda s, x: F.scaled_dot_product_attention(x[None, None], s.w[None, None], s.w[None, None]),
        lambda s, x: x * s.w + torch.full((4,), True).float() + torch.arange(4, 0, -1) + torch.eye(4),
    ),
}


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _all(functions: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    return lambda s, x: tuple(function(s, x) for function in functions)


SAME_AS_EAGER = ALIASES | {name: _all(functions) for name, functions in OPS.items()}


def _flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    terms = [(o.abs() if o.is_complex() else o).float().square().sum() for o in outputs if o.requires_grad]
    return torch.stack([(i + 1) * t for i, t in enumerate(terms)]).sum()


@pytest.mark.parametrize("name", SAME_AS_EAGER)
def test_same_as_eager(name: str) -> None:
    model = _fn(SAME_AS_EAGER[name])
    eager = copy.deepcopy(model)
    compiled = memplan_compile(model, _x(), sanitize="poison")
    for seed in range(2):
        results = []
        for net in (compiled, eager):
            net.zero_grad()
            torch.manual_seed(seed)
            outputs = _flat(net(_x(seed=seed)))
            _loss(outputs).backward()  # type: ignore[no-untyped-call]
            results.append(outputs)
        for i, (one, two) in enumerate(zip(*results, strict=True)):
            assert one.requires_grad == two.requires_grad, i
            assert (one.dtype, one.shape) == (two.dtype, two.shape), i
            assert torch.equal(one, two), i
        torch.testing.assert_close(gradients_of(model), gradients_of(eager), rtol=1e-5, atol=1e-6)
        assert torch.equal(model.n, eager.n)


def _write_both(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    y.add_(1)
    return (x + y) * s.w


def test_inputs_that_share_memory() -> None:
    x = _x()
    difference = memplan_compile(_fn(lambda s, x, y: (x - y) * s.w), (x, x), on_mismatch="error")
    with pytest.raises(InputMismatch, match="share memory"):
        difference(_x(), _x(seed=2))
    reads = _fn(lambda s, x, y: (x + y) * s.w)
    assert torch.equal(memplan_compile(reads, (_x(), _x()), on_mismatch="error")(x, x), copy.deepcopy(reads)(x, x))
    writes = memplan_compile(_fn(_write_both), (_x(), _x()), on_mismatch="error")
    with pytest.raises(InputMismatch, match="share memory"):
        writes(x, x)
    with pytest.raises(InputMismatch, match="strides"):
        writes(x, _x(4, 8)[:, ::2])
    counts = _fn(lambda s, x: (s.n.add_(1), x * s.w)[1])
    with pytest.raises(InputMismatch, match="buffer 'n'"):
        memplan_compile(counts, torch.ones(4), on_mismatch="error")(counts.n)


def test_autocast_is_part_of_the_call() -> None:
    model = nn.Linear(4, 4)
    plain = memplan_compile(model, _x(), on_mismatch="error")
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(InputMismatch, match="autocast"):
            plain(_x())
        cast = memplan_compile(model, _x(), on_mismatch="error")
        out = cast(_x())
        assert out.dtype is torch.bfloat16
        assert torch.equal(out, model(_x()))
    with torch.autocast("cpu", torch.float16), pytest.raises(InputMismatch, match=r"under autocast to torch\.float16"):
        cast(_x())
    out.sum().backward()
    with pytest.raises(InputMismatch, match="autocast"):
        cast(_x())


def _change_and_return(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    s.n.add_(1)
    y.mul_(2)
    return x * s.w, s.n, y, s.n.view(2, 2), s.n * 1


def test_what_was_changed_in_place_is_returned_itself() -> None:
    model = _fn(_change_and_return)
    compiled = memplan_compile(model, (_x(), torch.ones(3)))
    y = torch.ones(3)
    out, n, same, view, product = compiled(_x(), y)
    assert same is y
    assert n is model.n
    assert view.data_ptr() == model.n.data_ptr()
    assert n.tolist() == view.flatten().tolist() == product.tolist() == [2] * 4
    assert y.tolist() == [2, 2, 2]
    out.sum().backward()


def test_outputs_may_be_changed_in_place() -> None:
    model = _fn(lambda s, x: _let(x * s.w, lambda h: (h * 2, h[0])))
    one, two = memplan_compile(model, _x())(_x())
    two.mul_(3)
    one.add_(1)
    (one.sum() + two.sum()).backward()
    assert isinstance(model.w.grad, torch.Tensor)


def _net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2))
    return nn.Sequential(*layers), torch.randn(64, 32)


def _arenas(compiled: CompiledModule) -> set[int]:
    """Identities of the arenas in which the module's programs run."""
    return {id(runner.arena) for runner in compiled._calls.programs}


def test_other_modes_keep_the_budget_of_a_given_plan() -> None:
    model, x = _net()
    traced = trace(model, x, gradients_in_arena=True)
    plan = plan_traced(traced, PlanOptions(arena_budget="min", policy=QUICK, costs=FAST_LINK))
    compiled = memplan_compile(model, x, plan=plan)
    model.eval()
    compiled(x).sum().backward()
    assert len(_arenas(compiled)) == 1
    model.train()
    twin = pickle.loads(pickle.dumps(compiled))
    assert torch.equal(twin(x), model(x))
    assert twin.plan.arena_size <= plan.arena_size
    assert twin.plan.evictions


def test_results_of_no_bytes_are_copied_too() -> None:
    """Batch norm in eval mode has statistics of no elements."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    x = torch.randn(4, 4, 8, 8)
    compiled = memplan_compile(
        model, x, train=True, arena_budget=0.8, policy="genoa", costs=FAST_LINK, sanitize="poison"
    )
    assert torch.equal(compiled(x), model(x))


def _in_parts(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    made[:, :2], made[:, 2:] = x[:, :2] * 2, x[:, 2:].sin()
    return made


@pytest.mark.parametrize(
    "fill",
    [
        slow(lambda x: nn.functional.gumbel_softmax(x, 0.5)),
        lambda x: x + torch.empty_like(x).uniform_(-1, 1),
        slow(_in_parts),
    ],
    ids=["gumbel_softmax", "uniform_", "in parts"],
)
def test_memory_that_was_never_written_begins_where_it_is_first_read(fill: Any) -> None:
    torch.manual_seed(0)
    model = Made(lambda m, x: m.out(fill(m.into(x).tanh())), into=nn.Linear(6, 6), out=nn.Linear(6, 6))
    eager, x = copy.deepcopy(model), torch.randn(4, 6)
    compiled = memplan_compile(model, x, arena_budget="min", sanitize="poison")
    one, two = (
        outcome_of(net, lambda x, call=call: call(x).square().mean(), x, seed=1)
        for net, call in ((model, compiled), (eager, eager))
    )
    assert one.same_as(two)
