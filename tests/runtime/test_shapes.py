"""`dynamic_shapes`: any shape in range runs in the one arena, equal to eager bit by bit; the others are mismatches."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import memplan
from memplan.errors import InputMismatch, InvalidShapes, ShapeOutOfRange
from tests.runtime.reference import same_gradients
from tests.slow import slow

BATCH, SEQ = Dim("batch", min=1, max=32), Dim("seq", min=1, max=48)


class Attention(nn.Module):
    """A layer whose activations grow with the square of the sequence, with dropout and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        self.calls.add_(1)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) * scale + mask[:, None, :]
        y: Tensor = self.out(self.dropout(scores.softmax(-1)) @ v)
        return nn.functional.gelu(y)


SHAPES: dict[str, Any] = {"x": {0: BATCH, 1: SEQ}, "mask": {0: BATCH, 1: SEQ}}


def _inputs(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(batch * 100 + seq)
    return torch.randn(batch, seq, 16), torch.randn(batch, seq)


def _step(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    out = model(*inputs)
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _compiled(example: tuple[Any, ...] = (), **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = Attention()
    reference = copy.deepcopy(model)
    return reference, memplan.compile(model, example or _inputs(3, 8), dynamic_shapes=SHAPES, **options)


def _require_equal(reference: nn.Module, compiled: Any, inputs: tuple[Any, ...]) -> None:
    for one, two in zip(_step(reference, inputs), _step(compiled, inputs), strict=True):
        assert torch.equal(one, two)


def test_every_shape_equals_eager_in_one_growing_arena() -> None:
    reference, compiled = _compiled(on_mismatch="error")
    sizes = []
    for shape in ((3, 8), (5, 20), (32, 48), (3, 8), (4, 1), (1, 9), (1, 1)):
        _require_equal(reference, compiled, _inputs(*shape))
        sizes.append(compiled._calls.arena.nbytes)
    assert sizes == sorted(sizes), "it never shrinks"
    assert sizes[0] < sizes[2] == sizes[-1] == compiled.symbolic.arena_size({"batch": 32, "seq": 48})
    x, mask = _inputs(6, 6)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)  # it is laid out as the example
    assert all(map(torch.equal, _step(reference, (x, mask)), _step(compiled, (strided, mask))))
    assert torch.equal(reference.get_buffer("calls"), compiled.calls)
    made = x.clone().requires_grad_()
    input_ = made * 2
    compiled(input_.detach(), mask)
    gone = weakref.ref(input_)
    del input_
    assert gone() is None, "what made the inputs is not kept"


def test_other_states_have_traces_of_their_own() -> None:
    reference, compiled = _compiled()
    _require_equal(reference, compiled, _inputs(3, 8))
    with torch.no_grad():
        torch.manual_seed(0)
        expected = reference(*_inputs(32, 30))
        torch.manual_seed(0)
        assert torch.equal(compiled(*_inputs(32, 30)), expected)
    for mode in (False, True):
        reference.train(mode)
        compiled.train(mode)
        _require_equal(reference, compiled, _inputs(6, 6))


def test_buckets_share_offsets_and_spare_the_arena() -> None:
    reference, compiled = _compiled(bucketing={"seq": 16, "batch": 4})
    arena = compiled._calls.arena
    nbytes = compiled.symbolic.arena_size({"batch": 4, "seq": 16})
    for shape in ((3, 8), (4, 16), (2, 9), (4, 3)):
        _require_equal(reference, compiled, _inputs(*shape))
        assert arena.nbytes == nbytes
    plans = {r.plan.arena_size: r.plan.solution.offsets for r in compiled._calls.programs.of_shapes}
    biggest = plans[max(plans)]
    assert all(offset == biggest[name] for offsets in plans.values() for name, offset in offsets.items())
    _require_equal(reference, compiled, _inputs(5, 33))
    assert arena.nbytes > nbytes


@pytest.mark.parametrize("policy", [slow("eager"), "replan"])
def test_out_of_range_follows_on_mismatch(policy: str) -> None:
    reference, compiled = _compiled(on_mismatch=policy)
    _require_equal(reference, compiled, _inputs(3, 60))
    _require_equal(reference, compiled, _inputs(3, 8))


def test_calls_that_differ_otherwise_are_refused_by_name() -> None:
    _, compiled = _compiled(example=(*_inputs(3, 8), 0.5), on_mismatch="error")
    x, mask = _inputs(4, 9)
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((x.double(), mask, 0.5), "input 'x': is torch.float64"),
        ((x, mask, 0.25), "input 'scale': is 0.25"),
        ((x, mask[:3], 0.5), "batch=4"),
        ((x, mask), "arguments"),
        ((x, 3, 0.5), "input 'mask': is a int"),
        ((x[..., :8], mask, 0.5), "dimension 2 is 8"),
        ((x[0], mask, 0.5), "input 'x'"),
    ]
    for args, complaint in wrong:
        with pytest.raises(InputMismatch, match=complaint):
            compiled(*args)
    with pytest.raises(ShapeOutOfRange, match=r"seq: is 49, the plan was made for 1\.\.48"):
        compiled(*_inputs(3, 49), 0.5)
    assert compiled(x, mask, 0.5).shape == x.shape


def test_nonsense_is_refused_when_compiling() -> None:
    model, x = nn.Linear(2, 2), torch.zeros(2, 2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"bucketing": {"length": 8}}, "no dimension 'length'"),
        ({"bucketing": {"batch": 0}}, "not a whole number"),
        ({"bucketing": {"batch": 8}, "dynamic_shapes": None}, "no dimension varies"),
        ({"arena_budget": "50%"}, "one size only"),
        ({"cuda_graph": True}, "one shape"),
        ({"plan": memplan.plan(model, x)}, "for one shape"),
    ]
    for options, complaint in wrong:
        with pytest.raises(InvalidShapes, match=complaint):
            memplan.compile(model, x, **{"dynamic_shapes": {"input": {0: BATCH}}, **options})


def _in_arena(compiled: Any) -> list[bool]:
    memory = compiled._calls.arena.memory
    low, high = memory.data_ptr(), memory.data_ptr() + memory.numel()
    return [low <= p.grad.data_ptr() < high for p in compiled.parameters()]


@pytest.mark.parametrize("gradients", ["arena", "outside"])
def test_gradients_that_are_still_set_are_added_to(gradients: Any) -> None:
    reference, compiled = _compiled(gradients=gradients, sanitize="poison")
    for shape in ((3, 8), (2, 7), (2, 7), (32, 48)):  # in programs with an arena that grows
        inputs = _inputs(*shape)
        for model in (reference, compiled):
            torch.manual_seed(0)
            model(*inputs).square().mean().backward()
        assert same_gradients(reference, compiled)
    assert gradients == "arena" or not any(_in_arena(compiled))
    views = [p.grad[:1] for p in compiled.parameters()]
    values = [view.clone() for view in views]
    reference.zero_grad()
    for shape in ((3, 8), (32, 48)):
        _require_equal(reference, compiled, _inputs(*shape))
    assert all(map(torch.equal, views, values)), "a view of a gradient keeps its bytes while shapes change"
    _step(compiled, _inputs(3, 8))
    assert all(_in_arena(compiled)) is (gradients == "arena")
