"""Results: views and pieces, one tensor twice, shared bytes, a cache, objects."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import memplan
from memplan.core.choices import OnMismatch
from memplan.errors import InputMismatch, StaleActivationsError, UnsupportedCall, UnsupportedGraph
from tests.models import Made
from tests.steps import Training, sgd

_Forward = Callable[[torch.Tensor, torch.Tensor], Any]


def _weighted(function: _Forward) -> Any:
    """Return a model that applies a function to an input and a parameter of the same shape."""
    return Made(lambda m, x: function(x, m.w), w=nn.Parameter(torch.randn(4, 6)))


VIEWS: dict[str, _Forward] = {
    "pieces of a parameter": lambda x, w: w.chunk(2),
    "pieces of both": lambda x, w: (*torch.split(x, [1, 3]), *torch.split(w, [2, 4], 1), x * w),
    "columns of a result": lambda x, w: torch.sigmoid(x * w).unbind(1),
    "uneven pieces": lambda x, w: torch.split(x * w, [1, 2, 1]),
    "unsafe pieces": lambda x, w: torch.unsafe_chunk(x * w, 3, 1),
    "pieces, one of them twice": lambda x, w: ((y := (x * w).chunk(2))[0], y[1], y[0]),
    "pieces and the whole": lambda x, w: (*(y := x * w).chunk(2), y),
    "a transposed parameter's rows": lambda x, w: w.t().unbind(0),
}


def _results(model: Any, x: torch.Tensor, w: nn.Parameter) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Results of one call, and the gradients of the input and the parameter of a loss that weighs each differently."""
    x, w.grad = x.detach().clone().requires_grad_(), None
    results = list(model(x))
    loss = torch.stack([(i + 1) * (t * t).sum() for i, t in enumerate(results)]).sum()
    torch.autograd.backward(loss)
    return results, [None if g is None else g.clone() for g in (x.grad, w.grad)]


@pytest.mark.parametrize("name", VIEWS)
def test_views_and_pieces_are_eagers(name: str) -> None:
    model, x = _weighted(VIEWS[name]), torch.randn(4, 6)
    compiled = memplan.compile(model, x.clone().requires_grad_(), sanitize="poison")
    for _ in range(2):
        x = torch.randn(4, 6)
        theirs, their_gradients = _results(model, x, model.w)
        ours, our_gradients = _results(compiled, x, model.w)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
            assert (a.stride(), a.requires_grad) == (b.stride(), b.requires_grad)
        for g, h in zip(our_gradients, their_gradients, strict=True):
            assert (g is None) == (h is None)
            if "twice" in name:  # eager adds all terms of one tensor in a row
                torch.testing.assert_close(g, h)
            else:
                assert g is None or (h is not None and torch.equal(g, h))


@pytest.mark.parametrize("view", [lambda y: y[:, 1], lambda y: y.unbind(0)[0], lambda y: y.chunk(2)[1]])
def test_to_change_a_view_of_what_the_backward_needs_raises(view: Any) -> None:
    def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (view(torch.sigmoid(x * w)),)

    model, x = _weighted(forward), torch.randn(4, 6)
    compiled = memplan.compile(model, x)
    (changed,) = compiled(x)
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(StaleActivationsError, match="changed in place"):
        changed.sum().backward()
    (kept,) = compiled(x)
    kept.sum().backward()
    assert model.w.grad is not None


def test_views_of_an_input_that_is_laid_out_otherwise_are_eagers() -> None:
    """They have eager's strides and share the input's bytes; such a call gets a program of its own."""
    model = _weighted(lambda x, w: (*torch.split(x, 2), *x.unbind(0), x, (x * w).sum()))
    compiled = memplan.compile(model, torch.randn(4, 6))
    for x in (torch.randn(1, 6).expand(4, 6), torch.randn(6, 4).t(), torch.randn(4, 6)):
        ours, theirs = compiled(x), model(x)
        assert [view.stride() for view in ours] == [view.stride() for view in theirs]
        assert [view.data_ptr() for view in ours[:-1]] == [view.data_ptr() for view in theirs[:-1]]
        assert all(map(torch.equal, ours, theirs))
    strict = memplan.compile(model, torch.randn(4, 6), on_mismatch="error")
    with pytest.raises(InputMismatch, match=r"has strides \(1, 4\).* returns a view of it"):
        strict(torch.randn(6, 4).t())
    copied = memplan.compile(_weighted(lambda x, w: (x * w).sum()), torch.randn(4, 6), on_mismatch="error")
    copied(torch.randn(6, 4).t()).backward()


def _parts() -> dict[str, Any]:
    return {"a": nn.Linear(16, 16), "b": nn.Linear(16, 16), "count": torch.arange(16.0)}


CASES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a result twice": lambda m, x: (y := m.a(x), y),
    "a result in containers": lambda m, x: {"p": (y := m.a(x)), "q": [y, (y, m.b(x), None)]},
    "a result twice, saved": lambda m, x: (y := m.a(x).relu(), m.b(y), y),
    "the same by another name": lambda m, x: (y := m.a(x), y.contiguous(), y.float()),
    "an input twice": lambda m, x: (x, m.a(x), x),
    "views of an input": lambda m, x: (m.a(x), v := x[:2], v[:, 1:], v, x.detach()),
    "parameters and views": lambda m, x: (m.a(x), m.b.weight, m.b.weight, m.b.weight.t()),
    "a buffer that is changed": lambda m, x: (m.count.add_(1), m.a(x), m.count, m.count[2:], m.count)[1:],
    "the whole and a slice": lambda m, x: (y := m.a(x.view(2, 3, 16)), y[:, 1:]),
    "several slices and the whole": lambda m, x: (y := m.a(x.view(2, 3, 16)), y[:, 1:], y[0], y[1]),
    "slices in another order": lambda m, x: ((y := m.a(x), v := y[1:], w := y[:, 3:]), w, v)[::-1],
    "a view of a view": lambda m, x: (y := m.a(x), v := y[1:], v.t(), y.unsqueeze(0)),
    "equal views": lambda m, x: (y := m.a(x), y.view_as(y), y.view(-1), y.view(-1)),
    "a detached result": lambda m, x: (y := m.a(x), d := y.detach(), d, y[1:].detach()),
    "views of what is used": lambda m, x: ((y := m.a(x.view(2, 3, 16)))[:, 1:], y, m.b(y)),
    "overlapping pieces": lambda m, x: (*(y := m.a(x)).split([3, 13], 1), y.unbind()[2], y.unbind()[4]),
}
# Results that the model computes further with: their gradients, and the order of the sums, are those of aot_eager.
USED = {"a result twice, saved", "views of what is used"}
MODES = ["train", "eval", "no_grad"]
# For programs of several graphs and whole steps, which take their results from the same place.
SOME = ["a result in containers", "views of an input", "a buffer that is changed", "views of what is used"]


def _relations(results: list[Any], model: nn.Module, x: torch.Tensor) -> list[Any]:
    """For each result: the first tensor that it is, whose storage it has, and of whose views it is one."""
    known: list[torch.Tensor] = [x, *model.parameters(), *model.buffers()]
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    count, found = len(known), []
    for t in tensors:
        is_one = next((i for i, k in enumerate(known) if k is t), None)
        stored = next(
            (i for i, k in enumerate(known) if k.untyped_storage()._cdata == t.untyped_storage()._cdata), None
        )
        base = next((i for i, k in enumerate([*known[:count], *tensors]) if k is t._base), None)
        if base is not None and base >= count and not torch.is_grad_enabled():
            base = None  # nothing depends on it: in eager it may be a tensor that nobody has
        found.append((is_one, stored, base, t.requires_grad, t.is_leaf, t.shape, t.stride()))
        known.append(t)
    return found


def _observed(call: Callable[[torch.Tensor], Any], model: nn.Module, x: torch.Tensor, *, mode: str) -> list[Any]:
    """Return all that a caller sees of a call: relations, values after a write to each result, gradients."""
    start = copy.deepcopy(model.state_dict())
    with torch.no_grad() if mode == "no_grad" else contextlib.nullcontext():
        seen: list[Any] = [_relations(pytree.tree_leaves(call(x)), model, x)]
    if mode != "no_grad":
        results = [r for r in pytree.tree_leaves(call(x)) if isinstance(r, torch.Tensor)]
        kept = [r for r in results if r.requires_grad and not r.is_leaf]
        for r in kept:
            r.retain_grad()
        weighed = [(i + 1) / 3 * (r.sin() * torch.linspace(0.3, 1.7, r.shape[-1])).sum() for i, r in enumerate(results)]
        torch.autograd.backward(torch.stack(weighed).sum())
        seen.append([r.grad for r in kept])
        seen += [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
        seen.append(None if x.grad is None else x.grad.clone())
        model.zero_grad()
        x.grad = None
    for i in range(len(seen[0])):
        with torch.no_grad() if mode == "no_grad" else contextlib.nullcontext():
            results = [r for r in pytree.tree_leaves(call(x)) if isinstance(r, torch.Tensor)]
        before = x.detach().clone()
        results[i].detach().mul_(2)
        seen += [r.detach().clone() for r in results]
        x.detach().copy_(before)
        model.load_state_dict(start)
    return seen


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    return torch.equal(one, two) if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) else one == two


@pytest.mark.parametrize("wants", [False, True], ids=["plain input", "input with a gradient"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_results_alias_as_in_eager(name: str, mode: str, wants: bool) -> None:
    torch.manual_seed(0)
    model = Made(CASES[name], **_parts()).train(mode == "train")
    x = torch.randn(6, 16).requires_grad_(wants)
    with torch.no_grad() if mode == "no_grad" else contextlib.nullcontext():
        compiled = memplan.compile(copy.deepcopy(model), (x,))
    _compare(name, model, compiled, x, mode=mode)


def _compare(name: str, model: nn.Module, compiled: nn.Module, x: torch.Tensor, *, mode: str) -> None:
    expected = _observed(model, model, x, mode=mode)
    found = _observed(compiled, compiled, x, mode=mode)
    if name in USED and mode != "no_grad":
        aot: Any = torch.compile(copy.deepcopy(model), backend="aot_eager")
        gradients = slice(1, 3 + len(list(model.parameters())))
        expected[gradients] = _observed(aot, aot, x, mode=mode)[gradients]
    assert len(expected) == len(found)
    for i, (one, two) in enumerate(zip(expected, found, strict=True)):
        assert _same(one, two), f"observation {i}: {one} {two}"


class Broken(Made):
    """Returns the same after a graph break."""

    def forward(self, *inputs: Any) -> Any:
        """Depend on data before the results are made."""
        return None if inputs[0].detach().sum() > 1e9 else self.function(self, *inputs)


@pytest.mark.parametrize("name", SOME)
def test_results_alias_as_in_eager_in_a_whole_step(name: str) -> None:
    torch.manual_seed(0)
    model, x = Made(CASES[name], **_parts()), torch.randn(6, 16)

    def loss_of(results: Any) -> torch.Tensor:
        tensors = [r for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]
        weighed = [(i + 1) / 3 * (r.sin() * torch.linspace(0.3, 1.7, r.shape[-1])).sum() for i, r in enumerate(tensors)]
        return torch.stack(weighed).sum()

    training = Training(model, sgd, loss_of, x)
    for _ in range(2):
        training.both(x)


def _scaled(size: int, after: Callable[[torch.Tensor], Any] = lambda y: y) -> Any:
    """x * w, and what `after` makes of it."""
    return Made(lambda m, x: after(x * m.w), w=nn.Parameter(torch.randn(size)))


_WINDOWS: dict[str, Callable[[], torch.Tensor]] = {
    "unfold": lambda: torch.randn(16).unfold(0, 3, 1),
    "expand": lambda: torch.randn(3).expand(14, 3),
}


@pytest.mark.parametrize("how", ["error", "replan"])
@pytest.mark.parametrize("example", _WINDOWS)
def test_a_dense_call_after_an_overlapping_example(example: str, how: OnMismatch) -> None:
    torch.manual_seed(0)
    model, x, dense = _scaled(3), _WINDOWS[example](), torch.randn(14, 3)
    compiled = memplan.compile(model, x, on_mismatch=how)
    assert torch.equal(compiled(x), model(x))
    other = _WINDOWS[example]()
    assert torch.equal(compiled(other), model(other)), "the same layout, other numbers"
    if how == "error":
        with pytest.raises(InputMismatch, match=r"input 0: has strides \(3, 1\).*elements share bytes"):
            compiled(dense)
    else:
        assert torch.equal(compiled(dense), model(dense))


def test_an_overlapping_call_after_a_dense_example() -> None:
    model = _scaled(3)
    compiled = memplan.compile(model, torch.randn(14, 3))
    for make in _WINDOWS.values():
        x = make()
        assert torch.equal(compiled(x), model(x))


def test_an_overlapping_input_that_forward_changes_is_refused() -> None:
    changed = Made(lambda m, x: x.add_(1) * 2)

    with pytest.raises(UnsupportedGraph, match="elements share bytes"):
        memplan.compile(changed, torch.randn(16).unfold(0, 3, 1), train=False, fullgraph=True)
    with pytest.raises(UnsupportedGraph, match="refers to a single memory location") as refused:
        memplan.compile(changed, torch.randn(1, 3).expand(4, 3), train=False, fullgraph=True)
    assert refused.value.see == "resized-input"


_OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "unfold": lambda y: y.unfold(-1, 3, 1),
    "as_strided": lambda y: y.as_strided((4, 3), (1, 1)),
    "expand": lambda y: y.unsqueeze(0).expand(3, 2, 16),
    "beside a transposed one": lambda y: (y.unfold(-1, 3, 1), y.sin().t()),
}


@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize("after", _OUTPUTS)
def test_gradients_of_overlapping_outputs_are_those_of_eager(after: str, way: str) -> None:
    torch.manual_seed(0)
    model, x = _scaled(16, _OUTPUTS[after]), torch.randn(2, 16, requires_grad=True)
    eager, y = copy.deepcopy(model), x.detach().clone().requires_grad_()
    compiled: Any = torch.compile(model, backend=memplan.Backend())
    _backward(memplan.compile(model, x, gradients="outside", sanitize="poison") if way == "compile" else compiled, x)
    _backward(eager, y)
    assert torch.equal(model.w.grad, eager.w.grad)
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def _backward(model: Callable[..., Any], x: torch.Tensor) -> None:
    """A backward in which every element of an output has a gradient of its own."""
    outputs = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outputs).backward()


ROWS, WIDTH = 4, 96


LENGTH = 16


def _llama(*, cache: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 2 * LENGTH}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    how = {"use_cache": cache, "attn_implementation": "eager"}  # other attention skips a mask beside a cache only
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **how))


def _batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (4, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def test_a_language_model_returns_its_cache_as_in_eager() -> None:
    eager, model = _llama(), _llama()
    compiled = memplan.compile(model, _batch(0), fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager)]
    for seed in range(2):
        one, two = compiled(**_batch(seed)), eager(**_batch(seed))
        assert torch.equal(one.loss, two.loss)
        assert torch.equal(one.logits, two.logits)
        assert type(one.past_key_values) is type(two.past_key_values)
        assert one.past_key_values.get_seq_length() == LENGTH
        for a, b in zip(one.past_key_values.layers, two.past_key_values.layers, strict=True):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)
            assert a.keys.requires_grad is b.keys.requires_grad is True
        for output, optimizer in zip((one, two), optimizers, strict=True):
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()


class Record:
    """An object with plain attributes: tensors, others, and another object in a list."""

    def __init__(self, hidden: torch.Tensor, inner: list[Any]) -> None:
        self.hidden, self.name, self.inner, self.device = hidden, "record", inner, hidden.device


class Note:
    """An object that equals nothing but itself."""


class Recorded(nn.Module):
    """Returns a result and a `Record` of how it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Record]:
        hidden = self.one(x).relu()
        return self.two(hidden), Record(hidden, [Record(hidden * 2, [Note()]), 3])


def test_an_object_with_plain_attributes_is_made_anew_by_each_call() -> None:
    torch.manual_seed(0)
    model, x = Recorded(), torch.randn(4, 8)
    compiled = memplan.compile(model, x, fullgraph=True)
    (out, one), (expected, two) = compiled(x), model(x)
    assert torch.equal(out, expected)
    assert (type(one), one.name, one.inner[1], one.device) == (Record, "record", 3, two.device)
    assert torch.equal(one.hidden, two.hidden)
    assert torch.equal(one.inner[0].hidden, two.inner[0].hidden)
    assert type(one.inner[0].inner[0]) is Note
    gradients = [torch.autograd.grad(y.sum(), list(model.parameters())) for y in (out, expected)]
    assert all(map(torch.equal, *gradients))
    _, later = compiled(x)
    assert later is not one
    assert later.inner is not one.inner


def test_a_loss_of_a_returned_object_raises() -> None:
    model, x = Recorded(), torch.randn(4, 8)
    compiled = memplan.compile(model, x, fullgraph=True)
    out, record = compiled(x)
    with pytest.raises(UnsupportedCall, match="for which no gradient is planned"):
        (out.sum() + record.hidden.sum()).backward()
