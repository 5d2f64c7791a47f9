"""Where a model keeps its parameters: which of them share memory, and which have moved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memplan.errors import InputMismatch
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.guards.parameter_guards import ParameterGuards
from memplan.trace import trace


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _slots(model: nn.Module) -> ParameterGuards:
    return ParameterGuards(ModuleGuards(model), trace(model, torch.randn(2, 4)))


def _free(model: nn.Module) -> None:
    for p in model.parameters():
        p.untyped_storage().resize_(0)


def _fill(model: nn.Module) -> None:
    for p in model.parameters():
        p.untyped_storage().resize_(p.nbytes)


def test_freed_parameters_share_no_memory() -> None:
    """FSDP2 frees the parameters of a block between its calls: then none has an address."""
    model = _net()
    traced = trace(model, torch.randn(2, 4))
    _free(model)
    slots = ParameterGuards(ModuleGuards(model), traced)
    _fill(model)
    assert slots.moved(slots.tensors()) == [0, 1, 2, 3]
    assert slots.moved(slots.tensors()) == []
    _free(model)
    assert slots.moved(slots.tensors()) == [0, 1, 2, 3]


def test_parameters_that_become_tied_are_named() -> None:
    model = _net()
    slots = _slots(model)
    model[1].weight.data = model[0].weight.data
    with pytest.raises(InputMismatch, match=r"1\.weight: parameters do not share memory as they did"):
        slots.moved(slots.tensors())


def test_parts_of_one_memory_are_apart_where_they_do_not_overlap() -> None:
    model = _net()
    slots = _slots(model)
    nn.utils.vector_to_parameters(torch.randn(40), model.parameters())
    assert slots.moved(slots.tensors()) == [0, 1, 2, 3], "side by side, without a gap"
    overlapping = torch.randn(31)
    model[0].weight.data, model[1].weight.data = overlapping[:16].view(4, 4), overlapping[15:].view(4, 4)
    with pytest.raises(InputMismatch, match="do not share memory as they did"):
        slots.moved(slots.tensors())


def test_parts_with_gaps_count_to_their_last_element() -> None:
    """A tensor with strides reaches further than its number of elements."""
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    for layer in model:
        layer.weight = nn.Parameter(torch.randn(2, 4)[:, :2])
    net = nn.Sequential(*model)
    slots = ParameterGuards(ModuleGuards(net), trace(net, torch.randn(2, 2)))
    shared = torch.randn(12)
    model[0].weight.data = shared.as_strided((2, 2), (4, 1), 0)
    model[1].weight.data = shared.as_strided((2, 2), (4, 1), 5)
    with pytest.raises(InputMismatch, match="do not share memory as they did"):
        slots.moved(slots.tensors())
    model[1].weight.data = shared.as_strided((2, 2), (4, 1), 6)
    assert slots.moved(slots.tensors()) == [0, 1]


def test_parameters_that_share_other_parts_of_their_memory_raise() -> None:
    model, flat = _net(), torch.randn(32)
    model[0].weight.data, model[1].weight.data = flat[:16].view(4, 4), flat[8:24].view(4, 4)
    slots = _slots(model)
    model[1].weight.data = flat[4:20].view(4, 4)
    with pytest.raises(InputMismatch, match="do not share memory as they did"):
        slots.moved(slots.tensors())
