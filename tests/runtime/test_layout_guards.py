"""One look at many tensors sees whatever the close look sees."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from memplan.runtime.guards.input_guards import layout_check


def _tensors() -> list[torch.Tensor]:
    return [nn.Parameter(torch.randn(3, 4)), torch.randn(3, 4), torch.zeros(5, dtype=torch.int64)]


def test_others_of_the_same_layout_are_alike() -> None:
    alike = layout_check(_tensors())
    assert alike(*_tensors())
    with torch.no_grad():
        assert alike(*_tensors())
    assert layout_check([])()


OTHERS: dict[str, Callable[[], object]] = {
    "shape": lambda: torch.randn(4, 4),
    "strides": lambda: torch.randn(4, 3).t(),
    "dtype": lambda: torch.randn(3, 4, dtype=torch.float64),
    "gradient": lambda: torch.randn(3, 4, requires_grad=True),
    "class": lambda: nn.Parameter(torch.randn(3, 4), requires_grad=False),
    "device": lambda: torch.empty(3, 4, device="meta"),
    "layout": lambda: torch.randn(3, 4).to_sparse(),
    "conjugate": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "nothing": lambda: None,
    "number": lambda: 1.0,
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_difference_is_seen(name: str) -> None:
    one, two, three = _tensors()
    assert not layout_check([one, two, three])(one, OTHERS[name](), three)


def test_a_parameter_that_was_frozen_or_turned_is_seen() -> None:
    tensors = _tensors()
    alike = layout_check(tensors)
    tensors[0].requires_grad_(False)
    assert not alike(*tensors)
    tensors[0].requires_grad_(True)
    assert alike(*tensors)
    tensors[0].data = torch.randn(4, 3).t()
    assert not alike(*tensors)


def test_tied_tensors_stay_tied() -> None:
    tied, other = nn.Parameter(torch.randn(3)), torch.randn(3)
    alike = layout_check([tied, other, tied])
    assert alike(tied, other, tied)
    twin = nn.Parameter(torch.randn(3))
    assert alike(twin, other, twin)
    assert not alike(tied, other, twin)


def test_nothing_is_kept_alive() -> None:
    tensor = torch.randn(3)
    reference = weakref.ref(tensor)
    alike = layout_check([tensor])
    del tensor
    assert reference() is None
    assert alike(torch.randn(3))
