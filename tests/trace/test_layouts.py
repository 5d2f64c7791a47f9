"""Results are laid out, and statistics have the type, as the kernels give them, whatever their fakes say."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from memplan.runtime import compile as memplan_compile
from memplan.trace.capture.as_eager import LAYOUTS
from tests.models import Made
from tests.runtime.reference import same_gradients
from tests.steps import outcome_of, under_autocast

aten = torch.ops.aten


def _laid_out(*shape: int) -> Iterator[torch.Tensor]:
    """The same shape in every way that people meet."""
    yield torch.rand(shape)
    yield torch.rand(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    yield torch.rand(*shape[:-1], 1).expand(shape)
    yield torch.rand(*shape[:-1], 2 * shape[-1])[..., ::2]
    if len(shape) == 4:
        yield torch.rand(shape).contiguous(memory_format=torch.channels_last)
    if len(shape) == 5:
        yield torch.rand(shape).contiguous(memory_format=torch.channels_last_3d)


def _padded(x: torch.Tensor, dims: int) -> torch.Tensor:
    """As a gradient of what the pads of the ops below make of `x`."""
    return torch.nn.functional.pad(x, [1, 2] * dims)


def _normalised(x: torch.Tensor) -> tuple[Any, ...]:
    w = torch.ones(x.shape[1])
    return x, w, w, w, w


# The arguments of each op, made of a gradient and an input.
ARGUMENTS: dict[Any, Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]] = {
    aten.mse_loss_backward.default: lambda g, x: (g, x, g, 1),
    aten.smooth_l1_loss_backward.default: lambda g, x: (g, x, g, 1, 1.0),
    aten.huber_loss_backward.default: lambda g, x: (g, x, g, 1, 1.0),
    aten.huber_loss.default: lambda g, x: (x, g, 0, 1.0),
    aten.glu_backward.default: lambda g, x: (g.narrow(0, 0, g.shape[0] // 2), x, 0),
    aten.log_sigmoid_forward.default: lambda g, x: (x,),
    aten.log_sigmoid_backward.default: lambda g, x: (g, x, aten.log_sigmoid_forward(x)[1]),
    aten._log_softmax_backward_data.default: lambda g, x: (g, x, 1, torch.float32),
    aten.native_batch_norm.default: lambda g, x: (*_normalised(x), True, 0.1, 1e-5),
    aten._native_batch_norm_legit.default: lambda g, x: (*_normalised(x), True, 0.1, 1e-5),
    aten._native_batch_norm_legit.no_stats: lambda g, x: (*_normalised(x)[:3], True, 0.1, 1e-5),
    aten._native_batch_norm_legit_no_training.default: lambda g, x: (*_normalised(x), 0.1, 1e-5),
    aten._native_batch_norm_legit_functional.default: lambda g, x: (*_normalised(x), True, 0.1, 1e-5),
    aten.native_batch_norm_backward.default: lambda g, x: (
        *(g, x, *_normalised(x)[1:4], *_normalised(x)[3:5], True, 1e-5, [True, True, True]),
    ),
    aten.native_group_norm_backward.default: lambda g, x: (
        *(g, x, torch.ones(x.shape[0], 2), torch.ones(x.shape[0], 2), torch.ones(x.shape[1])),
        *(x.shape[0], x.shape[1], x[0, 0].numel(), 2, [True, True, True]),
    ),
    aten._batch_norm_with_update_functional.default: lambda g, x: (*_normalised(x), 0.1, 1e-5),
    aten._batch_norm_no_update.default: lambda g, x: (*_normalised(x), 0.1, 1e-5),
    aten.batch_norm_backward.default: lambda g, x: (
        *(g, x, *_normalised(x)[1:4], *_normalised(x)[3:5], True, 1e-5, [True, True, True]),
        torch.empty(0, dtype=torch.uint8),
    ),
    aten.normal.float_Tensor: lambda g, x: (0.0, x),
    aten.normal.Tensor_Tensor: lambda g, x: (g, x),
    aten.poisson.default: lambda g, x: (x,),
    aten._standard_gamma.default: lambda g, x: (x,),
    aten.nll_loss2d_forward.default: lambda g, x: (x, torch.zeros_like(x[:, 0], dtype=torch.int64), None, 0, -1),
    aten.channel_shuffle.default: lambda g, x: (x, 2),
    aten.xlogy.Tensor: lambda g, x: (g, x),
    aten.special_xlog1py.default: lambda g, x: (g, x),
    aten.pow.Scalar: lambda g, x: (2.0, x),
    aten.max_unpool2d.default: lambda g, x: (x, torch.zeros_like(x, dtype=torch.int64), [9, 17]),
    aten.replication_pad3d.default: lambda g, x: (x, [1, 2] * 3),
    aten.reflection_pad3d.default: lambda g, x: (x, [1, 2] * 3),
    aten.replication_pad2d_backward.default: lambda g, x: (_padded(g, 2), x, [1, 2] * 2),
    aten.reflection_pad2d_backward.default: lambda g, x: (_padded(g, 2), x, [1, 2] * 2),
    aten.replication_pad3d_backward.default: lambda g, x: (_padded(g, 3), x, [1, 2] * 3),
    aten.reflection_pad3d_backward.default: lambda g, x: (_padded(g, 3), x, [1, 2] * 3),
    aten.resize_as.default: lambda g, x: (x, g),
    aten.roll.default: lambda g, x: (x, [1], [0]),
    aten.binary_cross_entropy.default: lambda g, x: (x, g, None, 0),
    aten.binary_cross_entropy_backward.default: lambda g, x: (g, x, g, None, 1),
    aten.hardswish_backward.default: lambda g, x: (g, x),
    aten.hardsigmoid_backward.default: lambda g, x: (g, x),
    aten.hardtanh_backward.default: lambda g, x: (g, x, -1.0, 1.0),
    aten.softplus_backward.default: lambda g, x: (g, x, 1.0, 20.0),
    aten.native_dropout_backward.default: lambda g, x: (g, x > 0, 2.0),
    aten.logit_backward.default: lambda g, x: (g, x, 1e-6),
    aten.elu_backward.default: lambda g, x: (g, 1.0, 1.0, 1.0, False, x),
    aten.threshold_backward.default: lambda g, x: (g, x, 0),
    aten.leaky_relu_backward.default: lambda g, x: (g, x, 0.1, False),
}


SHAPES = ((4, 6), (4, 6, 8), (2, 4, 4, 6), (2, 4, 3, 5, 6))
# The numbers of dimensions that an op takes, where these are not any.
DIMS: dict[Any, tuple[int, ...]] = {
    aten.nll_loss2d_forward.default: (4,),
    aten.channel_shuffle.default: (3, 4, 5),
    aten.max_unpool2d.default: (3, 4),
    aten.replication_pad2d_backward.default: (3, 4),
    aten.reflection_pad2d_backward.default: (3, 4),
    aten.replication_pad3d.default: (4, 5),
    aten.reflection_pad3d.default: (4, 5),
    aten.replication_pad3d_backward.default: (4, 5),
    aten.reflection_pad3d_backward.default: (4, 5),
}


@pytest.mark.parametrize("op", LAYOUTS, ids=str)
def test_the_table_says_what_the_kernels_do(op: Any) -> None:
    held = 0
    for shape in (s for s in SHAPES if op not in DIMS or len(s) in DIMS[op]):
        for g, x in itertools.product(_laid_out(*shape), repeat=2):
            args = ARGUMENTS[op](g, x)
            made = op(*args)
            for result in (made,) if isinstance(made, torch.Tensor) else made:
                strides = LAYOUTS[op](result.shape, *args)
                if strides is not None:
                    assert result.stride() == tuple(strides), (g.stride(), x.stride())
                    held += 1
    assert held


def _odd(function: Callable[..., torch.Tensor]) -> Made:
    """Convolutions whose results are laid out one way, in a loss that sees them another way."""
    layers = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)])
    return Made(
        lambda m, x, y: function(m, m.layers[1](F.silu(m.layers[0](x))), y), layers=layers, norm=nn.BatchNorm2d(8)
    )


ODD: dict[str, Callable[..., torch.Tensor]] = {
    "batch norm": lambda m, x, y: (m.norm(x.transpose(2, 3)) * y).sum(),
    "batch norm, transposed back": lambda m, x, y: (m.norm(x.transpose(2, 3)).transpose(2, 3) * y).sum(),
    "elu": lambda m, x, y: (F.elu(m.norm(x)) * y).sum(),
    "hard swish": lambda m, x, y: (F.hardswish(x.transpose(2, 3)) * y).sum(),
    "log sigmoid": lambda m, x, y: F.logsigmoid(x.transpose(2, 3)).sum((0, 2)).sin().sum(),
    "mean squares": lambda m, x, y: F.mse_loss(x.transpose(2, 3), y),
    "cross-entropy": lambda m, x, y: F.cross_entropy(x.transpose(2, 3), y.softmax(1)),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ODD)
def test_layouts_that_fakes_get_wrong_are_eager_s(name: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = _odd(ODD[name]).to(memory_format=layout)  # type: ignore[call-overload]
    x, y = torch.randn(2, 3, 11, 11).contiguous(memory_format=layout), torch.randn(2, 8, 9, 9)
    eager = copy.deepcopy(model)
    compiled = memplan_compile(model, (torch.ones_like(x), torch.ones_like(y)))
    for _ in range(2):
        ours, theirs = compiled(x, y), eager(x, y)
        ours.backward()
        theirs.backward()
        assert torch.equal(ours, theirs)
        assert same_gradients(model, eager)


def test_numbers_are_drawn_in_the_order_of_eager_s_memory() -> None:
    """Normal numbers with a deviation for each, which lies otherwise than they do."""
    drawn = Made(lambda m, mean, deviation: torch.normal(mean, deviation).sum((0, 1)).sin())
    mean, deviation = torch.rand(4, 6, 8).transpose(1, 2), torch.rand(4, 6, 8).transpose(1, 2)
    compiled = memplan_compile(drawn, (mean, deviation), train=False)
    torch.manual_seed(0)
    ours = compiled(mean, deviation)
    torch.manual_seed(0)
    assert torch.equal(ours, drawn(mean, deviation))


_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(5),
    "layer, half": lambda: nn.LayerNorm(5).bfloat16(),
    "layer, plain": lambda: nn.LayerNorm(5, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(2, 8),
    "batch": lambda: nn.BatchNorm2d(8),
    "batch, eval": lambda: nn.BatchNorm2d(8).eval(),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
}


def _under_autocast(call: Any) -> Any:
    return lambda x: under_autocast(call)(x).float().square().sum()


@pytest.mark.parametrize("name", _LAYERS)
def test_under_autocast_the_bits_are_those_of_eager(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), _LAYERS[name](), nn.Conv2d(8, 8, 1))
    eager, x = copy.deepcopy(model), torch.randn(4, 3, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = memplan_compile(model, x)
    ours, theirs = (outcome_of(one, _under_autocast(call), x) for one, call in ((model, compiled), (eager, eager)))
    assert len(ours.gradients) == len(list(model.parameters()))
    assert ours.same_as(theirs)
