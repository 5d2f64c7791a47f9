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
def test_a_copy_has_the_plan_of_the_first(duplicate: Callable[[Any], Any]) -> None:
    compiled, example = _compiled(Words(), _words)
    assert not _alive([example])
    copied = duplicate(compiled)
    again = duplicate(copied)
    for made in (copied, again):
        assert torch.equal(made(_words()), compiled(_words()))
        assert made.plan.fingerprint == compiled.plan.fingerprint


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
