"""Which parameters share memory, have moved, or changed after compiling, and which module is where."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import memplan
from memplan.errors import InputMismatch
from memplan.runtime.guards.input_guards import layout_check
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.guards.parameter_guards import ParameterGuards
from memplan.trace import trace
from tests.models import Made
from tests.slow import slow
from tests.steps import assert_same_step


class Net(nn.Module):
    """Two layers and an empty container, called by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.norm, self.more = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.norm(self.two(self.one(x)))
        return made


def _again(model: Any) -> None:
    one = model.one
    del model.one
    model.one, model.two = one, nn.Linear(4, 4)


def _forward(model: Any) -> None:
    model.two.forward = lambda x: x


def _registers(hook: str) -> Callable[[Any], Any]:
    return lambda m: getattr(m.two, f"register_{hook}")(lambda *_: None)


def _overlapping(model: Any) -> None:
    shared = torch.randn(31)
    model.one.weight.data, model.two.weight.data = shared[:16].view(4, 4), shared[15:].view(4, 4)


def _interleaved(model: Any) -> None:
    """A tensor with strides reaches further than its number of elements."""
    shared = torch.randn(40)
    model.one.weight.data = shared.as_strided((4, 4), (8, 1), 0)
    model.two.weight.data = shared.as_strided((4, 4), (8, 1), 9)


def _weight(make: Callable[[], torch.Tensor], **options: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.two, "weight", nn.Parameter(make(), **options))


_HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another type": (lambda m: setattr(m, "one", nn.Sequential(nn.Linear(4, 4))), r"^one: was Linear, is Sequential"),
    "none": (lambda m: delattr(m, "two"), r"^two: was Linear, is nothing"),
    "in another order": (_again, r"^the model: submodules are in another order"),
    "in an empty container": (lambda m: m.more.append(nn.ReLU()), r"^more\.0: was nothing, is ReLU"),
    "another forward": (_forward, r"^two: its forward was replaced by another function"),
    **{hook: (_registers(hook), "module hooks were added or removed") for hook in _HOOKS},
    "a weight of another shape": (_weight(lambda: torch.randn(5, 4)), r"^two\.weight: is torch\.float32 \(5, 4\)"),
    "of other strides": (_weight(lambda: torch.randn(4, 4).t()), r"^two\.weight: .* with strides \(1, 4\)"),
    "of another type": (_weight(lambda: torch.randn(4, 4).double()), r"^two\.weight: is torch\.float64"),
    "without a gradient": (_weight(lambda: torch.randn(4, 4), requires_grad=False), r"requires_grad=False"),
    "on another device": (_weight(lambda: torch.empty(4, 4, device="meta")), r"^two\.weight: .* on meta"),
    "overlapping": (_overlapping, "two.weight: parameters do not share memory as they did|one.weight: parameters do"),
    "interleaved": (_interleaved, "do not share memory as they did|with strides"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_is_named_on_every_call_until_it_is_undone(name: str) -> None:
    model, x = Net(), torch.randn(3, 4)
    compiled = memplan.compile(model, x, on_mismatch="error")
    compiled(x)
    before = dict(model._modules)
    change, message = REFUSED[name]
    found = change(model)
    for _ in range(2):
        with pytest.raises(InputMismatch, match=message):
            compiled(x)
    if name in _HOOKS:
        found.remove()
    elif name in ("another type", "none"):
        model._modules.clear()
        model._modules.update(before)
    elif name == "another forward":
        del before["two"].forward  # type: ignore[union-attr]
    else:
        return
    assert torch.equal(compiled(x), model(x))


def _side_by_side(model: Any) -> None:
    nn.utils.vector_to_parameters(torch.randn(48), model.parameters())


FOLLOWED: dict[str, Callable[[Any], Any]] = {
    "a submodule of the same type": lambda m: setattr(m, "two", nn.Linear(4, 4).eval()),
    "parts of one memory without a gap": _side_by_side,
    "a buffer": lambda m: setattr(m.norm, "running_mean", torch.ones(4)),
    "any other attribute": lambda m: m.one.__dict__.update(note=5),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_only_moves_is_followed(name: str) -> None:
    model, x = Net().eval(), torch.randn(3, 4)
    compiled = memplan.compile(model, x, on_mismatch="error")
    for _ in range(3):
        assert torch.equal(compiled(x), model(x))
        FOLLOWED[name](model)


def test_a_hook_or_forward_that_was_there_may_not_go() -> None:
    for there in (_forward, lambda m: m.two.register_forward_hook(lambda *_: None)):
        model, x = Net(), torch.randn(3, 4)
        handle: Any = there(model)
        structure = ModuleGuards(model)
        assert structure.modes() == [True] * 5
        if handle is None:
            del model.two.forward
        else:
            handle.remove()
        with pytest.raises(InputMismatch, match=r"its forward was replaced|module hooks were added or removed"):
            structure.modes()
        assert model(x).shape == x.shape


def test_the_version_counts_changes_of_the_tree() -> None:
    model = Net()
    structure = ModuleGuards(model)
    slots = ParameterGuards(structure, trace(model, torch.randn(3, 4)))
    assert slots.look()[1]
    model.two = nn.Linear(4, 4)
    for _ in range(2):
        assert structure.modes() == [True] * 5
        assert structure.version == 1
    tensors, unmoved = slots.look()
    assert not unmoved
    assert [slots.names[i] for i in slots.moved(tensors)] == ["two.weight", "two.bias"]
    assert slots.look()[1]


def test_freed_parameters_share_no_memory() -> None:
    """FSDP2 frees the parameters of a block between its calls: then none has an address."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    traced = trace(model, torch.randn(2, 4))

    def resize(full: bool) -> None:
        for p in model.parameters():
            p.untyped_storage().resize_(p.nbytes if full else 0)

    resize(False)
    slots = ParameterGuards(ModuleGuards(model), traced)
    resize(True)
    assert slots.moved(slots.tensors()) == [0, 1, 2, 3]
    assert slots.moved(slots.tensors()) == []
    resize(False)
    assert slots.moved(slots.tensors()) == [0, 1, 2, 3]


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


# -- one look at many tensors ---------------------------------------------------------------------------------


def _tensors() -> list[torch.Tensor]:
    return [nn.Parameter(torch.randn(3, 4)), torch.randn(3, 4), torch.zeros(5, dtype=torch.int64)]


def test_tensors_of_the_same_layout_are_alike_and_frozen_or_turned_ones_are_not() -> None:
    tensors = _tensors()
    alike = layout_check(tensors)
    assert alike(*_tensors())
    tensors[0].requires_grad_(False)
    assert not alike(*tensors)
    tensors[0].requires_grad_(True).data = torch.randn(4, 3).t()
    assert not alike(*tensors)
    tied, other, twin = nn.Parameter(torch.randn(3)), torch.randn(3), nn.Parameter(torch.randn(3))
    alike = layout_check([tied, other, tied])
    assert alike(twin, other, twin)
    assert not alike(tied, other, twin)


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


def _body() -> Made:
    """A body, which is frozen first, and a head."""
    body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16)).requires_grad_(False)
    return Made(lambda m, x: m.head(m.body(x).tanh()), body=body, head=nn.Linear(16, 4))


def _models() -> tuple[Any, Any]:
    torch.manual_seed(0)
    one = _body()
    return one, copy.deepcopy(one)


def _x(n: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize(
    "options", [{}, slow({"gradients": "outside"}), slow({"dynamic_shapes": {"inputs": ({0: Dim("rows", min=2)},)}})]
)
def test_a_body_that_is_unfrozen_and_frozen_again(options: dict[str, Any]) -> None:
    """Its programs need arenas of several sizes, so that earlier ones are made again in the model of then."""
    model, eager = _models()
    compiled = memplan.compile(model, _x(0), **options)
    for n, wants in enumerate((False, True, True, False)):
        model.body.requires_grad_(wants)
        eager.body.requires_grad_(wants)
        for rows in (6, 40 if n > 1 else 5):
            assert_same_step(model, eager, compiled, _x(n, rows))


def test_a_larger_table_is_never_run_by_programs_of_the_first() -> None:
    """The program of a table of other size lies in a larger arena, in which the first one is made again."""

    torch.manual_seed(0)
    model: Any = Made(lambda m, x: (x @ m.rows.t()).softmax(-1).exp().square(), rows=nn.Parameter(torch.randn(8, 6)))
    eager = copy.deepcopy(model)
    compiled = memplan.compile(model, torch.randn(4, 6))
    for n, count in enumerate((8, 30, 30, 8, 30, 50)):
        if len(model.rows) != count:
            rows = torch.randn(count, 6)
            for part in (model, eager):
                part.rows = nn.Parameter(rows.clone())
        x = torch.randn(4, 6)
        assert_same_step(model, eager, compiled, x)
        assert_same_step(model, eager, compiled, x + n)
