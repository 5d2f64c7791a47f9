"""A compiled module or step keeps no tensors of its example, and is compiled again all the same."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import InputMismatch
from memplan.runtime.api.example_leaves import TensorLike, is_made_up, with_tensors, without_tensors
from memplan.runtime.api.recompile import compiled_from

Ref = weakref.ref[torch.Tensor]


class Words(nn.Module):
    """A table of few words, so that numbers other than the example's may be none of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.table(words)).relu()
        return made


class Bags(nn.Module):
    """Fails on `starts` that do not begin with 0, as random ones do not."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(9, 3)

    def forward(self, words: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.bags(words, starts)
        return made


def _words(rows: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 5, (rows, 2), generator=torch.Generator().manual_seed(seed))


def _compiled(model: nn.Module, make: Callable[[], torch.Tensor]) -> tuple[memplan.CompiledModule, Ref]:
    x = make()
    made = memplan.compile(model, x)
    return made, weakref.ref(x)


def _alive(refs: Sequence[Ref]) -> list[torch.Tensor]:
    gc.collect()
    return [x for ref in refs if (x := ref()) is not None]


def test_no_program_of_a_module_keeps_the_call_that_it_was_made_for() -> None:
    compiled, example = _compiled(Words(), _words)
    refs = [example]
    for rows in (6, 3):
        x = _words(rows)
        refs.append(weakref.ref(x))
        compiled(x).sum().backward()
        with torch.no_grad():
            compiled(x)
        compiled.eval()(x).sum().backward()
        compiled.train()
        compiled.zero_grad()
        del x
    assert not _alive(refs)


def test_gradients_in_use_and_calls_in_flight_are_compiled_for_without_the_example() -> None:
    model = Words()
    reference = copy.deepcopy(model)
    compiled, example = _compiled(model, _words)
    assert not _alive([example])
    for module in (reference, compiled):
        module(_words(6, 1)).sum().backward()
        module(_words(3, 1)).sum().backward()  # gradients of the step before are in use, and it differs
        one, two = module(_words(6, 2)), module(_words(6, 3))
        (one.sum() + two.sum()).backward()
    for expected, found in zip(reference.parameters(), model.parameters(), strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        assert torch.equal(expected.grad, found.grad)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_has_the_plan_of_an_example_that_is_gone(duplicate: Callable[[Any], Any]) -> None:
    compiled, example = _compiled(Words(), _words)
    assert not _alive([example])
    copied = duplicate(compiled)
    assert copied.plan.fingerprint == compiled.plan.fingerprint
    again = duplicate(copied)
    assert torch.equal(again(_words()), compiled(_words()))


def test_a_copy_keeps_no_call() -> None:
    compiled, _ = _compiled(Words(), _words)
    copied = copy.deepcopy(compiled)
    copied.head = nn.Linear(4, 2)
    x = _words(4)
    copied(x).sum().backward()
    refs = [weakref.ref(x)]
    del x
    assert not _alive(refs)
    assert copied(_words(4)).shape == (4, 2, 2)


def test_what_runs_on_no_made_up_numbers_is_compiled_for_the_call() -> None:
    def call(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(size) % 9, torch.arange(0, size, 3)

    model = Bags()
    reference = copy.deepcopy(model)
    compiled = memplan.compile(model, call(30))
    gone = copy.deepcopy(compiled)
    for module in (reference, compiled):
        module(*call(30)).sum().backward()
        module(*call(21)).sum().backward()  # the gradient is in use; there are no numbers like the example's
        module(*call(30)).sum().backward()
    expected, found = reference.bags.weight.grad, model.bags.weight.grad
    assert expected is not None
    assert found is not None
    assert torch.equal(expected, found)
    with pytest.raises(InputMismatch, match="made-up numbers"):
        _ = gone.plan
    assert torch.equal(gone(*call(30)), reference(*call(30)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> tuple[Any, list[Ref]]:
    batch = (_words(rows), torch.zeros(rows, 2, 3))
    made = memplan.compile_step(model, optimizer, nn.functional.mse_loss, batch)
    return made, [weakref.ref(x) for x in batch]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adadelta])
def test_no_program_of_a_step_keeps_the_batch_that_it_was_made_for(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model = Words()
    reference = copy.deepcopy(model)
    eager = kind(reference.parameters(), lr=0.1)
    step, refs = _step(model, kind(model.parameters(), lr=0.1), 4)
    for rows in (4, 9, 4, 4):  # the first update of Adadelta makes its state; the second size needs a larger arena
        words, target = _words(rows, rows), torch.ones(rows, 2, 3)
        eager.zero_grad()
        loss = nn.functional.mse_loss(reference(words), target)
        torch.autograd.backward(loss)
        eager.step()
        assert torch.equal(loss, step(words, target))
        refs += [weakref.ref(words), weakref.ref(target)]
        del words, target
    assert not _alive(refs)
    for expected, found in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.allclose(expected, found, atol=1e-6)


@pytest.mark.parametrize("on_mismatch", ["error", "replan"])
def test_a_copy_that_fails_on_made_up_numbers_is_compiled_for_a_call_like_the_example(on_mismatch: Any) -> None:
    words, starts = torch.arange(9), torch.tensor([0, 4, 6])
    compiled = memplan.compile(Bags(), (words, starts), on_mismatch=on_mismatch)
    twin = copy.deepcopy(compiled)
    with pytest.raises(InputMismatch, match="made-up numbers"):
        twin.plan  # noqa: B018
    assert torch.equal(twin(words, starts), compiled(words, starts))
    assert twin.plan.fingerprint == compiled.plan.fingerprint


def test_a_call_whose_inputs_are_tied_otherwise_is_not_what_is_compiled_for() -> None:
    model, a, b = nn.Bilinear(4, 4, 2), torch.ones(3, 4), torch.full((3, 4), 2.0)
    compiled = memplan.compile(model, (a, b), on_mismatch="error")
    compiled(a, b).sum().backward()
    held = [p.grad for p in model.parameters()]
    compiled(a, a).sum().backward()  # the gradients of before are in use: it is compiled once more
    assert all(g is not None for g in held)
    compiled.zero_grad()
    compiled(a, b).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, (a.T @ b).expand(2, 4, 4))


def test_made_up_tensors_have_the_layout_and_the_range_of_the_example() -> None:
    given = (
        torch.randint(3, 9, (4, 5)).T,
        torch.rand(3, 2, dtype=torch.bfloat16) + 2,
        torch.ones(6, dtype=torch.bool),
        torch.zeros(0, 3),
        torch.full((2,), 7.0, requires_grad=True),
        "text",
    )
    left = without_tensors(given, ())
    assert is_made_up(left)
    assert not any(isinstance(x, torch.Tensor) for x in left)
    for x, made in zip(given, with_tensors(left), strict=True):
        if not isinstance(x, torch.Tensor):
            assert made == x
            continue
        assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)
        assert made.requires_grad == x.requires_grad
        if x.numel():
            assert made.min() >= x.min()
            assert made.max() <= x.max()
    assert torch.equal(with_tensors(left)[0], with_tensors(left)[0])


def test_tensors_that_nothing_can_stand_for_are_kept() -> None:
    shared = torch.rand(4)
    parameter = nn.Parameter(torch.rand(2))
    kept = (
        shared,
        shared[1:],
        torch.rand(1).expand(3),
        torch.rand(2, dtype=torch.complex64),
        torch.tensor([1.0, float("inf")]),
        parameter.detach(),
    )
    left = without_tensors((*kept, torch.rand(3)), [parameter])
    assert [x.data_ptr() for x in left[:-1]] == [x.data_ptr() for x in kept]
    assert isinstance(left[-1], TensorLike)


def test_errors_on_tensors_that_were_kept_are_raised_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError), compiled_from(((torch.ones(2),), {})):
        _ = 1 // 0
    left = without_tensors((torch.ones(2),), ())
    with pytest.raises(InputMismatch, match="made-up numbers"), compiled_from((left, {})):
        _ = 1 // 0
