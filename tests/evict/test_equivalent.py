"""The oracle of evictions, held against graphs that leave something out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.core.evictions import OFFLOAD, OFFLOAD_WAIT, RELOAD, RELOAD_WAIT
from memplan.core.graph import Graph, Op, Phase, StorageKind, Value
from memplan.errors import InvalidEviction
from memplan.evict import equivalent
from memplan.evict.apply import apply
from memplan.evict.equivalent import require_equivalent
from memplan.evict.workload import Event, Kind
from tests.evict.judge import judged, workload_of
from tests.graph_strategies import GraphBuilder


def _filled(part: int) -> Graph:
    """16 bytes are written whole, then their first `part` again; a last op reads all of them."""
    b = GraphBuilder()
    given = b.storage(StorageKind.INPUT, 8, planned=False)
    made = b.storage(StorageKind.ACTIVATION, 16, planned=True)
    first = b.view(1, part)
    out = b.storage(StorageKind.OUTPUT, 4, planned=False)
    b.op(Phase.FORWARD, (given,), (made,))
    b.op(Phase.FORWARD, (given,), (first,))
    b.op(Phase.FORWARD, (made,), (out,))
    return Graph(ops=tuple(b.ops), values=tuple(b.values), storages=tuple(b.storages), outputs=(out,), gradients=())


def _late_first(graph: Graph) -> tuple[Graph, tuple[int, ...]]:
    """The same with its first op moved behind the second."""
    order = (1, 0, 2)
    return replace(graph, ops=tuple(graph.ops[i] for i in order)), order


@pytest.mark.parametrize("part", [0, 1, 8, 15])
def test_a_write_of_some_bytes_leaves_the_others_as_they_were(part: int) -> None:
    graph = _filled(part)
    require_equivalent(graph, graph, (0, 1, 2))
    with pytest.raises(InvalidEviction, match="op2"):
        require_equivalent(graph, *_late_first(graph))
    unwritten = replace(graph, ops=(graph.ops[0], graph.ops[1], graph.ops[1], graph.ops[2]))
    with pytest.raises(InvalidEviction):
        require_equivalent(graph, unwritten, (0, 1, 1, 2))


def test_a_write_of_all_bytes_forgets_what_was_there() -> None:
    graph = _filled(16)
    twice = replace(graph, ops=(*graph.ops[:2], graph.ops[1], graph.ops[2]))
    require_equivalent(graph, twice, (0, 1, 1, 2))


def _batch_norm() -> Graph:
    """op0 makes y of x, and the next running mean of x and the running mean; the mean is updated, and both results are
    read after that. `other` is of the mean's layout."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, 64, planned=False)
    mean, other = (b.storage(StorageKind.PARAMETER, 16, planned=False) for _ in range(2))
    y, after = (b.storage(StorageKind.ACTIVATION, nbytes, planned=True) for nbytes in (64, 16))
    one, two, three = (b.storage(StorageKind.OUTPUT, 64, planned=False) for _ in range(3))
    b.op(Phase.FORWARD, (x, mean), (y, after))
    b.op(Phase.FORWARD, (after,), (mean,))
    b.op(Phase.FORWARD, (y,), (one,))
    b.op(Phase.FORWARD, (y,), (two,))
    b.op(Phase.FORWARD, (after,), (three,))
    graph = b.graph((one, two, three))
    assert other == 2
    return replace(graph, ops=(replace(graph.ops[0], unrelated=((y, mean),)), *graph.ops[1:]))


_NORM_AGAIN = tuple(
    Event(kind, of)
    for kind, of in (
        (Kind.RUN, 0),
        (Kind.RUN, 1),
        (Kind.RUN, 2),
        (Kind.DROP, 3),
        (Kind.RUN, 0),
        (Kind.RUN, 3),
        (Kind.RUN, 4),
    )
)


def test_a_batch_norm_runs_again_although_its_running_mean_has_changed() -> None:
    graph = _batch_norm()
    applied, _ = judged(graph, workload_of(graph), _NORM_AGAIN)
    again = applied.graph.ops[3]
    assert (again.name, applied.graph.values[again.writes[0]].name) == ("op0@1", "v3@1")
    assert again.unrelated == ((again.writes[0], 1),)


def test_a_second_run_makes_another_running_mean() -> None:
    """Made of a mean that was updated: whoever reads it in the first one's place would find other numbers."""
    graph = _batch_norm()
    applied = apply(workload_of(graph), _NORM_AGAIN)
    *others, again, two, three = applied.graph.ops
    tampered = replace(three, reads=(again.writes[1],))
    with pytest.raises(InvalidEviction, match=r"^op4: does not find what op4 does"):
        require_equivalent(graph, _with(applied.graph, *others, again, two, tampered), applied.sources)


def test_a_first_run_finds_what_it_reads_even_if_a_result_does_not_depend_on_it() -> None:
    graph = _batch_norm()
    other = replace(graph.ops[0], reads=(0, 2), unrelated=((3, 2),))
    with pytest.raises(InvalidEviction, match=r"^op0: does not find what op0 does"):
        require_equivalent(graph, replace(graph, ops=(other, *graph.ops[1:])), range(5))


def _copied() -> tuple[Graph, Graph]:
    """a is made of x and read twice; evicted, it goes to the host and comes back as another storage."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, 64, planned=False)
    a = b.storage(StorageKind.ACTIVATION, 64, planned=True)
    one, two = (b.storage(StorageKind.OUTPUT, 64, planned=False) for _ in range(2))
    b.op(Phase.FORWARD, (x,), (a,))
    b.op(Phase.FORWARD, (a,), (one,))
    b.op(Phase.FORWARD, (a,), (two,))
    traced = b.graph((one, two))
    host = b.storage(StorageKind.HOST, 64, planned=False)
    back = b.storage(StorageKind.ACTIVATION, 64, planned=True)
    for target, reads, writes in (
        (OFFLOAD, (a,), (host,)),
        (OFFLOAD_WAIT, (a, host), (host,)),
        (RELOAD, (host,), (back,)),
        (RELOAD_WAIT, (host, back), (back,)),
    ):
        b.op(Phase.FORWARD, reads, writes, target=target)
    uses = (replace(op, reads=(back,)) for op in traced.ops[1:])
    evicted = b.graph((one, two))
    return traced, replace(evicted, ops=(traced.ops[0], *evicted.ops[3:], *uses))


def _with(graph: Graph, *ops: Op) -> Graph:
    return replace(graph, ops=ops)


def test_what_a_copy_writes_is_not_written_beside_it() -> None:
    """The copy brings the very bytes that the op writes: only their coming at once is wrong."""
    traced, evicted = _copied()
    require_equivalent(traced, evicted, (0, -1, -1, -1, -1, 1, 2))
    make, *copies, one, two = evicted.ops
    again = replace(make, name="again", writes=(5,))
    tampered = _with(evicted, make, *copies[:3], again, copies[3], one, two)
    with pytest.raises(InvalidEviction, match=r"^again: uses activation_5 before op5 has ended"):
        require_equivalent(traced, tampered, (0, -1, -1, -1, 0, -1, 1, 2))
    require_equivalent(traced, _with(evicted, make, *copies, again, one, two), (0, -1, -1, -1, -1, 0, 1, 2))


def test_what_a_copy_reads_is_not_written_beside_it() -> None:
    traced, evicted = _copied()
    make, *copies, one, two = evicted.ops
    again = replace(make, name="again")
    with pytest.raises(InvalidEviction, match=r"^again: changes activation_1 while op3 copies it"):
        require_equivalent(
            traced, _with(evicted, make, copies[0], again, *copies[1:], one, two), (0, -1, 0, -1, -1, -1, 1, 2)
        )


def test_no_copy_is_under_way_at_the_end() -> None:
    traced, evicted = _copied()
    make, *copies, _, _ = evicted.ops
    with pytest.raises(InvalidEviction, match="a copy is still under way at the end"):
        require_equivalent(traced, _with(evicted, make, *traced.ops[1:], copies[0]), (0, 1, 2, -1))


def test_what_the_caller_keeps_is_written_where_it_is_looked_for() -> None:
    """An op that finds all it needs and writes elsewhere: nobody reads it, but the caller."""
    traced, evicted = _copied()
    *others, two = evicted.ops
    tampered = _with(evicted, *others, replace(two, writes=(5,)))
    with pytest.raises(InvalidEviction, match=r"^output_3: is left with another content"):
        require_equivalent(traced, tampered, (0, -1, -1, -1, -1, 1, 2))


def test_what_is_planned_may_be_left_with_another_content() -> None:
    """s is made again elsewhere and changed there: its first place keeps what it was."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, 64, planned=False)
    s = b.storage(StorageKind.ACTIVATION, 64, planned=True)
    one = b.storage(StorageKind.OUTPUT, 64, planned=False)
    for reads, writes in (((x,), (s,)), ((x, s), (s,)), ((s,), (one,))):
        b.op(Phase.FORWARD, reads, writes)
    graph = b.graph((one,))
    events = (Event(Kind.RUN, 0), Event(Kind.DROP, 1), *(Event(Kind.RUN, i) for i in (0, 1, 2)))
    applied, _ = judged(graph, workload_of(graph), events)
    assert len(applied.graph.ops) == 4


def _faulty(evicted: Graph, place: int, **changes: object) -> Graph:
    """The evicted graph with a change of one of its ops."""
    ops = list(evicted.ops)
    ops[place] = replace(ops[place], **changes)  # type: ignore[arg-type]
    return replace(evicted, ops=tuple(ops))


_SOURCES = (0, -1, -1, -1, -1, 1, 2)


@pytest.mark.parametrize(
    ("place", "changes", "message"),
    [
        (1, {"target": "aten.clone"}, r"op3: is not a copy from one storage to another"),
        (1, {"writes": (4, 5)}, r"op3: is not a copy"),
        (1, {"writes": ()}, r"op3: is not a copy"),
        (1, {"reads": (1, 4)}, r"op3: is not a copy"),
        (2, {"reads": (1,)}, r"op4: is not a copy"),
        (2, {"reads": (1, 5)}, r"op4: is not a copy"),
        (2, {"reads": (4, 1)}, r"op4: is not a copy"),
        (3, {"reads": (1,)}, r"op5: is not between the arena and the host"),
        (1, {"reads": (0,)}, r"op3: is not between the arena and the host"),
        (1, {"writes": (5,)}, r"op3: is not between the arena and the host"),
        (1, {"target": "memplan.send"}, r"op3: is not between the arenas of two devices"),
        (2, {"target": "memplan.reload_wait"}, r"op4: is not between the arena and the host"),
    ],
)
def test_copies_go_from_the_arena_to_the_host_and_back(place: int, changes: dict[str, object], message: str) -> None:
    traced, evicted = _copied()
    with pytest.raises(InvalidEviction, match=f"^{message}"):
        require_equivalent(traced, _faulty(evicted, place, **changes), _SOURCES)


@pytest.mark.parametrize(
    "layout",
    [
        {"dtype": "float32", "shape": (16,)},
        {"shape": (32,)},
        {"strides": (2,)},
        {"offset": 1},
        {"shape": (8, 8), "strides": (8, 1)},
    ],
)
def test_copies_are_of_all_bytes(layout: dict[str, object]) -> None:
    traced, evicted = _copied()
    values = (*evicted.values, replace(evicted.values[1], name="part", **layout))  # type: ignore[arg-type]
    part = replace(evicted, values=values)
    with pytest.raises(InvalidEviction, match="op3: does not copy all bytes of a storage to another of its size"):
        require_equivalent(traced, _faulty(part, 1, reads=(len(values) - 1,)), _SOURCES)


def test_copies_are_between_storages_of_one_size() -> None:
    traced, evicted = _copied()
    storages = list(evicted.storages)
    storages[4] = replace(storages[4], nbytes=128)
    with pytest.raises(InvalidEviction, match="op3: does not copy all bytes of a storage to another of its size"):
        require_equivalent(traced, replace(evicted, storages=tuple(storages)), _SOURCES)


def test_what_is_sent_goes_from_one_device_to_another() -> None:
    traced, evicted = _copied()

    def sent(*devices: str, planned: bool = True) -> None:
        storages = list(evicted.storages)
        storages[1] = replace(storages[1], device=devices[0])
        storages[5] = replace(storages[5], device=devices[1], planned=planned)
        make, send, wait, *_, one, two = evicted.ops
        send = replace(send, target="memplan.send", writes=(5,))
        wait = replace(wait, target="memplan.send_wait", reads=(1, 5), writes=(5,))
        graph = replace(evicted, storages=tuple(storages), ops=(make, send, wait, one, two))
        require_equivalent(traced, graph, (0, -1, -1, 1, 2))

    sent("cuda:0", "cuda:1")
    for devices, planned in ((("cuda:0", "cuda:0"), True), (("cuda:0", "cuda:1"), False)):
        with pytest.raises(InvalidEviction, match="op3: is not between the arenas of two devices"):
            sent(*devices, planned=planned)


def test_a_wait_is_for_a_copy_that_was_started() -> None:
    traced, evicted = _copied()
    make, offload, wait, *rest = evicted.ops
    with pytest.raises(InvalidEviction, match=r"op4: waits for a copy of activation_1 to host copy_4 that was not st"):
        require_equivalent(traced, _with(evicted, make, wait, offload, *rest), _SOURCES)
    with pytest.raises(InvalidEviction, match=r"op4: waits for a copy"):
        require_equivalent(traced, _with(evicted, make, offload, wait, wait, *rest), (0, -1, *_SOURCES[1:]))


def test_a_destination_holds_nothing_of_use_before_the_wait() -> None:
    traced, evicted = _copied()
    make, offload, wait, reload, reload_wait, one, two = evicted.ops
    with pytest.raises(InvalidEviction, match=r"op1: uses activation_5 before op5 has ended"):
        require_equivalent(traced, _with(evicted, make, offload, wait, reload, one, reload_wait, two),
                           (0, -1, -1, -1, 1, -1, 2))  # fmt: skip
    with pytest.raises(InvalidEviction, match=r"op5: uses host copy_4 before op3 has ended"):
        require_equivalent(traced, _with(evicted, make, offload, reload, wait, reload_wait, one, two), _SOURCES)


def test_sources_name_an_op_for_each_op() -> None:
    traced, evicted = _copied()
    with pytest.raises(InvalidEviction, match=r"^sources: 6 sources for 7 ops"):
        require_equivalent(traced, evicted, _SOURCES[:-1])
    for source in (3, 9):
        with pytest.raises(InvalidEviction, match="op2: is not an op of the traced graph"):
            require_equivalent(traced, evicted, (*_SOURCES[:-1], source))
    with pytest.raises(InvalidEviction, match="op2: is not an op of the traced graph"):
        require_equivalent(traced, _faulty(evicted, 6, target="aten.other"), _SOURCES)
    with pytest.raises(InvalidEviction, match="op2: does not find what op0 does"):
        require_equivalent(traced, evicted, (*_SOURCES[:-1], 0))


def test_every_op_runs_and_what_shows_runs_once() -> None:
    traced, evicted = _copied()
    with pytest.raises(InvalidEviction, match=r"^op2: runs 0 times"):
        require_equivalent(traced, _with(evicted, *evicted.ops[:-1]), _SOURCES[:-1])
    with pytest.raises(InvalidEviction, match=r"^op2: runs 2 times"):
        require_equivalent(traced, _with(evicted, *evicted.ops, evicted.ops[-1]), (*_SOURCES, 2))
    random = [_with(graph, replace(graph.ops[0], random=True), *graph.ops[1:]) for graph in (traced, evicted)]
    with pytest.raises(InvalidEviction, match=r"^op0: draws random numbers again, without"):
        require_equivalent(random[0], _with(random[1], random[1].ops[0], *random[1].ops), (0, *_SOURCES))
    check = replace(traced.ops[0], name="check", writes=())  # it may only raise
    checked = [_with(graph, *graph.ops, check) for graph in (traced, evicted)]
    require_equivalent(checked[0], checked[1], (*_SOURCES, 3))
    with pytest.raises(InvalidEviction, match=r"^check: runs 2 times"):
        require_equivalent(checked[0], _with(checked[1], *checked[1].ops, check), (*_SOURCES, 3, 3))
    require_equivalent(traced, _with(evicted, evicted.ops[0], *evicted.ops), (0, *_SOURCES))


def test_random_ops_keep_their_order() -> None:
    b = GraphBuilder()
    made = [b.storage(StorageKind.OUTPUT, 8, planned=False) for _ in range(3)]
    for i, value in enumerate(made):
        b.op(Phase.FORWARD, (), (value,), random=i != 1)
    graph = b.graph(tuple(made))
    for order, legal in (((0, 1, 2), True), ((1, 0, 2), True), ((0, 2, 1), True), ((2, 0, 1), False)):
        ops = tuple(graph.ops[i] for i in order)
        if legal:
            require_equivalent(graph, replace(graph, ops=ops), order)
            continue
        with pytest.raises(InvalidEviction, match="random ops run in another order"):
            require_equivalent(graph, replace(graph, ops=ops), order)


def test_the_same_values_are_returned() -> None:
    traced, evicted = _copied()
    for change in ({"outputs": (3, 2)}, {"outputs": (2,)}, {"gradients": (2,)}):
        with pytest.raises(InvalidEviction, match="returns other values"):
            require_equivalent(traced, replace(evicted, **change), _SOURCES)


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        ("uint8", 1),
        ("bool", 1),
        ("bfloat16", 2),
        ("float32", 4),
        ("int64", 8),
        ("complex128", 16),
        ("float8_e4m3fn", 1),
    ],
)
def test_bytes_of_an_element(dtype: str, nbytes: int) -> None:
    value = Value(name="v", storage=0, dtype=dtype, shape=(), strides=(), offset=0)
    assert value.itemsize == nbytes


def test_a_value_covers_its_storage_where_it_is_dense_and_long_enough() -> None:
    graph = _filled(16)
    value = replace(graph.values[1], dtype="float32", shape=(4,), strides=(1,))
    assert equivalent._whole(graph, value)
    assert equivalent._whole(graph, replace(value, shape=(2, 2), strides=(2, 1)))
    assert not equivalent._whole(graph, replace(value, offset=1))
    assert not equivalent._whole(graph, replace(value, shape=(3,)))
    assert not equivalent._whole(graph, replace(value, shape=(4,), strides=(0,)))
    assert not equivalent._whole(graph, replace(value, dtype="int16"))
