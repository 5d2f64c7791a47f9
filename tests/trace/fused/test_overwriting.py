"""What a generated kernel may write over: what it reads at the same index, and nothing reads later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch._inductor.dependencies import MemoryDep, StarDep
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import ModularIndexing

import memplan
from memplan.core.graph import Op, Phase
from memplan.trace.fused.masked_reads import reads_where_it_writes
from memplan.trace.fused.wrapper import Overwriting
from tests.models import Made
from tests.slow import slow
from tests.steps import outcome_of

# torch's own compilation, which is the reference, imports modules of torch that warn
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROW, COLUMN = sympy.Symbol("d0"), sympy.Symbol("d1")


def _dep(name: str, index: Any = 8 * ROW + COLUMN, mode: str | None = None) -> MemoryDep:
    return MemoryDep(name, index, (ROW, COLUMN), (sympy.Integer(4), sympy.Integer(8)), mode)


class _Loop:
    """A loop with what is asked of Inductor's: its reads and writes, and its only result."""

    def __init__(self, result: str, *reads: Any, write: Any = None, aliases: tuple[str, ...] = ()) -> None:
        writes = {write or _dep(result)}
        self.read_writes = SimpleNamespace(reads={*reads}, writes=writes, reads_and_writes=lambda: {*reads, *writes})
        out = SimpleNamespace(get_name=lambda: result, get_aliases=lambda: aliases, get_mutations=tuple)
        self.is_template, self.get_outputs = (lambda: False), (lambda: [out])


def _found(
    *kernels: list[list[_Loop]], fixed: tuple[str, ...] = (), changed: tuple[str, ...] = (), elements: Any = None
) -> Any:
    """The pairs of kernels, each of which runs loops that were fused into one, one after another."""
    found: dict[str, tuple[str, ...]] = {}
    overwriting = Overwriting(found)
    scheduler = SimpleNamespace(mutation_real_name=dict.fromkeys(changed, "real"))
    with V.set_graph_handler(SimpleNamespace(never_reuse_buffers={*fixed}, scheduler=scheduler)):  # type: ignore[arg-type]
        for kernel in kernels:
            for fused in kernel:
                overwriting.add(fused, elements)
            overwriting.end()
    return found


def test_a_result_may_lie_over_each_read_at_the_same_index() -> None:
    loop = _Loop("r", _dep("a"), _dep("b"), _dep("row", ROW), StarDep("c"))
    found = _found([[loop]])
    assert {name: {*buffers} for name, buffers in found.items()} == {"r": {"a", "b"}}


@pytest.mark.parametrize(
    "kernel",
    [
        [[_Loop("r", _dep("a"))], [_Loop("s", _dep("a", ROW))]],  # a later loop reads it
        [[_Loop("r", _dep("a")), _Loop("s", _dep("a", ROW))]],  # so does a later one of those that were fused
        [[_Loop("s", _dep("a", ROW)), _Loop("r", _dep("a"))]],  # at another index, row by row
        [[_Loop("r", _dep("a", ROW + 4 * COLUMN))]],  # the loop itself reads another index
        [[_Loop("r", _dep("a"), _dep("a", ROW))]],  # and this one both
        [[_Loop("r", _dep("a"), write=_dep("r", mode="atomic_add"))]],
        [[_Loop("r", _dep("a"), write=_dep("other"))]],
        [[_Loop("r", _dep("a"), write=StarDep("r"))]],
        [[_Loop("r", _dep("a"), aliases=("x",))]],
    ],
)
def test_no_result_lies_over_what_is_read_otherwise(kernel: list[list[_Loop]]) -> None:
    assert "a" not in _found(kernel).get("r", ())


def test_a_result_that_is_smaller_than_the_range_of_its_kernel_has_bytes_of_its_own() -> None:
    """Several threads read an element of it, and Inductor knows of no barrier that they would need."""
    loop = _Loop("r", _dep("a"))
    whole = _dep("r").get_numel()
    assert _found([[loop]], elements=whole) == {"r": ("a",)}
    assert not _found([[loop]], elements=4 * whole)


def test_what_inductor_never_reuses_or_changes_elsewhere_stays() -> None:
    loop = [[_Loop("r", _dep("a"))]]
    assert _found(loop, fixed=("a",)) == _found(loop, fixed=("r",)) == _found(loop, changed=("a",)) == {}


def _head(m: Any, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """A loss head whose logits need more than everything else."""
    return nn.functional.cross_entropy(m.head(m.project(x).tanh()), classes)


def _next_head(m: Any, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The head of a language model, whose logits of the last place have no class: their gradient is padded."""
    logits = m.head(m.project(x.view(4, 64, 8)).tanh())[:, :-1]
    return nn.functional.cross_entropy(logits.reshape(-1, 512), classes.view(4, 64)[:, 1:].reshape(-1))


@pytest.mark.parametrize("kind", [slow(_head), _next_head])
def test_the_gradient_of_logits_takes_their_bytes_and_has_inductors_bits(kind: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Made(kind, project=nn.Linear(8, 8), head=nn.Linear(8, 512))
    data = (torch.randn(256, 8), torch.randint(512, (256,)))
    twin = copy.deepcopy(model)
    compiled = memplan.compile(model, data, kernels="inductor")
    logits = 256 * 512 * 4
    assert logits < compiled.plan.arena_size < 1.2 * logits
    assert [op.name for op in compiled.plan.graph.ops if _overwrites(op, compiled.plan, logits)]
    torch._dynamo.reset()
    reference = torch.compile(twin)
    for _ in range(2):
        assert outcome_of(model, compiled, *data).same_as(outcome_of(twin, reference, *data))
    torch._dynamo.reset()


def _overwrites(op: Op, plan: memplan.Plan, nbytes: int) -> bool:
    """Whether an op of the backward may write over a tensor of the forward of so many bytes."""
    graph = plan.graph
    sizes = (graph.storages[graph.values[read].storage].nbytes for _, read in op.inplace_candidates)
    return op.phase is Phase.BACKWARD and nbytes in sizes


ROWS, COLUMNS, LIMIT = 3, 16, 15  # a tensor of rows, of which all columns but the last are read
Body = Callable[[Any, sympy.Symbol, sympy.Symbol], None]


def _packed(row: Any, column: Any) -> Any:
    """The index in the padded tensor of what is at a row and a column of the one that was not padded."""
    flat = LIMIT * row + column
    return COLUMNS * ModularIndexing(flat, LIMIT, ROWS) + ModularIndexing(flat, 1, LIMIT)


class _MaskedLoop:
    """A loop over rows and columns with a body that calls `ops`, as one of Inductor's does."""

    def __init__(self, run: Body, *, reduces: bool = False, template: bool = False) -> None:
        self._run = run
        self._body = self if run is not None else None
        self.iter_vars, self.reduce_vars = list(sympy.symbols("p0 p1")), list[sympy.Symbol]()
        self.var_ranges = dict(zip(self.iter_vars, (sympy.Integer(ROWS), sympy.Integer(COLUMNS)), strict=True))
        self.is_reduction, self.is_template = (lambda: reduces), (lambda: template)

    def __call__(self, indices: list[sympy.Symbol], _: list[sympy.Symbol]) -> None:
        self._run(V.get_ops_handler(), *indices)


def _asked(loop: _MaskedLoop) -> bool:
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):  # type: ignore[arg-type]
        return reads_where_it_writes(loop, "logits")


def _padded(limit: int = LIMIT, index: Callable[[Any, Any], Any] = _packed, **kinds: bool) -> _MaskedLoop:
    """A loop that reads under `column < limit`, and writes zeros beside it."""

    def run(ops: Any, row: sympy.Symbol, column: sympy.Symbol) -> None:
        mask = ops.lt(ops.index_expr(column, torch.int64), ops.constant(limit, torch.int64))
        value = ops.masked(mask, lambda: ops.exp(ops.load("logits", index(row, column))), 0.0)
        ops.store("result", COLUMNS * row + column, ops.where(mask, value, ops.constant(0.0, torch.float32)))

    return _MaskedLoop(run, **kinds)


def test_the_range_of_the_mask_shows_that_both_indices_are_equal() -> None:
    assert _asked(_padded())
    assert _asked(_padded(limit=7))


@pytest.mark.parametrize("limit", [COLUMNS, 2 * COLUMNS])
def test_a_mask_that_lets_other_columns_in_does_not(limit: int) -> None:
    assert not _asked(_padded(limit))


@pytest.mark.parametrize(
    "index",
    [
        lambda row, column: _packed(row, column) + 1,
        lambda row, column: _packed(row, 0) + column + COLUMNS,
        lambda row, column: COLUMNS * column + row,
    ],
)
def test_another_place_is_seen_to_be_another(index: Callable[[Any, Any], Any]) -> None:
    assert not _asked(_padded(index=index))


def test_each_read_is_looked_at() -> None:
    def run(ops: Any, row: sympy.Symbol, column: sympy.Symbol) -> None:
        mask = ops.lt(ops.index_expr(column, torch.int64), ops.constant(LIMIT, torch.int64))
        value = ops.masked(mask, lambda: ops.load("logits", _packed(row, column)), 0.0)
        ops.store("result", COLUMNS * row + column, ops.add(value, ops.load("logits", _packed(row, column))))

    assert not _asked(_MaskedLoop(run))  # the second has no mask


def test_a_mask_of_values_and_an_index_of_values_are_unknown() -> None:
    def masked_by_values(ops: Any, row: sympy.Symbol, column: sympy.Symbol) -> None:
        mask = ops.lt(ops.load("other", column), ops.constant(LIMIT, torch.int64))
        value = ops.masked(mask, lambda: ops.load("logits", _packed(row, column)), 0.0)
        ops.store("result", COLUMNS * row + column, value)

    def at_values(ops: Any, row: sympy.Symbol, column: sympy.Symbol) -> None:
        place = ops.indirect_indexing(ops.load("other", column), COLUMNS)
        ops.store("result", COLUMNS * row + column, ops.load("logits", COLUMNS * row + place))

    assert not _asked(_MaskedLoop(masked_by_values))
    assert not _asked(_MaskedLoop(at_values))
