"""Whatever the legal order, the numbers are the same: bitwise, with dropout, and with buffers that change."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from benchmarks.zoo import ZOO
from memplan.core.graph import Graph, Phase
from memplan.core.legal_orders import predecessors, require_legal
from memplan.core.schedule import Schedule, make_schedule
from memplan.runtime import compile as memplan_compile
from memplan.runtime import compile_step as memplan_compile_step
from tests.models import traced_nano
from tests.slow import slow


def shuffled(seed: int) -> Any:
    """A policy: a random legal order."""

    def policy(graph: Graph) -> Schedule:
        draw, before = random.Random(seed), predecessors(graph)
        order: list[int] = []
        for phase in Phase:
            left = [i for i, op in enumerate(graph.ops) if op.phase is phase]
            done = set(order)
            while left:
                order.append(draw.choice([i for i in left if before[i] <= done]))
                left.remove(order[-1])
                done.add(order[-1])
        return make_schedule(graph, tuple(order), "shuffled")

    return policy


def results(
    model: nn.Module, args: tuple[Any, ...], schedule: Any
) -> tuple[dict[str, torch.Tensor], tuple[int, ...], Graph]:
    """Loss, gradients and buffers after two compiled steps of a copy of `model`, with poisoned free memory."""
    own = copy.deepcopy(model)
    compiled = memplan_compile(own, args, schedule=schedule, sanitize="poison")
    found: dict[str, torch.Tensor] = {}
    for seed in range(2):
        own.zero_grad()
        torch.manual_seed(seed)
        loss = compiled(*args)
        loss.backward()
        found[f"loss {seed}"] = loss.detach()
        found |= {f"{key} {seed}": p.grad for key, p in own.named_parameters() if p.grad is not None}
    return found | dict(own.named_buffers()), compiled.plan.schedule.order, compiled.plan.graph


@pytest.mark.parametrize("name", ["mlp", slow("gpt2"), slow("resnet")])
def test_random_legal_orders_give_the_same_bits(name: str) -> None:
    model, args = ZOO[name]("nano")
    expected, plain, whole = results(model, args, "traced")
    for seed in range(2 if name == "mlp" else 1):
        found, order, graph = results(model, args, shuffled(seed))
        require_legal(graph, order)
        assert [graph.ops[i].name for i in order] != [whole.ops[i].name for i in plain]
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key


def trained(
    model: nn.Module, batch: tuple[Any, ...], schedule: Any, clip: float | None
) -> tuple[dict[str, torch.Tensor], tuple[int, ...], Graph]:
    """Losses, parameters, buffers and optimizer state after two whole steps of a copy of `model`."""
    own = copy.deepcopy(model)
    adamw = torch.optim.AdamW(own.parameters(), lr=1e-2, fused=True)
    step = memplan_compile_step(
        own, adamw, lambda loss: loss, batch, clip_grad_norm=clip, sanitize="poison", schedule=schedule
    )
    found: dict[str, torch.Tensor] = {}
    for seed in range(2):
        torch.manual_seed(seed)
        found[f"loss {seed}"] = step(*batch)
    state = {f"{i} {key}": value for i, s in adamw.state_dict()["state"].items() for key, value in s.items()}
    return found | own.state_dict() | state, step.plan.schedule.order, step.plan.graph


@pytest.mark.parametrize(
    ("name", "clip"), [("mlp", 0.1), ("mlp", None), slow("gpt2", None), slow("bert", None), slow("resnet", 0.1)]
)
def test_random_legal_orders_of_whole_steps_give_the_same_bits(name: str, clip: float | None) -> None:
    """Updates between gradients, weights that readers of the old value must have seen, and in-place reuse."""
    model, batch = ZOO[name]("nano")
    expected, plain, whole = trained(model, batch, "traced", clip)
    for schedule in (shuffled(3), "auto"):
        found, order, graph = trained(model, batch, schedule, clip)
        require_legal(graph, order)
        assert [graph.ops[i].name for i in order] != [whole.ops[i].name for i in plain]
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", ["mlp", slow("vit")])
def test_the_default_order_lowers_the_arena_and_gives_the_same_bits(name: str) -> None:
    model, args = ZOO[name]("nano")
    expected, _, _ = results(model, args, "traced")
    found, _, _ = results(model, args, "auto")
    traced_order, default = (memplan.plan(model, args, schedule=policy).schedule for policy in ("traced", "auto"))
    assert default.max_live < traced_order.max_live
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def test_random_and_mutating_ops_keep_their_order_in_every_policy() -> None:
    graph = traced_nano("bert").graph
    draws = [i for i, op in enumerate(graph.ops) if op.random]
    assert len(draws) > 1
    order = shuffled(5)(graph).order
    assert [i for i in order if i in draws] == draws
    for storage in range(len(graph.storages)):
        writes = [i for i, op in enumerate(graph.ops) if storage in graph.written(op)]
        assert [i for i in order if i in set(writes)] == writes
