"""In-place reuse: every op of the list gives the bits that it gives into memory of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from memplan.errors import InvalidPlan
from memplan.graph import Graph, Op, Origin, Phase, Storage, StorageKind, Value, check_graph
from memplan.inplace import POINTWISE, ROWWISE, with_chances
from memplan.schedule.reuse import placed

_MORE = {  # what an op takes beside its tensors
    "pow.Tensor_Scalar": (3.0,),
    "clamp.default": (-0.5, 0.5),
    "clamp_min.default": (0.1,),
    "clamp_max.default": (0.1,),
    "lerp.Scalar": (0.3,),
    "threshold_backward.default": (0.1,),
    "mse_loss_backward.default": (1,),
    "_softmax.default": (-1, False),
    "_log_softmax.default": (-1, False),
    "_softmax_backward_data.default": (-1, torch.float32),
    "_log_softmax_backward_data.default": (-1, torch.float32),
}


def _overload(name: str) -> torch._ops.OpOverload:
    packet, overload = name.removeprefix("aten.").split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", sorted(POINTWISE | ROWWISE))
@pytest.mark.parametrize("shape", [(7,), (5, 1003), (3, 17, 64)])
def test_in_place_gives_the_same_bits(name: str, shape: tuple[int, ...]) -> None:
    from memplan.trace.outvariants import out_names, out_variant

    op = _overload(name)
    if any(a.is_out for a in op._schema.arguments):  # a rule calls the out overload itself
        variant, names = op, out_names(op)
    else:
        found = out_variant(op)
        if found is None:
            pytest.skip(f"{name} has no true out variant: it runs functionally, and may go anywhere")
        variant, names = found, out_names(found)
    tensors = [
        a for a in op._schema.arguments if "Tensor" in str(a.type) and not a.is_out and not a.has_default_value()
    ]
    tensors = [a for a in tensors if str(a.type) == "Tensor"]
    generator = torch.Generator().manual_seed(0)
    boolean = any(word in name for word in ("bitwise", "logical"))
    given = [torch.rand(shape, generator=generator) * 1.8 - 0.9 for _ in tensors]
    if any(word in name for word in ("log.", "sqrt", "rsqrt", "reciprocal")):
        given = [g.abs() + 0.1 for g in given]
    if boolean:
        given = [g > 0 for g in given]
    if name == "aten.where.self":
        given[0] = given[0] > 0
    more = _MORE.get(name.removeprefix("aten."), ())
    for i, overwritten in enumerate(given):
        fresh = torch.empty_like(given[-1])
        if overwritten.dtype != fresh.dtype:
            continue
        variant(*given, *more, **{names[0]: fresh})
        inputs = [g.clone() for g in given]
        variant(*inputs, *more, **{names[0]: inputs[i]})
        assert torch.equal(inputs[i], fresh), f"argument {i}"


def _graph(target: str, *, direct: bool, strides: tuple[int, ...], later: bool) -> Graph:
    """x -> op(x) -> y; `later`: x is read again afterwards."""
    origin = Origin()
    storages = tuple(
        Storage(name=n, nbytes=64, device="cpu", kind=StorageKind.ACTIVATION, planned=True, origin=origin)
        for n in "xyz"
    )
    values = tuple(
        Value(name=n, storage=i, dtype="float32", shape=(4, 4), strides=strides if n == "x" else (4, 1), offset=0)
        for i, n in enumerate("xyz")
    )

    def op(name: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> Op:
        return Op(
            name=name,
            target=target if name == "op" else "aten.mm.default",
            phase=Phase.FORWARD,
            reads=reads,
            writes=writes,
            direct=direct if name == "op" else True,
            random=False,
            origin=origin,
        )

    ops = (op("make", (), (0,)), op("op", (0,), (1,)), op("use", (0, 1) if later else (1,), (2,)))
    return Graph(ops=ops, values=values, storages=storages, outputs=(), gradients=())


@pytest.mark.parametrize(
    ("target", "direct", "strides", "later", "reused"),
    [
        ("aten.tanh.default", True, (4, 1), False, True),
        ("aten.tanh.default", True, (4, 1), True, False),  # x is still needed
        ("aten.tanh.default", True, (1, 4), False, False),  # another index
        ("aten.mm.default", True, (4, 1), False, False),  # reads what it has already written
        ("aten.conv.default", False, (1, 4), False, True),  # returns fresh memory first
    ],
)
def test_when_bytes_are_reused(target: str, direct: bool, strides: tuple[int, ...], later: bool, reused: bool) -> None:
    graph = with_chances(_graph(target, direct=direct, strides=strides, later=later))
    check_graph(graph)
    assert with_chances(graph) == graph
    values = placed(graph, (0, 1, 2)).values
    assert (values[1].storage == values[0].storage) is reused
    assert values[2].storage == 2


def test_a_chance_that_cannot_be_is_refused() -> None:
    graph = with_chances(_graph("aten.tanh.default", direct=True, strides=(4, 1), later=False))
    assert graph.ops[1].chances == ((1, 0),)
    for chances in (((1, 1),), ((0, 0),), ((2, 0),)):
        ops = (graph.ops[0], replace(graph.ops[1], chances=chances), graph.ops[2])
        with pytest.raises(InvalidPlan, match=r"graph\.ops\[1\]\.chances\[0\]"):
            check_graph(replace(graph, ops=ops))
    with pytest.raises(InvalidPlan, match="cannot be"):
        check_graph(replace(graph, outputs=(0,)))
    smaller = replace(graph.storages[1], nbytes=32)
    with pytest.raises(InvalidPlan, match="do not fit"):
        check_graph(replace(graph, storages=(graph.storages[0], smaller, graph.storages[2])))
