"""Where a model keeps its parameters: which of them share memory, and which have moved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memplan
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


def test_parts_of_one_memory_are_apart_where_they_do_not_overlap() -> None:
    model = _net()
    slots = _slots(model)
    nn.utils.vector_to_parameters(torch.randn(40), model.parameters())
    assert slots.moved(slots.tensors()) == [0, 1, 2, 3], "side by side, without a gap"
    overlapping = torch.randn(31)
    model[0].weight.data, model[1].weight.data = overlapping[:16].view(4, 4), overlapping[15:].view(4, 4)
    with pytest.raises(InputMismatch, match=r"0\.weight: parameters do not share memory as they did"):
        slots.moved(slots.tensors())


def test_parts_with_gaps_count_to_their_last_element() -> None:
    """A tensor with strides reaches further than its number of elements."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for layer in model:
        layer.weight = nn.Parameter(torch.randn(2, 4)[:, :2])
    slots = ParameterGuards(ModuleGuards(model), trace(model, torch.randn(2, 2)))
    shared = torch.randn(12)
    model[0].weight.data = shared.as_strided((2, 2), (4, 1), 0)
    model[1].weight.data = shared.as_strided((2, 2), (4, 1), 5)
    with pytest.raises(InputMismatch, match="do not share memory as they did"):
        slots.moved(slots.tensors())
    model[1].weight.data = shared.as_strided((2, 2), (4, 1), 6)
    assert slots.moved(slots.tensors()) == [0, 1]


# -- the module tree ------------------------------------------------------------------------------------------


def test_a_submodule_of_the_same_type_is_followed() -> None:
    model = _net()
    structure = ModuleGuards(model)
    slots = ParameterGuards(structure, trace(model, torch.randn(2, 4)))
    assert structure.version == 0
    model[1] = nn.Linear(4, 4)
    assert structure.modes() == [True, True, True]
    assert structure.version == 1
    assert structure.modes() == [True, True, True]
    assert structure.version == 1
    tensors, unmoved = slots.look()
    assert not unmoved
    assert tensors[2] is model[1].weight
    assert slots.moved(tensors) == [2, 3]
    assert slots.look()[1]


def test_another_tree_is_named_on_every_call() -> None:
    model = _net()
    structure = ModuleGuards(model)
    first = model[0]
    model[0] = nn.Sequential(nn.Linear(4, 4))
    for _ in range(2):
        with pytest.raises(InputMismatch, match=r"^0: was Linear, is Sequential"):
            structure.modes()
    model[0] = first
    assert structure.modes() == [True, True, True]
    del model[1]
    with pytest.raises(InputMismatch, match=r"^1: was Linear, is nothing"):
        structure.modes()


def test_submodules_in_another_order_and_of_empty_containers() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.more = nn.ReLU(), nn.GELU(), nn.ModuleList()

    model = Pair()
    structure = ModuleGuards(model)
    one = model.one
    del model.one
    model.one = one
    model.two = nn.GELU()
    with pytest.raises(InputMismatch, match=r"^the model: submodules are in another order"):
        structure.modes()
    model = Pair()
    structure = ModuleGuards(model)
    model.more.append(nn.ReLU())
    with pytest.raises(InputMismatch, match=r"^more\.0: was nothing, is ReLU"):
        structure.modes()


def test_another_forward_is_named() -> None:
    model = _net()
    structure = ModuleGuards(model)
    model[1].forward = lambda x: x
    for _ in range(2):
        with pytest.raises(InputMismatch, match=r"^1: its forward was replaced by another function"):
            structure.modes()
    del model[1].forward
    assert structure.modes() == [True, True, True]
    model[0].__dict__["note"] = 5  # any other attribute may come
    assert structure.modes() == [True, True, True]
    patched = _net()
    patched[0].forward = lambda x: x
    structure = ModuleGuards(patched)
    assert structure.modes() == [True, True, True]
    del patched[0].forward
    with pytest.raises(InputMismatch, match=r"^0: its forward was replaced by another function"):
        structure.modes()


@pytest.mark.parametrize(
    "kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
             "register_full_backward_pre_hook"],
)  # fmt: skip
def test_hooks_that_come_or_go_are_noticed(kind: str) -> None:
    model = _net()
    structure = ModuleGuards(model)
    handle = getattr(model[1], kind)(lambda *_: None)
    for _ in range(2):
        with pytest.raises(InputMismatch, match=r"^the model: module hooks were added or removed"):
            structure.modes()
    handle.remove()
    assert structure.modes() == [True, True, True]
    kept = getattr(model[0], kind)(lambda *_: None)
    structure = ModuleGuards(model)
    other = nn.Linear(4, 4)
    getattr(other, kind)(lambda *_: None)
    model[1] = other
    with pytest.raises(InputMismatch, match="module hooks were added or removed"):
        structure.modes()
    model[1] = nn.Linear(4, 4)
    assert structure.modes() == [True, True, True]
    kept.remove()
    with pytest.raises(InputMismatch, match="module hooks were added or removed"):
        structure.modes()


# -- parameters and buffers -----------------------------------------------------------------------------------


_CHANGES = {
    "shape": lambda: nn.Parameter(torch.randn(4, 5)),
    "strides": lambda: nn.Parameter(torch.randn(4, 4).t()),
    "dtype": lambda: nn.Parameter(torch.randn(4, 4, dtype=torch.float64)),
    "gradient": lambda: nn.Parameter(torch.randn(4, 4), requires_grad=False),
    "device": lambda: nn.Parameter(torch.empty(4, 4, device="meta")),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_a_parameter_of_another_layout_is_named(change: str) -> None:
    model = _net()
    slots = _slots(model)
    model[1].weight = _CHANGES[change]()
    for _ in range(2):
        tensors, unmoved = slots.look()
        assert not unmoved
        with pytest.raises(InputMismatch) as heard:
            slots.moved(tensors)
        text = str(heard.value)
        assert text.startswith("1.weight: is torch.float")
        then = r"torch.float32 (4, 4) with strides (4, 1) on cpu, requires_grad=True"
        assert f"the plan was made for {then}" in text
        assert f"is {then}" not in text


def test_buffers_are_found_where_the_model_keeps_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    slots = _slots(model)
    assert slots.look()[1]
    held = dict(zip(slots.names, slots.tensors(), strict=True))
    assert held["1.running_mean"] is model[1].running_mean
    assert held["1.weight"] is model[1].weight
    model[1].running_mean = torch.ones(4)
    tensors, unmoved = slots.look()
    assert not unmoved
    assert [slots.names[i] for i in slots.moved(tensors)] == ["1.running_mean"]


def test_a_container_whose_table_of_submodules_was_replaced_is_followed() -> None:
    """`del sequential[i]` gives the container another dict."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    compiled = memplan.compile(model, x, on_mismatch="error")
    model.append(nn.ReLU())
    del model[2]
    assert torch.equal(compiled(x), model(x))
    model[1] = nn.Linear(4, 4)
    assert torch.equal(compiled(x), model(x))
    del model[2]
    with pytest.raises(InputMismatch, match="was ReLU, is nothing"):
        compiled(x)
