"""Plans for ranks that are not there, what of FSDP2 and DDP is refused, and the order of collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import memplan
from memplan.core.collectives import collectives_of, is_collective, may_run_again
from memplan.core.graph import Graph
from memplan.core.legal_orders import predecessors, require_legal
from memplan.distributed.agreement import Agreement
from memplan.distributed.fake_ranks import fake_ranks
from memplan.distributed.local import group_of_all
from memplan.distributed.parallelism import parallelism_of
from memplan.errors import InvalidCosts, InvalidPlan, InvalidShapes, RanksDiffer, UnsupportedCall, UnsupportedGraph
from memplan.evict.costs import DEVICES, LINKS, cost_model
from memplan.report.lines import waiting_lines
from tests.distributed.models import SmallGpt, energy, tokens, vectors
from tests.models import Made


class _GptLoss(SmallGpt):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return energy(super().forward(x))


@cache
def _whole(ranks: int | None) -> memplan.Plan:
    """The plan without a budget."""
    return _planned(ranks)


def _planned(ranks: int | None, **options: Any) -> memplan.Plan:
    with torch.device("meta"):
        model = _GptLoss(blocks=1)
        model.head.weight = model.embedding.weight
    return memplan.plan(model, tokens(0, 0).to("meta"), ranks=ranks, **options)


def _shape_of(graph: Graph) -> list[tuple[str, str]]:
    return [(op.name, op.target) for op in graph.ops]


@pytest.fixture
def ranks() -> Iterator[None]:
    """This process is the first of two ranks, whose collectives do nothing."""
    with fake_ranks(2):
        yield


def test_a_plan_of_many_ranks_is_that_of_two_with_smaller_parts() -> None:
    alone, two, many = _whole(None), _whole(2), _whole(16)
    assert _shape_of(two.graph) == _shape_of(many.graph)
    assert not alone.collectives
    kinds = [c.kind for c in many.collectives]
    assert kinds.count("gather_parameter") == kinds.count("reduce_scatter") == 15, "tied parameters once"
    assert two.outside["parameters"] == alone.outside["parameters"] / 2
    assert many.outside["parameters"] == alone.outside["parameters"] / 16
    assert not distributed.is_initialized()
    lines = "\n".join(waiting_lines(many.report()))
    assert "15 gathers of parameters and 15 other collectives" in lines
    assert alone.report().exchanged is None
    assert not any(alone.gathered)


def test_a_report_has_the_bytes_of_one_rank() -> None:
    """Over its link, and of gathered parameters at each step."""
    plan = _whole(16)
    exchanged = plan.report().exchanged
    assert exchanged is not None
    whole = _whole(None).outside["parameters"]
    assert exchanged.sent == 2 * whole, "each parameter is gathered once, and its gradient reduced once"
    assert (exchanged.gathered, exchanged.gathered_step) == (
        max(plan.gathered),
        plan.gathered.index(exchanged.gathered),
    )
    largest = max(c.nbytes for c in plan.collectives)
    assert largest <= exchanged.gathered <= whole
    assert plan.gathered[plan.collectives[0].step] == plan.collectives[0].nbytes
    assert replace(plan.collectives[0], kind="all_reduce").sent == 2 * plan.collectives[0].nbytes


def test_a_budget_gathers_again_and_repeats_nothing_else() -> None:
    whole = _whole(16)
    plan = _planned(16, arena_budget="min", policy="recompute", costs="h100/nvlink")
    again = [c for c in plan.collectives if c.again]
    assert again
    assert {c.kind for c in again} == {"gather_parameter"}
    assert plan.arena_size < whole.arena_size / 2
    assert sum(c.kind == "reduce_scatter" for c in plan.collectives) == 15
    assert plan.eviction is not None
    assert plan.eviction.costs == "h100/nvlink"


@pytest.mark.usefixtures("ranks")
def test_parameters_that_torch_frees_after_the_forward_are_gathered_again() -> None:
    """Without a budget a plan keeps what torch keeps; the outermost module's are kept unless torch was told."""

    def plan_of(blocks: bool | int | None, outermost: bool | None, **options: Any) -> memplan.Plan:
        model = _GptLoss(blocks=2)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=blocks)
        fully_shard(model, mesh=mesh, reshard_after_forward=outermost)
        plan: memplan.Plan = memplan.plan(model, tokens(0, 0), **options)
        return plan

    def again(plan: memplan.Plan) -> list[str]:
        return [c.name for c in plan.collectives if c.again]

    mesh = init_device_mesh("cpu", (2,))
    kept, freed, all_freed = plan_of(False, False), plan_of(None, None), plan_of(True, True)
    assert again(kept) == []
    assert again(freed)
    assert all(name.startswith("gather_blocks_") for name in again(freed)), "the model's own are kept"
    assert any("embedding" in name or "head" in name for name in again(all_freed))
    assert all_freed.arena_size <= freed.arena_size < kept.arena_size
    assert plan_of(None, None, checkpoint="plan").arena_size <= freed.arena_size


def test_collectives_of_a_group_keep_their_order() -> None:
    plan = _whole(2)
    order = list(plan.schedule.order)
    reductions = [c.step for c in plan.collectives if c.kind == "reduce_scatter"]
    one, two = reductions[:2]
    order[one], order[two] = order[two], order[one]
    with pytest.raises(InvalidPlan):
        require_legal(plan.graph, tuple(order))
    last, first = (plan.schedule.order[step] for step in (two, one))
    assert _comes_before(plan.graph, first, last)
    ops = [replace(op, group="other") if i == first else op for i, op in enumerate(plan.graph.ops)]
    assert first not in predecessors(replace(plan.graph, ops=tuple(ops)))[last]
    assert collectives_of(plan.graph, plan.schedule.order) == plan.collectives
    assert is_collective("c10d.allreduce_.default")
    assert not may_run_again("memplan_distributed.reduce_scatter.default")


@pytest.mark.usefixtures("ranks")
def test_reductions_are_in_the_group_that_torch_has_made_for_them() -> None:
    """A group of its own has an order of its own, which all ranks agree on as they do on everything."""

    def apart(model: Any) -> None:
        if not hasattr(model, "set_separate_reduce_scatter_group"):
            pytest.skip("torch 2.13 and newer have such groups")
        model.set_separate_reduce_scatter_group()

    plain, plan = (memplan.plan(_sharded(change), vectors(0, 0)) for change in (lambda _: None, apart))
    assert len({c.group for c in plain.collectives}) == 1
    gathers, reductions = ({c.group for c in plan.collectives if c.gathers is kind} for kind in (True, False))
    assert (len(gathers), len(reductions), len(gathers | reductions)) == (1, 1, 2)
    assert [c.line for c in plan.collectives] == [c.line for c in plain.collectives]
    for one, chained in ((plain, True), (plan, False)):
        steps = [[one.schedule.order[c.step] for c in one.collectives if c.gathers is kind] for kind in (True, False)]
        assert (max(steps[0]) in predecessors(one.graph)[min(steps[1])]) is chained
    lines = [parallelism_of(_sharded(change)).lines for change in (lambda _: None, apart)]  # type: ignore[union-attr]
    assert lines[0] != lines[1], "ranks that differ in it say so"


def _comes_before(graph: Graph, first: int, last: int) -> bool:
    """Whether the dependencies put one op before another."""
    before, waiting = predecessors(graph), [last]
    while waiting:
        op = waiting.pop()
        if op == first:
            return True
        waiting += [other for other in before[op] if other >= first]
    return False


def test_a_link_between_ranks_is_a_part_of_the_costs() -> None:
    plan = _whole(16)
    slow, fast = cost_model("a100/100gb"), cost_model("A100/NVLink")
    assert fast.between_ranks == LINKS["nvlink"]
    assert replace(fast, name="a100", between_ranks=DEVICES["a100"].between_ranks) == DEVICES["a100"]
    gather = next(op for op in plan.graph.ops if op.name == plan.collectives[0].name)
    assert slow.op_seconds(plan.graph, gather) > fast.op_seconds(plan.graph, gather)
    with pytest.raises(InvalidCosts) as error:
        cost_model("a100/pigeons")
    assert "a100/nvlink" in str(error.value.hint)


_VARYING: Any = {"ranks": 2, "dynamic_shapes": ({0: "batch"},)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _planned(0), "is no number of ranks"),
        (lambda: _without_groups(lambda: _planned(2)), "this torch has no process groups"),
        (lambda: _within_two(lambda: _planned(3)), "this process is one of 2 ranks already"),
        (lambda: memplan.plan(_scaled(), vectors(0, 0), ranks=2), "support scalar parameters"),
        (lambda: memplan.plan(nn.Linear(10, 2), vectors(0, 0), **_VARYING), "a rank has one shape"),
    ],
)
def test_what_no_rank_can_be_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((UnsupportedCall, ValueError, InvalidShapes), match=words):
        make()


def _without_groups(make: Callable[[], Any]) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("torch.distributed.is_available", lambda: False)
        return make()


def _within_two(make: Callable[[], Any]) -> Any:
    with fake_ranks(2):
        return make()


def _scaled() -> Made:
    return Made(lambda m, x: (x * m.scale).sum(), scale=nn.Parameter(torch.ones(())))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_mismatch": "eager"}, "runs other collectives than a compiled one"),
        ({"on_mismatch": "passive", "budget": 0.9}, "runs other collectives than a compiled one"),
        ({"costs": "measure", "budget": 0.9}, "each rank would measure other costs"),
        ({"accumulate": 2}, "averaged after each batch"),
        ({"allow_unsynchronized": True}, "trained by all ranks together"),
    ],
)
def test_options_with_which_ranks_would_part_are_refused(ranks: None, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedCall, match=words):
        _step(nn.parallel.DistributedDataParallel(nn.Linear(10, 2)), **options)


def _step(model: nn.Module, **options: Any) -> memplan.CompiledStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return memplan.compile_step(model, optimizer, energy, vectors(0, 0), **options)


def _hooked(model: nn.parallel.DistributedDataParallel) -> nn.Module:
    model.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    return model


def _hybrid() -> Any:
    return fully_shard(nn.Linear(10, 2), mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "parts")))


def _register(model: Any) -> None:
    register_fsdp_forward_method(model, "extra_repr")


def _over_other_ranks() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 2))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model[1], mesh=DeviceMesh("cpu", [0]))
    return model


def _placed(**how: Any) -> Any:
    """A layer whose rows are placed on both ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(nn.Sequential(nn.Linear(10, 2)), mesh, {"0": ColwiseParallel(**how)})


def _placed_by(*placements: Any, buffer: bool = False) -> nn.Module:
    """A layer whose weight, or a buffer, is a DTensor placed in this way."""
    model = nn.Sequential(nn.Linear(10, 2))
    mesh = init_device_mesh("cpu", (1,) * (len(placements) - 1) + (2,))
    made = DTensor.from_local(torch.ones(2, 10), mesh, placements, run_check=False)
    if buffer:
        model[0].register_buffer("extra", made)
    else:
        model[0].weight = nn.Parameter(made)
    return model


def _placed_on_several() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 2), nn.Linear(2, 2))
    parallelize_module(model[0], DeviceMesh("cpu", [0, 1]), ColwiseParallel())
    return parallelize_module(model[1], DeviceMesh("cpu", [0]), ColwiseParallel()) and model


def _unevenly_placed() -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(parallelize_module(nn.Linear(10, 3), mesh["tp"], ColwiseParallel()), mesh=mesh["dp"])


def _sharded(change: Callable[[Any], object] = lambda _: None, **options: Any) -> Any:
    made = fully_shard(nn.Linear(10, 2), mesh=init_device_mesh("cpu", (2,)), **options)
    change(made)
    return made


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _hooked(nn.parallel.DistributedDataParallel(nn.Linear(10, 2))), "has a communication hook"),
        (_hybrid, r"a mesh of several dimensions \(HSDP\)"),
        (lambda: _sharded(lambda m: m.set_requires_gradient_sync(False)), "does not reduce its gradients"),
        (lambda: _sharded(_register), "has a method that gathers its parameters"),
        (lambda: _sharded(lambda m: m.set_gradient_divide_factor(3.0)), "has a divide factor of its own"),
        (_over_other_ranks, r"divided among the ranks \[0\], and others among \[0, 1\]"),
        (lambda: _sharded(shard_placement_fn=lambda _: Shard(-1)), "is divided along dimension 1"),
        (lambda: _placed_by(Replicate(), Shard(0)), "over a mesh of 2 dimensions"),
        (lambda: _placed_by(Partial()), r"0\.weight: is a DTensor that is placed as P"),
        (lambda: _placed_by(Replicate(), buffer=True), r"0\.extra: is a buffer"),
        (_placed_on_several, r"1\.weight: is placed on other ranks"),
        (_unevenly_placed, "which divides 3 among 2 ranks"),
        (lambda: _placed(use_local_output=False), "a result is a DTensor"),
    ],
)
def test_what_a_step_cannot_do_as_torch_does_is_refused(ranks: None, make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(UnsupportedGraph, match=words) as error:
        _step(make())
    assert error.value.see == "ranks-refused"


@pytest.fixture
def take_turns(ranks: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let this process be one of two ranks after the other, which read what the other has left in a store."""
    home = "memplan.distributed.agreement"
    store = distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(f"{home}.is_alone", lambda group: group is None)
    monkeypatch.setattr(f"{home}.store_of", lambda _: store)
    monkeypatch.setattr(f"{home}.timeout_of", lambda _: 0.1)
    return lambda rank: monkeypatch.setattr("torch.distributed.get_rank", lambda *_: rank)


def _compare() -> None:
    with Agreement(group_of_all()) as agreement:
        agreement.compare(["the same"])


@pytest.mark.parametrize("compiles", [_step, lambda model: memplan.compile(model, vectors(0, 0))])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _without_reductions(nn.parallel.DistributedDataParallel(nn.Linear(10, 2))), r"is in no_sync\(\)"),
        (lambda: _sharded(lambda m: m.set_requires_gradient_sync(False)), "does not reduce its gradients"),
        (_hybrid, r"a mesh of several dimensions \(HSDP\)"),
        (lambda: _placed_by(Partial()), "is a DTensor that is placed as P"),
        (_unevenly_placed, "which divides 3 among 2 ranks"),
    ],
)
def test_other_ranks_read_why_a_rank_was_refused(
    take_turns: Callable[[int], None], make: Callable[[], nn.Module], words: str, compiles: Callable[[Any], object]
) -> None:
    model = make()
    take_turns(1)
    with pytest.raises(UnsupportedGraph, match=words):
        compiles(model)
    take_turns(0)
    with pytest.raises(RanksDiffer, match=f"rank 1 could not compile: UnsupportedGraph: .*{words}"):
        _compare()


def test_a_step_that_shall_not_reduce_is_refused(ranks: None) -> None:
    """It is refused as a call, in both ways of torch to say so."""
    replicas, divided = nn.parallel.DistributedDataParallel(nn.Linear(10, 2)), _sharded()
    step, other = _step(replicas), _step(divided)
    with replicas.no_sync(), pytest.raises(UnsupportedCall, match=r"no_sync\(\): a compiled step reduces"):
        step(vectors(0, 0))
    divided.set_requires_gradient_sync(False)
    with pytest.raises(UnsupportedCall, match=r"sync\(False\): a compiled step reduces"):
        other(vectors(0, 0))


def _without_reductions(model: nn.parallel.DistributedDataParallel) -> nn.Module:
    model.require_backward_grad_sync = False
    return model


def test_a_compiled_model_of_ranks_has_few_programs(ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never runs as torch alone would, for which the other ranks would have to do the same."""
    monkeypatch.setattr("memplan.runtime.programs.Programs.most", 2)
    compiled = memplan.compile(_sharded(), vectors(0, 0))
    with torch.no_grad():
        compiled(vectors(0, 0))
    with pytest.raises(UnsupportedCall, match="programs exist already") as error:
        compiled(vectors(0, 0, rows=3))
    assert error.value.see == "ranks-refused"
