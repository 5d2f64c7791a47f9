"""Real models: in the arena, with guards on, also under autocast, the numbers are those of the graph and of eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.zoo import ZOO, Recurrent
from memplan.core.problem import Status
from memplan.planning.options import PlanOptions
from memplan.runtime import CompiledModule
from memplan.runtime import compile as memplan_compile
from memplan.trace import plan_traced, trace
from tests.models import traced_nano
from tests.runtime.allocated import assert_allocates_what_it_plans, other_bytes
from tests.runtime.reference import Interpreted
from tests.slow import slow
from tests.steps import loss_of, outcomes_of, same_outcomes, under_autocast


def _relative(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).abs().max() / two.abs().max().clamp_min(1e-30))


@pytest.fixture(scope="module", params=[name if name in ("mlp", "lstm") else slow(name) for name in ZOO])
def poisoned(request: pytest.FixtureRequest) -> tuple[CompiledModule, nn.Module, tuple[Any, ...], int]:
    """A model of the zoo, compiled with poison in its arena; itself, its inputs, and bytes that were alive before."""
    model, args = ZOO[request.param]("nano")
    before = other_bytes(model, args)
    return memplan_compile(model, args, sanitize="poison"), model, args, before


def test_allocated_bytes_equal_the_plan(poisoned: Any) -> None:
    """Also beside the sanitizer: but for the LSTM's, whose own test is among those of bytes outside the arena."""
    compiled, model, args, before = poisoned
    if isinstance(model, Recurrent):
        pytest.skip("poison needs 512 bytes more in an LSTM")
    assert_allocates_what_it_plans(model, args, compiled, before)


def test_bitwise_equal_to_interpretation_of_the_traced_graph(poisoned: Any) -> None:
    compiled, model, args, _ = poisoned
    reference = Interpreted(copy.deepcopy(model), args)
    for seed in range(2):
        before = {key: buffer.clone() for key, buffer in model.named_buffers()}
        reference.model.load_state_dict(model.state_dict())
        torch.manual_seed(seed)
        outputs, gradients, mutated = reference.run(*args)
        model.zero_grad()
        loss = loss_of(compiled, *args, seed=seed)
        assert torch.equal(loss, outputs[0])
        assert gradients
        for key, gradient in gradients.items():
            ours = model.get_parameter(key).grad
            assert ours is not None, key
            assert torch.equal(ours, gradient), key
        for key, buffer in model.named_buffers():
            assert torch.equal(buffer, mutated.get(key, before[key])), key


def test_trains_like_eager_over_three_steps_and_one_accumulation(poisoned: Any) -> None:
    compiled, model, args, _ = poisoned
    model.zero_grad()
    eager = copy.deepcopy(model)
    ours = torch.optim.SGD(compiled.parameters(), lr=1e-3, momentum=0.9)
    theirs = torch.optim.SGD(eager.parameters(), lr=1e-3, momentum=0.9)
    for seed in range(3):
        backwards = 2 if seed == 1 else 1  # gradients accumulated over two backwards, once
        for k in range(backwards):
            one, two = loss_of(compiled, *args, seed=10 * seed + k), loss_of(eager, *args, seed=10 * seed + k)
            assert _relative(one, two) <= 1e-6
        for (key, p), (other, q) in zip(compiled.named_parameters(), eager.named_parameters(), strict=True):
            assert key == other
            if q.grad is None:
                assert p.grad is None or not p.grad.any()
            else:
                assert p.grad is not None, key
                assert _relative(p.grad, q.grad) <= 1e-6, key
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (key, a), (_, b) in zip(compiled.named_buffers(), eager.named_buffers(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6), key


@pytest.mark.parametrize("name", ["mlp", slow("gpt2"), slow("resnet")])
def test_no_kernel_writes_outside_its_buffer(name: str) -> None:
    model, args = ZOO[name]("nano")
    compiled = memplan_compile(model, args, sanitize="redzone")
    assert compiled.plan.redzone > 0
    assert torch.isfinite(loss_of(compiled, *args, seed=0))


@pytest.mark.parametrize("name", [name if name in ("mlp", "resnet", "lstm") else slow(name) for name in ZOO])
def test_the_arena_is_max_live_and_reuse_in_place_never_needs_more(name: str) -> None:
    best, without = (plan_traced(traced_nano(name, in_place=choice)) for choice in (True, False))
    assert best.arena_size == best.max_live <= without.max_live
    assert best.solution.status is Status.OPTIMAL
    greedy = plan_traced(traced_nano(name, in_place=False), PlanOptions(schedule="traced", solver="greedy"))
    assert greedy.max_live <= greedy.arena_size <= (1.10 if name == "t5" else 1.02) * greedy.max_live


@pytest.mark.slow
def test_reuse_in_place_lowers_the_peak_at_the_logits() -> None:
    model, args = ZOO["gpt2"]("medium")
    with_reuse, without = (plan_traced(trace(model, args, in_place=choice)) for choice in (True, False))
    assert with_reuse.max_live <= 0.89 * without.max_live


@pytest.mark.parametrize("name", ["mlp", slow("gpt2"), slow("lstm")])
def test_the_zoo_is_eagers_bits(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = ZOO[name]("nano")
    eager = copy.deepcopy(model.train())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled = memplan_compile(model, inputs)
    expected = outcomes_of(eager, under_autocast(eager), *inputs, steps=3, seed=1)
    assert same_outcomes(outcomes_of(model, under_autocast(compiled), *inputs, steps=3, seed=1), expected)


@pytest.mark.parametrize("p", [0.1, 0.77])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dropout_of_any_type_is_eagers_bits(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Hardtanh(), nn.Dropout(p), nn.Hardtanh())
    found, incoming = [], torch.linspace(-1, 1, 1024, dtype=torch.float64).view(32, 32).to(dtype)
    for call in (model, None):
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
        run = memplan_compile(model, x) if call is None else call
        torch.manual_seed(1)
        out = run(x)
        (gradient,) = torch.autograd.grad(out, x, incoming)
        found.append((out.detach(), gradient))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
