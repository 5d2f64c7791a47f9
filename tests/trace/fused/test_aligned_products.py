"""Matrix products whose rows are not aligned: padded once where their operands are made, with the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import cross_entropy

from memplan.trace.fused.aligned_products import align_products
from memplan.trace.passes.rewrite import aten

WORDS, WIDTH = 1001, 128


def _graph(function: Callable[..., object], *inputs: torch.Tensor) -> fx.GraphModule:
    """Return a function's graph of ATen ops, with fake values."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*fakes)


def _head(shifted: bool, bias: bool) -> Callable[..., object]:
    """Return a loss head with its gradients: of the hidden states, the words' weights and the bias."""

    def step(hidden: torch.Tensor, weight: torch.Tensor, added: torch.Tensor, labels: torch.Tensor) -> object:
        hidden, weight, added = (x.detach().requires_grad_() for x in (hidden, weight, added))
        with torch.enable_grad():
            rows = hidden.view(-1, WIDTH)
            flat = torch.addmm(added, rows, weight.t()) if bias else rows @ weight.t()
            logits = flat.view(*hidden.shape[:2], WORDS)
            if shifted:
                logits, wanted = logits[:, :-1], labels[:, 1:]
            else:
                wanted = labels
            loss = cross_entropy(logits.reshape(-1, WORDS).float(), wanted.reshape(-1))
            of = (hidden, weight, added) if bias else (hidden, weight)
            return loss, *torch.autograd.grad(loss, of)

    return step


def _inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    sizes = ((4, 64, WIDTH), (WORDS, WIDTH), (WORDS,))
    return *(torch.randn(size).mul(0.1).to(dtype) for size in sizes), torch.randint(WORDS, (4, 64))


def _shapes(graph: fx.GraphModule) -> list[tuple[int, ...]]:
    """Return the sizes of all operands of products, and of their results."""
    products = [n for n in graph.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
    return [tuple(x.meta["val"].shape) for n in products for x in (*n.all_input_nodes[-2:], n)]


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_loss_head_keeps_its_numbers_and_has_aligned_rows(shifted: bool, bias: bool) -> None:
    inputs = _inputs()
    graph = _graph(_head(shifted, bias), *inputs)
    before = graph(*inputs)
    count = Counter(n.target for n in graph.graph.nodes)
    assert align_products(graph.graph) == 3
    graph.recompile()
    assert all(size % 8 == 0 for shape in _shapes(graph) for size in shape)
    for one, other in zip(before, graph(*inputs), strict=True):
        assert one.shape == other.shape
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-4)
    assert Counter(n.target for n in graph.graph.nodes)[aten.mm.default] == count[aten.mm.default]
    padding = [n for n in graph.graph.nodes if n.target in (aten.constant_pad_nd.default, aten.slice_scatter.default)]
    large = [n for n in padding if n.meta["val"].numel() >= 4 * 64 * WORDS]
    assert len(large) == 1, "one padded gradient of the logits, for all that take it"
    assert align_products(graph.graph) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_is_left_alone(dtype: torch.dtype) -> None:
    graph = _graph(_head(True, False), *_inputs(dtype))
    assert align_products(graph.graph) == 0


def test_a_result_that_leaves_the_step_keeps_its_layout() -> None:
    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left @ right).view(2, -1, WORDS)

    graph = _graph(product, torch.empty(256, WIDTH, dtype=torch.half), torch.empty(WIDTH, WORDS, dtype=torch.half))
    align_products(graph.graph)
    assert _shapes(graph)[-1] == (256, WORDS)


@pytest.mark.parametrize("of", ["product", "operand"])
def test_what_is_seen_by_strides_is_left_alone(of: str) -> None:
    def product(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = (left * 2) @ right
        seen = made if of == "product" else made.tanh()
        other = seen @ right.t()
        return other.float(), torch.as_strided(seen, (10,), (WORDS,)).float()

    inputs = torch.randn(256, WIDTH, dtype=torch.bfloat16), torch.randn(WIDTH, WORDS, dtype=torch.bfloat16)
    graph = _graph(product, *inputs)
    before = graph(*inputs)
    align_products(graph.graph)
    graph.recompile()
    for one, other in zip(before, graph(*inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2)
