"""Sums of products and of scattered rows in Inductor's code, which need no bytes of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.core.graph import Origin
from memplan.trace.fused import row_division
from memplan.trace.fused.kernel_runs import Block, BlockView, KernelRun
from memplan.trace.fused.sums import scatter_into_summands, sum_products, with_sums_in_place
from tests.runtime.test_inductor_division import WIDE, _made, _tokens

aten: Any = torch.ops.aten
SHAPES = ((6, 3), (3, 4), (6, 5), (5, 4), (6, 2), (2, 4))


def _graph(
    *,
    swapped: bool = False,
    read_twice: bool = False,
    alpha: bool = False,
    forward: bool = False,
    one_product: bool = False,
    wide: bool = False,
    early: bool = False,
) -> fx.Graph:
    """Return a graph that adds up views of three products; `early`: all are made before the first sum."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made: fx.Node = graph.call_function(target, args, kwargs)
        with mode:
            made.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        made.meta["partitioner_tag"] = "is_forward" if forward else "is_backward"
        return made

    given = []
    for i, shape in enumerate(SHAPES):
        given.append(graph.placeholder(f"given_{i}"))
        given[-1].meta["val"] = mode.from_tensor(torch.rand(shape))
    if one_product:
        mine = node(aten.mm.default, given[0], given[1])
        graph.output((node(aten.add.Tensor, mine, mine),))
        return graph
    products, views = [], []

    def product(i: int) -> None:
        products.append(node(aten.mm.default, given[2 * i], given[2 * i + 1]))
        view = node(aten.view.default, products[-1], [2, 3, 4])
        if wide:  # the sum is made in more digits than its products
            view = node(torch.ops.prims.convert_element_type.default, view, torch.float64)
        views.append(view)

    for i in range(3 if early else 2):
        product(i)
    first = node(aten.add.Tensor, *(views[1::-1] if swapped else views[:2]), **({"alpha": 2} if alpha else {}))
    if not early:
        product(2)
    total = node(aten.add.Tensor, views[2], first) if swapped else node(aten.add.Tensor, first, views[2])
    graph.output((total, products[1], first) if read_twice else (total,))
    return graph


def _run(graph: fx.Graph) -> torch.Tensor:
    torch.manual_seed(0)
    total: torch.Tensor = fx.GraphModule({}, graph)(*(torch.rand(shape) for shape in SHAPES))[0]
    return total


@pytest.mark.parametrize("swapped", [False, True])
def test_products_are_added_to_the_one_before(swapped: bool) -> None:
    graph = _graph(swapped=swapped)
    expected = _run(graph)
    assert sum_products(graph) == 2
    calls = [node.target for node in graph.nodes if node.op == "call_function"]
    assert calls.count(aten.mm.default) == 1
    assert calls.count(aten.addmm.default) == 2
    assert aten.add.Tensor not in calls
    assert all(n.meta["partitioner_tag"] == "is_backward" for n in graph.nodes if n.op == "call_function")
    torch.testing.assert_close(_run(graph), expected)


def test_a_product_that_is_made_early_stays_where_it_is() -> None:
    """Added later, it would keep what it reads."""
    graph = _graph(early=True)
    expected = _run(graph)
    assert sum_products(graph) == 1
    calls = [node.target for node in graph.nodes if node.op == "call_function"]
    assert (calls.count(aten.mm.default), calls.count(aten.add.Tensor)) == (2, 1)
    torch.testing.assert_close(_run(graph), expected)


@pytest.mark.parametrize("other", ["read_twice", "forward", "one_product", "wide", "alpha"])
def test_other_sums_stay_as_they_are(other: str) -> None:
    graph = _graph(**{other: True})
    expected, code = _run(graph), str(graph)
    assert sum_products(graph) == 0
    assert str(graph) == code
    assert torch.equal(_run(graph), expected)


class _Projected(nn.Module):
    """A loss head that is divided, behind what three projections read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.projections = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))
        self.head = nn.Linear(32, 256)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        a, b, c = (projection(x) for projection in self.projections)
        logits: torch.Tensor = self.head(torch.sigmoid(a) * torch.tanh(b) + torch.relu(c))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 8, 32), torch.randint(0, 256, (4, 8))


def test_the_gradients_of_projections_exist_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import memplan

    def products() -> int:
        """Return how many tensors products of the backward make."""
        divide = memplan.Division(blocks=4, sums=True)
        graph = memplan.plan(_Projected(), _batch(), kernels="inductor", divide=divide).graph
        ops = [op for op in graph.ops if op.phase.name == "BACKWARD" and op.target == "aten.mm.out"]
        return sum(graph.storages[s].nbytes == 4 * 8 * 32 * 4 for op in ops for s in graph.written(op))

    made = products()
    monkeypatch.setattr(row_division, "sum_products", lambda _: 0)
    assert products() - made == 2


ROWS, WIDTH = 6, 4


def _graph_scattered(
    base: str = "zeros", *, accumulate: bool = True, late: bool = False, reads_twice: bool = False
) -> fx.Graph:
    """Return a graph that adds rows, scattered into `base`, to a product."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def node(target: Any, *args: Any) -> fx.Node:
        made: fx.Node = graph.call_function(target, args)
        with mode:
            made.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return made

    def given(name: str, value: torch.Tensor) -> fx.Node:
        made = graph.placeholder(name)
        made.meta["val"] = mode.from_tensor(value)
        return made

    left, right = given("left", torch.rand(ROWS, 3)), given("right", torch.rand(3, WIDTH))
    rows, index = given("rows", torch.rand(5, WIDTH)), given("index", torch.tensor([0, 2, 2, 5, 1]))
    product = None if late else node(aten.mm.default, left, right)
    zeros = node(aten.full.default, [ROWS, WIDTH], 0.0 if base == "zeros" else 1.0)
    scattered = node(aten.index_put.default, zeros, [index], rows, accumulate)
    product = product or node(aten.mm.default, left, right)
    result = node(aten.add.Tensor, scattered, product)
    graph.output((result, scattered) if reads_twice else (result,))
    return graph


def _run_scattered(graph: fx.Graph) -> Any:
    torch.manual_seed(0)
    given = torch.rand(ROWS, 3), torch.rand(3, WIDTH), torch.rand(5, WIDTH), torch.tensor([0, 2, 2, 5, 1])
    return fx.GraphModule({}, graph)(*given)[0]


def test_rows_are_scattered_into_the_other_summand() -> None:
    graph = _graph_scattered()
    expected = _run_scattered(graph)
    assert scatter_into_summands(graph) == 1
    assert not graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert not graph.find_nodes(op="call_function", target=aten.full.default)
    torch.testing.assert_close(_run_scattered(graph), expected)


@pytest.mark.parametrize(
    "other", [{"base": "ones"}, {"accumulate": False}, {"late": True}, {"reads_twice": True}], ids=str
)
def test_other_sums_stay_as_they_are_scattered(other: dict[str, Any]) -> None:
    graph = _graph_scattered(**other)
    expected, code = _run_scattered(graph), str(graph)
    assert scatter_into_summands(graph) == 0
    assert str(graph) == code
    assert torch.equal(_run_scattered(graph), expected)


@pytest.mark.slow
def test_the_gradient_of_tied_weights_exists_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import memplan

    def plan() -> memplan.Plan:
        divide = memplan.Division(blocks=4, sums=True)
        return memplan.plan(_made(shifted=False), _tokens(), kernels="inductor", divide=divide)

    def gradients(plan: memplan.Plan) -> int:
        backward = [op for op in plan.graph.ops if op.phase.name == "BACKWARD"]
        written = {s for op in backward for s in plan.graph.written(op)}
        return sum(plan.graph.storages[s].nbytes == WIDE * 16 * 4 for s in written)

    made = plan()
    monkeypatch.setattr(row_division, "scatter_into_summands", lambda _: 0)
    assert (gradients(made), gradients(plan())) == (1, 2)


def _view(name: str, offset: int = 0) -> BlockView:
    block = Block(name=name, device=torch.device("cpu"), nbytes=64)
    return BlockView(block=block, dtype=torch.float32, shape=(4, 4), strides=(4, 1), offset=offset)


def _run_sums(name: str, out: BlockView, *args: BlockView) -> KernelRun:
    return KernelRun(
        name=name,
        function=torch.addmm,
        args=args,
        kwargs={"out": out},
        reads=args,
        writes=(out,),
        results={},
        overload=None,
        source="",
        origin=Origin(),
        known=True,
    )


A, B, ONE, TWO, THREE = map(_view, ("a", "b", "one", "two", "three"))
SUM = "extern_kernels.addmm"
MADE = _run_sums("extern_kernels.mm", ONE, A, B)


def _blocks(runs: list[KernelRun], outputs: tuple[Any, ...] = ()) -> list[Block]:
    made, _ = with_sums_in_place(runs, outputs, {A.block, B.block})
    return [run.writes[0].block for run in made]


def test_sums_one_after_another_are_one_block() -> None:
    runs = [MADE, _run_sums(SUM, TWO, ONE, A, B), _run_sums(SUM, THREE, TWO, A, B)]
    made, outputs = with_sums_in_place(runs, (THREE, 3), {A.block, B.block})
    assert [run.kwargs["out"].block for run in made] == [ONE.block] * 3
    assert [run.args[0].block for run in made[1:]] == [ONE.block] * 2
    assert outputs[0].block is ONE.block
    assert outputs[1] == 3


@pytest.mark.parametrize(
    ("runs", "outputs"),
    [
        ([MADE, _run_sums(SUM, TWO, ONE, A, B), _run_sums("extern_kernels.mm", THREE, ONE, A)], ()),  # read later
        ([MADE, _run_sums(SUM, TWO, ONE, A, B)], (ONE,)),  # returned
        ([MADE, _run_sums(SUM, TWO, ONE, ONE.view((4, 4), (1, 4)), B)], ()),  # multiplied too
        ([MADE, _run_sums(SUM, TWO, ONE, ONE, B)], ()),  # multiplied as it is
        ([MADE, _run_sums(SUM, TWO, ONE, A, ONE)], ()),
        ([MADE, _run_sums("extern_kernels.baddbmm", TWO, ONE, A, B)], ()),
        ([MADE, _run_sums(SUM, TWO, ONE.view((4,), (1,)), A, B)], ()),  # a bias
        ([MADE, _run_sums(SUM, TWO, ONE.view((4, 4), (1, 4)), A, B)], ()),  # laid out otherwise
        ([_run_sums(SUM, TWO, A, A, B)], ()),  # given
    ],
)
def test_other_summands_stay_as_they_are(runs: list[KernelRun], outputs: Any) -> None:
    assert _blocks(runs, outputs) == [run.kwargs["out"].block for run in runs]
