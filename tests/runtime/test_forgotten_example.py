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
from tests.slow import slow

Ref = weakref.ref[torch.Tensor]


def _model() -> nn.Module:
    """A table of few words, so that numbers other than the example's may be none of its rows."""
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.ReLU())


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
    compiled, example = _compiled(_model(), _words)
    refs = [example]
    x = _words(3)
    refs.append(weakref.ref(x))
    compiled(x).sum().backward()
    with torch.no_grad():
        compiled(x)
    compiled.eval()(x).sum().backward()
    compiled.zero_grad()
    del x
    assert not _alive(refs)


def test_a_copy_has_the_plan_of_an_example_that_is_gone() -> None:
    compiled, example = _compiled(_model(), _words)
    assert not _alive([example])
    copied = pickle.loads(pickle.dumps(compiled))
    assert torch.equal(copied(_words()), compiled(_words()))
    assert copied.plan.fingerprint == compiled.plan.fingerprint


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> tuple[Any, list[Ref]]:
    batch = (_words(rows), torch.zeros(rows, 2, 3))
    made = memplan.compile_step(model, optimizer, nn.functional.mse_loss, batch)
    return made, [weakref.ref(x) for x in batch]


@pytest.mark.parametrize("kind", [torch.optim.SGD, slow(torch.optim.Adadelta)])
def test_no_program_of_a_step_keeps_the_batch_that_it_was_made_for(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model = _model()
    reference = copy.deepcopy(model)
    eager = kind(reference.parameters(), lr=0.1)
    step, refs = _step(model, kind(model.parameters(), lr=0.1), 4)
    for rows in (4, 9, 4):  # the first update of Adadelta makes its state; the second size needs a larger arena
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
