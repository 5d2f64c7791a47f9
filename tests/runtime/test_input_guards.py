"""Guards of inputs: a call must have the example's layout, or is copied to it, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplan.errors import InputMismatch
from memplan.runtime.guards.input_guards import InputGuards, same_constant
from memplan.trace import trace


class _Model(nn.Module):
    """Two tensors and numbers."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, *, scale: float = 2.0, power: int = 1) -> torch.Tensor:
        return (x * scale) @ y**power


class _Writes(nn.Module):
    """Changes its first argument."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1.0)
        return x @ y


class _Keywords(nn.Module):
    """Sees the order of its keywords."""

    def forward(self, **tensors: torch.Tensor) -> torch.Tensor:
        x, y = tensors.values()
        return x @ y


def _guards(
    model: nn.Module, *args: Any, changes_model: bool = False, forward: Callable[..., Any] | None = None, **kwargs: Any
) -> InputGuards:
    traced = trace(model, args, kwargs, train=any(True for _ in model.parameters()))
    return InputGuards(traced, forward or model.forward, changes_model=changes_model)


def _x(*shape: int) -> torch.Tensor:
    return torch.arange(2.0 * max(1, *shape) * 8)[: torch.Size(shape).numel()].view(shape).clone()


_A, _B = _x(3, 4), _x(4, 2)


def test_keywords_of_named_parameters_come_in_any_order_and_others_in_one() -> None:
    every = _guards(_Writes(), x=_A.clone(), y=_B)  # all of its parameters are given by name
    assert every.flatten((), {"y": _B, "x": _A})[0] is _A
    numbers = _guards(_Model(), _A, _B, scale=3.0, power=1)
    for given in ({"scale": 3.0, "power": 1}, {"power": 1, "scale": 3.0}):
        assert numbers.flatten((_A, _B), given)[2:] == [3.0, 1]
    guards = _guards(_Keywords(), one=_A, two=_B)
    assert guards.flatten((), {"one": _A, "two": _B})[0] is _A
    with pytest.raises(InputMismatch, match="containers, or the order of keys, differ"):
        guards.flatten((), {"two": _B, "one": _A})


@pytest.mark.parametrize(
    ("example", "call"),
    [
        (((_A, _B), {}), ((_A,), {"y": _B})),
        (((_A, _B), {}), ((), {"y": _B, "x": _A})),
        (((_A,), {"y": _B}), ((_A, _B), {})),
        (((), {"y": _B, "x": _A}), ((_A, _B), {})),
        (((_A, _B), {}), ((_A, _B), {"scale": 2.0})),
        (((_A, _B), {"scale": 2.0}), ((), {"y": _B, "x": _A})),
    ],
)
def test_arguments_may_come_by_position_or_by_keyword(example: Any, call: Any) -> None:
    guards = _guards(_Model(), *example[0], **example[1])
    (leaves, expected) = (guards.flatten(*c) for c in (call, example))
    assert list(map(id, leaves[:2])) == list(map(id, expected[:2]))
    assert leaves[2:] == expected[2:]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((_A,), {}, r"arguments: the call has 1 positional arguments \(1 leaves in all\), the plan was made for 2 pos"),
        ((_A, _B, 1.0), {}, r"has 3 positional arguments \(3 leaves in all\), the plan was made for 2 .*\(2 leaves"),
        ((_A,), {"z": _B}, "has 1 positional arguments and keywords z .*; containers, or the order of keys, differ"),
        ((_A, [_B]), {}, "input 1: is a list, the plan was made for a tensor"),
        ((_A, None), {}, "input 1: is a NoneType, the plan was made for a tensor"),
        ((_A, 1.0), {}, "input 1: is a float, the plan was made for a tensor"),
        ((_A, _x(4, 3)), {}, r"input 1: is torch.float32 \(4, 3\) .* was made for torch.float32 \(4, 2\) on cpu"),
        ((_A.double(), _B), {}, r"input 0: is torch.float64 \(3, 4\)"),
        ((_A, _B.to("meta")), {}, "input 1: is .* on meta, the plan was made for .* on cpu"),
        ((_A, _B.to_sparse()), {}, r"input 1: is torch.float32 \(4, 2\) \(torch.sparse_coo\)"),
    ],
)
def test_the_first_difference_is_named(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(InputMismatch, match=message):
        _guards(_Model(), _A, _B).flatten(args, kwargs)


def test_constants_are_compared_by_type_and_value() -> None:
    guards = _guards(_Model(), _A, _B, scale=3.0)
    guards.flatten((_A, _B), {"scale": 3.0})
    for other, message in ((4.0, r"input 2: is 4.0, the plan was made for 3.0"), (3, "input 2: is 3, ")):
        with pytest.raises(InputMismatch, match=message):
            guards.flatten((_A, _B), {"scale": other})
    marker = object()
    for one, two, same in (
        (float("nan"), float("nan"), True), (0.0, -0.0, False), (1 + 0j, 1 + 0j, True),
        ("ab", "".join(["a", "b"]), True), ("a", "b", False), (marker, marker, True), (marker, object(), False),
    ):  # fmt: skip
        assert same_constant(one, two) is same


def test_other_strides_are_copied_to_those_of_the_example_unless_the_model_changes_the_input() -> None:
    guards = _guards(_Model(), _A, _B)
    turned = _x(2, 4).t()
    leaves = guards.flatten((_A, turned), {})
    assert leaves[0] is _A
    assert leaves[1].stride() == (2, 1)
    assert torch.equal(leaves[1], turned)
    guards = _guards(_Writes(), _A.clone(), _B)
    guards.flatten((_A, _x(2, 4).t()), {})
    with pytest.raises(InputMismatch, match=r"input 0: has strides \(1, 3\), the plan was made for \(4, 1\), and the"):
        guards.flatten((_x(4, 3).t(), _B), {})


def test_tensors_share_memory_as_those_of_the_example_where_it_matters() -> None:
    square = _x(4, 4)
    apart = _guards(_Model(), _x(4, 4), square)
    apart.flatten((square, square), {})  # nothing is changed: no harm
    changes = _guards(_Model(), _x(4, 4), square, changes_model=True)
    writes = _guards(_Writes(), _x(4, 4), square)
    for guards in (changes, writes):
        guards.flatten((square.clone(), square), {})
        with pytest.raises(InputMismatch, match="inputs: tensors do not share memory as those of the example do"):
            guards.flatten((square, square), {})
    tied = _guards(_Model(), square, square)
    tied.flatten((square, square), {})
    with pytest.raises(InputMismatch, match="do not share memory as those of the example do"):
        tied.flatten((square, square.clone()), {})
    with pytest.raises(InputMismatch, match="do not share memory as those"):  # found where strides are compared too
        changes.flatten((square, square.t()), {})
    empty = _guards(_Model(), _x(0, 4), _x(4, 0), changes_model=True)
    empty.flatten((_x(0, 4), _x(4, 0)), {})


def test_classes_with_operations_of_their_own_are_refused() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__torch_function__(*args, **kwargs)  # type: ignore[no-untyped-call]

    class Plain(torch.Tensor):
        pass

    class Disabled(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    guards = _guards(_Model(), _A, _B)
    with pytest.raises(InputMismatch, match="input 0: is a Own, which defines its own operations"):
        guards.flatten((_A.as_subclass(Own), _B), {})
    guards.flatten((_A.as_subclass(Plain), _B), {})
    guards.flatten((_A, _B.as_subclass(Disabled)), {})


def test_gradients_that_were_not_traced_are_refused_when_autograd_records() -> None:
    model = nn.Linear(4, 2)
    guards = _guards(model, _A)
    given = _A.clone().requires_grad_()
    guards.flatten((_A,), {}, training=True)
    guards.flatten((given,), {})
    with pytest.raises(InputMismatch, match="input 0: requires a gradient, the plan was made for one that does not"):
        guards.flatten((given,), {}, training=True)
    wanted = _guards(model, given)
    wanted.flatten((given,), {}, training=True)


def test_inputs_are_apart_from_what_the_step_changes() -> None:
    guards = _guards(_Model(), _A, _B)
    changed = {_B.untyped_storage().data_ptr(): "the buffer 'mean'"}
    guards.check_apart([_A, _B.clone()], changed)
    with pytest.raises(InputMismatch, match=r"input 1: shares its memory with the buffer 'mean', which the step chang"):
        guards.check_apart([_A, _B], changed)
