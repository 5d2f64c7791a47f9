"""Small programs that a planner gets silently wrong: each equals eager, or raises a typed error."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from memplan.core.choices import Sanitize
from memplan.errors import InputMismatch, MemplanError, StaleActivationsError, UnsupportedCall, UnsupportedGraph
from memplan.runtime import compile as memplan_compile
from memplan.trace import plan as memplan_plan


class Fn(nn.Module):
    """`function(self, *inputs)` with a 4 x 4 parameter `w` and a buffer `n` of 4."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("n", torch.ones(4))
        self.n: torch.Tensor
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


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


def _count_and_return(s: Any, x: torch.Tensor) -> Any:
    s.n.add_(1)
    return x * s.w + s.n


SAME_AS_EAGER: dict[str, Callable[..., Any]] = {
    "a gradient made in the forward": lambda s, x: _early(s.w) + x,
    "a detached alias": lambda s, x: _let(x * s.w, lambda h: (h, h.detach())),
    "a detached view": lambda s, x: _let(x * s.w, lambda h: (h, h.view(-1).detach())),
    "a detached parameter": lambda s, x: (x * s.w, s.w.detach(), s.w.detach()[0]),
    "a detached input": lambda s, x: (x * s.w, x.detach(), x),
    "views and slices": lambda s, x: _let(x * s.w, lambda h: (h.sin(), h.view(-1), h[1], h.t(), h.expand(2, 4, 4))),
    "the same output twice": lambda s, x: _let(x * s.w, lambda h: (h, h)),
    "chunks": lambda s, x: (x * s.w).chunk(2),
    "a slice alone": lambda s, x: (x * s.w)[0],
    "a transpose alone": lambda s, x: (x * s.w).t(),
    "a parameter": lambda s, x: (s.w, (x @ s.w).relu()),
    "an input and its view": lambda s, x: (x, x.view(-1), x @ s.w),
    "a counted buffer": _count_and_return,
    "half precision": lambda s, x: (x.half() * s.w.half()).float().sin(),
    "bfloat16": lambda s, x: (x.bfloat16() @ s.w.bfloat16()).relu(),
    "float64": lambda s, x: (x.double() @ s.w.double()).softmax(-1),
    "complex": lambda s, x: torch.fft.fft(x * s.w).abs(),
    "a dtype view of an input": lambda s, x: (x * s.w, x.view(torch.int32)),
    "an empty tensor": lambda s, x: (x[:0] * s.w[:0], x * s.w),
    "a scalar": lambda s, x: (x * s.w).sum(),
    "in-place ops": lambda s, x: (x * s.w).add_(x).mul_(2).relu_(),
    "complex as real": lambda s, x: torch.view_as_real(torch.fft.fft(x * s.w)),
    "in-place on a view": lambda s, x: _let(x * s.w, lambda h: (h[0].mul_(3), h)[1]),
    "add with alpha": lambda s, x: torch.ops.aten.sub.Scalar(x * s.w, 1, 2),
    "dropout without a flag": lambda s, x: torch.ops.aten.native_dropout(x * s.w, 0.3, None)[0],
    "dropout of everything": lambda s, x: F.dropout(x * s.w, 1.0),
    "random numbers": lambda s, x: x * s.w + torch.rand_like(x) + torch.randn(4),
    "batch norm without statistics": lambda s, x: F.batch_norm(x * s.w, None, None, training=True),
    "batch norm in eval": lambda s, x: F.batch_norm(x * s.w, s.n, s.n + 1),
    "batch norm in bfloat16": lambda s, x: F.batch_norm(
        (x * s.w).bfloat16(), torch.zeros(4).bfloat16(), torch.ones(4).bfloat16(), training=True
    ),
    "a list of one result": lambda s, x: torch._foreach_mul([x * s.w], 2.0)[0],
    "embedding in bfloat16": lambda s, x: F.embedding(torch.arange(40) % 4, s.w.bfloat16()).sin(),
    "negative steps and indices": lambda s, x: (x * s.w)[-3:-1, ::2] * 2,
    "negative padding": lambda s, x: F.pad(x * s.w, (-1, 2, 1, -2)),
    "convolution": lambda s, x: F.conv2d(x[None, None], s.w[None, None, :3, :3], padding=1),
    "channels last": lambda s, x: F.conv2d(
        x.expand(1, 3, 4, 4).contiguous(memory_format=torch.channels_last), s.w[:3, :3].expand(2, 3, 3, 3)
    ),
    "a boolean mask": lambda s, x: torch.where(x > 0, x * s.w, 0.0).masked_fill(x < -1, 5.0),
    "boolean index_put": lambda s, x: torch.index_put(x * s.w, (torch.arange(4) > 1,), torch.tensor(2.0)),
    "cumulated and sorted": lambda s, x: (x * s.w).cumsum(0).sort(dim=1).values,
    "a norm": lambda s, x: F.layer_norm(x * s.w, (4,)) + F.group_norm((x * s.w)[None], 2)[0],
    "attention": lambda s, x: F.scaled_dot_product_attention(x[None, None], s.w[None, None], s.w[None, None]),
    "factories": lambda s, x: x * s.w + torch.full((4,), True).float() + torch.arange(4, 0, -1) + torch.eye(4),
    "checkpointed": lambda s, x: torch.utils.checkpoint.checkpoint(lambda h: (h * s.w).sin(), x, use_reentrant=False),
}


def _flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    terms = [(o.abs() if o.is_complex() else o).float().square().sum() for o in outputs if o.requires_grad]
    return torch.stack([(i + 1) * t for i, t in enumerate(terms)]).sum()


@pytest.mark.parametrize("sanitize", ["poison", None])
@pytest.mark.parametrize("name", SAME_AS_EAGER)
def test_same_as_eager(name: str, sanitize: Sanitize | None) -> None:
    model = Fn(SAME_AS_EAGER[name])
    eager = copy.deepcopy(model)
    compiled = memplan_compile(model, _x(), sanitize=sanitize)
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
        assert model.w.grad is not None
        assert eager.w.grad is not None
        assert torch.allclose(model.w.grad, eager.w.grad, rtol=1e-5, atol=1e-6)
        assert torch.equal(model.n, eager.n)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind: Any, train: bool) -> None:
    torch.manual_seed(0)
    model = kind(4, 5, num_layers=2)
    eager = copy.deepcopy(model)
    compiled = memplan_compile(model, _x(3, 2, 4), train=train, sanitize="poison")
    one, two = compiled(_x(3, 2, 4))[0], eager(_x(3, 2, 4))[0]
    assert torch.allclose(one, two, rtol=1e-6)
    if train:
        one.sum().backward()
        two.sum().backward()
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7)


def _remember(s: Any, x: torch.Tensor) -> Any:
    s.last = x * s.w
    return s.last * 2


def _rebind(s: Any, x: torch.Tensor) -> Any:
    s.n = s.n + 1
    return x * s.w


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (_remember, "Python state"),
        (_rebind, "Python state"),
        (lambda s, x: F.embedding(torch.arange(3), s.w, sparse=True), "plain strided"),
        (lambda s, x: _let(torch.fft.fft(x * s.w), lambda h: (h, torch.view_as_real(h))), "float32 view"),
    ],
)
def test_what_cannot_be_planned_is_refused(function: Callable[..., Any], word: str) -> None:
    with pytest.raises(UnsupportedGraph, match=word) as caught:
        memplan_compile(Fn(function), _x(), fullgraph=True)
    assert caught.value.hint


def test_backward_hooks_are_refused_and_seen_later() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    handle = model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(UnsupportedGraph, match="backward hooks"):
        memplan_compile(model, _x(), on_mismatch="error", fullgraph=True)
    handle.remove()
    compiled = memplan_compile(model, _x(), on_mismatch="error")
    model[0].register_forward_hook(lambda m, a, out: out * 2)
    with pytest.raises(InputMismatch, match="hooks"):
        compiled(_x())


def test_a_replaced_submodule_of_another_type_raises() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = memplan_compile(model, _x(), on_mismatch="error")
    model[1] = nn.Tanh()
    with pytest.raises(InputMismatch, match=r"ReLU.*Tanh"):
        compiled(_x())
    model = nn.Sequential(nn.Linear(4, 4))
    compiled = memplan_compile(model, _x(), on_mismatch="error")
    model[0].bias = None
    with pytest.raises(InputMismatch, match="None"):
        compiled(_x())


@pytest.mark.parametrize("change", [lambda t: t.t(), lambda t: t[:1], lambda t: t.double()])
def test_a_parameter_laid_out_anew_raises(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Fn(lambda s, x: x @ s.w)
    compiled = memplan_compile(model, _x(), on_mismatch="error")
    model.w.data = change(model.w.data)
    with pytest.raises(InputMismatch) as caught:
        compiled(_x())
    assert caught.value.where == "w"


def test_flat_parameters_that_swap_places_raise() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    flat = torch.randn(32)
    for i in (0, 1):
        model[i].weight.data = flat[16 * i : 16 * i + 16].view(4, 4)
    compiled = memplan_compile(model, _x(), on_mismatch="error")
    assert torch.equal(compiled(_x()), copy.deepcopy(model)(_x()))
    for i in (0, 1):
        model[i].weight.data = flat[16 - 16 * i : 32 - 16 * i].view(4, 4)
    with pytest.raises(InputMismatch, match="do not share memory as they did"):
        compiled(_x())


def _write_both(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    y.add_(1)
    return (x + y) * s.w


def test_inputs_that_share_memory() -> None:
    x = _x()
    difference = memplan_compile(Fn(lambda s, x, y: (x - y) * s.w), (x, x), on_mismatch="error")
    with pytest.raises(InputMismatch, match="share memory"):
        difference(_x(), _x(seed=2))
    reads = Fn(lambda s, x, y: (x + y) * s.w)
    assert torch.equal(memplan_compile(reads, (_x(), _x()), on_mismatch="error")(x, x), copy.deepcopy(reads)(x, x))
    writes = memplan_compile(Fn(_write_both), (_x(), _x()), on_mismatch="error")
    with pytest.raises(InputMismatch, match="share memory"):
        writes(x, x)
    with pytest.raises(InputMismatch, match="strides"):
        writes(x, _x(4, 8)[:, ::2])
    counts = Fn(lambda s, x: (s.n.add_(1), x * s.w)[1])
    with pytest.raises(InputMismatch, match="buffer 'n'"):
        memplan_compile(counts, torch.ones(4), on_mismatch="error")(counts.n)


def test_other_strides_in_the_first_call_without_gradients() -> None:
    model = Fn(lambda s, x: x[1:] * s.w[1:])
    compiled = memplan_compile(model, _x())
    with torch.no_grad():
        for x in (_x().t(), _x(), _x(8, 4)[::2]):
            assert torch.equal(compiled(x), model(x))


def test_parameters_that_no_loss_reaches_get_no_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.a, x * self.b

    model = Two()
    memplan_compile(model, torch.ones(3))(torch.ones(3))[0].sum().backward()
    assert model.a.grad is not None
    assert model.b.grad is None


def test_eval_mode_with_gradients_has_gradients() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    compiled, eager = memplan_compile(model, _x()), copy.deepcopy(model).eval()
    compiled.eval()
    assert compiled.training is False
    for net in (compiled, eager):
        net(_x()).sum().backward()
    assert model[0].weight.grad is not None
    assert torch.allclose(model[0].weight.grad, eager[0].weight.grad)


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
    model = Fn(_change_and_return)
    compiled = memplan_compile(model, (_x(), torch.ones(3)))
    y = torch.ones(3)
    out, n, same, view, product = compiled(_x(), y)
    assert same is y
    assert n is model.n
    assert view.data_ptr() == model.n.data_ptr()
    assert n.tolist() == view.flatten().tolist() == product.tolist() == [2] * 4
    assert y.tolist() == [2, 2, 2]
    out.sum().backward()


def test_two_threads_in_one_arena_are_never_silently_wrong() -> None:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))).eval()
    compiled = memplan_compile(model, _x(64, 128), train=False)
    outcomes: list[bool | None] = []

    def work(seed: int) -> None:
        x = _x(64, 128, seed=seed)
        with torch.no_grad():
            expected = model(x)
            for _ in range(30):
                try:
                    outcomes.append(torch.equal(compiled(x), expected))
                except StaleActivationsError:
                    outcomes.append(None)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(outcomes) == 60
    assert True in outcomes
    assert False not in outcomes


def test_changed_buffers_are_seen_by_eager_autograd() -> None:
    model = Fn(lambda s, x: (s.n.add_(1), x * s.w)[1])
    compiled = memplan_compile(model, _x())
    w = torch.ones(4, requires_grad=True)
    loss = (w * model.n).sum()
    compiled(_x())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_a_failed_forward_blocks_nothing() -> None:
    model = nn.Embedding(4, 4)
    compiled = memplan_compile(model, torch.tensor([0, 1]))
    kept = None
    try:
        compiled(torch.tensor([0, 9]))
    except (IndexError, RuntimeError) as error:
        kept = error
    assert kept is not None
    compiled(torch.tensor([2, 3])).sum().backward()


def test_replan_obeys_gradients_of_inputs() -> None:
    model = nn.Linear(4, 4)
    compiled = memplan_compile(model, _x(), on_mismatch="replan")
    x = _x().requires_grad_()
    compiled(x).square().sum().backward()
    y = _x().requires_grad_()
    copy.deepcopy(model)(y).square().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.allclose(x.grad, y.grad)


def test_planning_is_reproducible_within_a_process() -> None:
    def function(s: Any, x: torch.Tensor) -> Any:
        h = x * s.w
        copied = h.clone()
        copied[:, 1] = torch.tanh(h)[:, 0]
        return copied * 2

    prints = {memplan_plan(Fn(function), _x()).fingerprint for _ in range(3)}
    assert len(prints) == 1


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 says so of any profile
def test_compiling_leaves_a_running_profiler_alone() -> None:
    from torch.profiler import profile

    with profile() as profiler:
        compiled = memplan_compile(nn.Linear(4, 4), _x())
        compiled(_x())
    assert profiler.key_averages()
    assert compiled.plan.temporaries is not None, "measured beside it"


def test_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    compiled = memplan_compile(model, _x())
    compiled.eval()
    with torch.inference_mode():
        one = compiled(_x())
    with torch.no_grad():
        assert torch.equal(compiled(_x()), one)
    compiled.train()
    compiled(_x()).sum().backward()


def test_outputs_may_be_changed_in_place() -> None:
    model = Fn(lambda s, x: _let(x * s.w, lambda h: (h * 2, h[0])))
    one, two = memplan_compile(model, _x())(_x())
    two.mul_(3)
    one.add_(1)
    (one.sum() + two.sum()).backward()
    assert isinstance(model.w.grad, torch.Tensor)


def test_errors_are_typed() -> None:
    for error in (InputMismatch, StaleActivationsError, UnsupportedCall, UnsupportedGraph):
        assert issubclass(error, MemplanError)
