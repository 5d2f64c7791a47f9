"""In-place reuse: every op of the list gives the bits that it gives into memory of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from memplan.core.graph import Graph, Op, Origin, Phase, Storage, StorageKind, Value, check_graph
from memplan.core.in_place import COMPLEX_PRODUCTS, POINTWISE, ROWWISE, placed, with_candidates, with_inplace_candidates
from memplan.errors import InvalidPlan

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
    from memplan.trace.passes.nodes import out_names, out_variant

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


_COMPLEX = """
    neg.default exp.default log.default reciprocal.default sqrt.default rsqrt.default sin.default
    cos.default tanh.default sigmoid.default silu.default where.self
"""


def _complex_layouts(*shape: int) -> Iterator[torch.Tensor]:
    """Complex numbers in memory that is contiguous, transposed, and with gaps."""
    yield torch.randn(*shape, dtype=torch.complex64)
    yield torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=torch.complex64).transpose(-1, -2)
    yield torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.complex64)[..., ::2]


@pytest.mark.parametrize("name", _COMPLEX.split())
def test_complex_numbers_have_the_same_bits_in_place(name: str) -> None:
    from memplan.trace.passes.nodes import out_names, out_variant

    assert f"aten.{name}" in POINTWISE - COMPLEX_PRODUCTS
    op = _overload(name)
    variant = out_variant(op)
    assert variant is not None
    others = [a for a in op._schema.arguments if str(a.type) == "Tensor"][1:]
    compared = 0
    for shape in ((5, 5), (2, 33, 17)):
        for first, second in itertools.product(_complex_layouts(*shape), repeat=2):
            given = [first, second][: 1 + len(others)]
            if name == "where.self":
                given = [first.real > 0, first, second]
            fresh = op(*given)
            for i, overwritten in enumerate(given):
                if overwritten.dtype is fresh.dtype and overwritten.stride() == fresh.stride():
                    inputs = [torch.empty_strided(g.shape, g.stride(), dtype=g.dtype).copy_(g) for g in given]
                    variant(*inputs, **{out_names(variant)[0]: inputs[i]})
                    assert torch.equal(torch.view_as_real(inputs[i]), torch.view_as_real(fresh)), f"argument {i}"
                    compared += 1
    assert compared


@pytest.mark.parametrize("target", sorted(COMPLEX_PRODUCTS))
def test_products_of_complex_numbers_are_not_in_place(target: str) -> None:
    graph = _graph(target, direct=True, strides=(4, 1), later=False)
    assert with_inplace_candidates(graph).ops[1].inplace_candidates
    numbers = replace(graph, values=tuple(replace(v, dtype="complex64") for v in graph.values))
    assert not with_inplace_candidates(numbers).ops[1].inplace_candidates
    functional = replace(graph.ops[1], direct=False)
    assert (
        with_inplace_candidates(replace(numbers, ops=(graph.ops[0], functional, graph.ops[2])))
        .ops[1]
        .inplace_candidates
    )


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
    graph = with_inplace_candidates(_graph(target, direct=direct, strides=strides, later=later))
    check_graph(graph)
    assert with_inplace_candidates(graph) == graph
    values = placed(graph, (0, 1, 2)).values
    assert (values[1].storage == values[0].storage) is reused
    assert values[2].storage == 2


def test_a_chance_that_cannot_be_is_refused() -> None:
    graph = with_inplace_candidates(_graph("aten.tanh.default", direct=True, strides=(4, 1), later=False))
    assert graph.ops[1].inplace_candidates == ((1, 0),)
    for inplace_candidates in (((1, 1),), ((0, 0),), ((2, 0),)):
        ops = (graph.ops[0], replace(graph.ops[1], inplace_candidates=inplace_candidates), graph.ops[2])
        with pytest.raises(InvalidPlan, match=r"graph\.ops\[1\]\.inplace_candidates\[0\]"):
            check_graph(replace(graph, ops=ops))
    with pytest.raises(InvalidPlan, match="cannot be"):
        check_graph(replace(graph, outputs=(0,)))
    smaller = replace(graph.storages[1], nbytes=32)
    with pytest.raises(InvalidPlan, match="do not fit"):
        check_graph(replace(graph, storages=(graph.storages[0], smaller, graph.storages[2])))


def _storage(graph: Graph, index: int, **changes: Any) -> Graph:
    storages = list(graph.storages)
    storages[index] = replace(storages[index], **changes)
    return replace(graph, storages=tuple(storages))


def _value(graph: Graph, index: int, **changes: Any) -> Graph:
    values = list(graph.values)
    values[index] = replace(values[index], **changes)
    return replace(graph, values=tuple(values))


def _inplace_candidates(graph: Graph) -> tuple[tuple[int, int], ...]:
    return with_inplace_candidates(graph).ops[1].inplace_candidates


def _usual(target: str = "aten.tanh.default", *, direct: bool = True) -> Graph:
    return _graph(target, direct=direct, strides=(4, 1), later=False)


@pytest.mark.parametrize(
    ("index", "changes"),
    [
        (0, {"planned": False}),  # the caller's input, or a parameter
        (1, {"planned": False}),  # the result is the caller's
        (0, {"nbytes": 128}),  # a part of something larger
        (0, {"device": "cuda"}),
        (0, {"nbytes": 0}),
    ],
)
@pytest.mark.parametrize("direct", [True, False])
def test_both_storages_are_planned_of_one_size_and_on_one_device(
    index: int, changes: dict[str, object], *, direct: bool
) -> None:
    graph = _usual(direct=direct)
    assert _inplace_candidates(graph) == ((1, 0),)
    assert _inplace_candidates(_storage(graph, index, **changes)) == ()


@pytest.mark.parametrize(
    ("index", "changes"),
    [
        (0, {"planned": False}),
        (1, {"planned": False}),
        (0, {"nbytes": 32}),
        (0, {"nbytes": 128}),
        (0, {"device": "a"}),
        (0, {"device": "z"}),
    ],
)
def test_what_a_kernel_is_known_to_allow_is_of_one_size_on_one_device_too(
    index: int, changes: dict[str, object]
) -> None:
    graph = _usual("aten.mm.default")
    assert with_candidates(graph, [(1, 0), (2, 0)]).ops[1].inplace_candidates == ((1, 0),)
    assert with_candidates(_storage(graph, index, **changes), [(1, 0)]) == _storage(graph, index, **changes)
    assert with_candidates(replace(graph, outputs=(index,)), [(1, 0)]).ops == graph.ops
    overwritten = replace(graph.ops[1], writes=(1, 0))
    assert with_candidates(replace(graph, ops=(graph.ops[0], overwritten)), [(1, 0)]).ops[1] == overwritten
    born = replace(graph.ops[0], writes=(0, 1))
    assert with_candidates(replace(graph, ops=(born, graph.ops[1])), [(1, 0)]).ops == (born, graph.ops[1])


def test_storages_without_bytes_take_no_part() -> None:
    graph = _usual(direct=False)
    assert _inplace_candidates(_storage(_storage(graph, 0, nbytes=0), 1, nbytes=0)) == ()


@pytest.mark.parametrize("kept", ["outputs", "gradients"])
@pytest.mark.parametrize("value", [0, 1])
def test_what_the_caller_keeps_takes_no_part(kept: str, value: int) -> None:
    """Neither are its bytes taken, nor does it lie in others'."""
    graph = _usual()
    assert _inplace_candidates(replace(graph, **{kept: (value,)})) == ()  # type: ignore[arg-type]
    assert _inplace_candidates(replace(graph, **{kept: (2,)})) == ((1, 0),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("index", "changes"),
    [
        (0, {"offset": 1}),
        (0, {"dtype": "int32"}),
        (0, {"shape": (2, 4)}),
        (0, {"shape": (16,), "strides": (1,)}),
        (1, {"offset": 1}),  # the result is a part of its storage
        (1, {"shape": (0, 4)}),
        (1, {"strides": (8, 1)}),
    ],
)
def test_a_kernel_reads_the_places_that_it_writes(index: int, changes: dict[str, object]) -> None:
    assert _inplace_candidates(_value(_usual(), index, **changes)) == ()


@pytest.mark.parametrize("changes", [{"offset": 1}, {"shape": (0, 4)}, {"strides": (8, 1)}])
@pytest.mark.parametrize("direct", [True, False])
def test_only_a_result_that_is_all_of_its_storage_takes_bytes(changes: dict[str, object], *, direct: bool) -> None:
    graph = _usual(direct=direct)
    assert _inplace_candidates(_value(_value(graph, 0, **changes), 1, **changes)) == ()


def test_all_that_a_kernel_reads_of_an_input_lies_where_it_writes() -> None:
    """tanh of x and of x transposed: one of the two would be read after its place was written."""
    graph = _usual()
    transposed = replace(graph.values[0], name="xt", strides=(1, 4))
    two = replace(graph, values=(*graph.values, transposed))
    for reads in ((0, 3), (3, 0)):
        make, op, use = two.ops
        assert _inplace_candidates(replace(two, ops=(make, replace(op, reads=reads), use))) == ()
    make, op, use = two.ops
    assert _inplace_candidates(replace(two, ops=(make, replace(op, reads=(0, 3), direct=False), use))) == ((1, 0),)


def test_an_input_that_the_op_changes_is_not_taken() -> None:
    make, op, use = _usual().ops
    assert _inplace_candidates(replace(_usual(), ops=(make, replace(op, writes=(1, 0)), use))) == ()


def test_a_result_that_was_there_before_is_not_put_elsewhere() -> None:
    make, op, use = _usual().ops
    assert _inplace_candidates(replace(_usual(), ops=(replace(make, writes=(0, 1)), op, use))) == ()


@pytest.mark.parametrize("target", sorted(ROWWISE))
def test_rows_are_overwritten_on_the_cpu_only(target: str) -> None:
    graph = _usual(target)
    assert _inplace_candidates(graph) == ((1, 0),)
    elsewhere = replace(graph, storages=tuple(replace(s, device="cuda") for s in graph.storages))
    assert _inplace_candidates(elsewhere) == ()
    assert _inplace_candidates(replace(elsewhere, ops=_usual("aten.tanh.default").ops)) == ((1, 0),)
    mixed = _storage(graph, 2, device="cuda")  # op reads x alone; its mask is on another device
    make, op, use = mixed.ops
    assert _inplace_candidates(replace(mixed, ops=(make, replace(op, reads=(0, 2)), use))) == ()


def test_a_copy_is_pointwise() -> None:
    assert _inplace_candidates(_usual("aten.copy_.default")) == ((1, 0),)


def test_what_the_caller_keeps_and_another_op_made_is_not_put_elsewhere() -> None:
    """A planned gradient is written a second time, from a sum that has its last use there."""
    make, op, _ = _usual().ops
    graph = replace(_usual(), gradients=(1,))
    twice = replace(graph, ops=(replace(make, writes=(1,)), replace(make, name="sum", writes=(0,)), op))
    assert [o.inplace_candidates for o in with_inplace_candidates(twice).ops] == [(), (), ()]


def test_only_what_is_read_of_the_same_storage_must_lie_where_the_kernel_writes() -> None:
    """The input that is laid out as the result gives its bytes, whatever the other's layout and place."""
    graph = _usual()
    other = replace(graph.values[0], name="other", storage=3, strides=(1, 4))
    for read in ((0, 3), (3, 0)):
        storages = (*graph.storages, replace(graph.storages[0], name="other"))
        wide = replace(graph, storages=storages, values=(*graph.values, other))
        make, op, use = wide.ops
        ops = (replace(make, writes=(0, 3)), replace(op, reads=read), use)
        assert _inplace_candidates(replace(wide, ops=ops)) == ((1, 0),)
    # The same with the layouts exchanged: now the later storage gives its bytes.
    turned = _value(
        replace(graph, storages=(*graph.storages, replace(graph.storages[0], name="other"))), 0, strides=(1, 4)
    )
    turned = replace(turned, values=(*turned.values, replace(graph.values[0], name="other", storage=3)))
    make, op, use = turned.ops
    ops = (replace(make, writes=(0, 3)), replace(op, reads=(0, 3)), use)
    assert _inplace_candidates(replace(turned, ops=ops)) == ((1, 3),)


def test_each_input_is_named_once_in_the_order_of_its_first_read() -> None:
    graph = _usual(direct=False)
    make, op, use = graph.ops
    again = replace(graph.values[0], name="again")
    twice = replace(graph, values=(*graph.values, again), ops=(make, replace(op, reads=(3, 0)), use))
    assert _inplace_candidates(twice) == ((1, 3),)
