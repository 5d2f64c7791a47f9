"""On a CUDA device, the most telling first: numbers, recordings, copies, streams, and measured memory.

`scripts/gpu_suite.sh` runs these on a machine with a GPU; everywhere else they are skipped.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import memplan
from benchmarks.zoo import ZOO, Block
from memplan.devices.host_memory import host_bytes
from memplan.runtime import CompiledModule, compile, compile_step
from tests.runtime.budgets import FAST_LINK, QUICK, QUICK_RECOMPUTE
from tests.runtime.on_cuda import example_on_cuda, same_kernels_each_time
from tests.runtime.reference import Interpreted, same_gradients
from tests.steps import loss_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]
NAMES = ["gpt2", "resnet", "bert", "llama", "mlp"]
SANITIZER = "MEMPLAN_TEST_SANITIZER"  # set to "1" by scripts/gpu_checks.py, for one test
REST = [name for name in ZOO if name not in NAMES]


@pytest.fixture(autouse=True)
def _same_kernels_each_time() -> Iterator[None]:
    with same_kernels_each_time():
        yield


def _assert_like_eager(model: nn.Module, eager: nn.Module, *losses: torch.Tensor, loose: float = 1.0) -> None:
    torch.testing.assert_close(*losses, rtol=1e-4 * loose, atol=1e-5 * loose)
    for (key, p), (_, q) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        if p.grad is None or q.grad is None:
            assert not any(g is not None and g.any() for g in (p.grad, q.grad)), key
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3 * loose, atol=1e-4 * loose)


@pytest.mark.parametrize("name", [*NAMES, *REST])
def test_bitwise_equal_to_interpretation(name: str) -> None:
    """With poison in everything that is not alive."""
    model, args = example_on_cuda(name)
    reference = Interpreted(copy.deepcopy(model), args)
    compiled = compile(model, args, sanitize="poison")
    assert compiled.plan.alignment == 512
    for seed in range(2):
        reference.model.load_state_dict(model.state_dict())
        torch.manual_seed(seed)
        outputs, gradients, _ = reference.run(*args)
        model.zero_grad()
        assert torch.equal(loss_of(compiled, *args, seed=seed), outputs[0])
        assert gradients
        for key, gradient in gradients.items():
            ours = model.get_parameter(key).grad
            assert ours is not None, key
            assert torch.equal(ours, gradient), key


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_trains_like_eager(name: str, cuda_graph: bool) -> None:
    """The same random numbers too: seeds are set anew, and then go on by themselves across replays."""
    model, args = example_on_cuda(name)
    eager = copy.deepcopy(model)
    # Transformers gives BERT's attention a mask while it is traced, and none otherwise: CUDA then has another kernel.
    reference: Any = torch.compile(eager, backend="aot_eager") if name == "bert" else eager
    compiled = compile(model, args, cuda_graph=cuda_graph)
    for seed in range(3):
        _assert_like_eager(model, eager, loss_of(compiled, *args, seed=seed), loss_of(reference, *args, seed=seed))
    losses: list[list[torch.Tensor]] = []
    for call in (compiled, reference):
        torch.manual_seed(7)
        losses.append([call(*args) for _ in range(1)])
        sum(losses[-1]).backward()  # type: ignore[union-attr]
        losses[-1] += [loss_of(call, *args) for _ in range(3)]
    for one, two in zip(*losses, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    if cuda_graph:
        assert compiled.pool_bytes > 0


class Attention(nn.Module):
    """Fused attention with dropout: its random state goes from forward to backward as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=True)
        loss: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2)).float().square().mean()
        return loss


BACKENDS = torch.nn.attention.SDPBackend


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (BACKENDS.FLASH_ATTENTION, torch.bfloat16),
        (BACKENDS.EFFICIENT_ATTENTION, torch.float32),
        (BACKENDS.EFFICIENT_ATTENTION, torch.bfloat16),
        (BACKENDS.CUDNN_ATTENTION, torch.bfloat16),
    ],
)
def test_fused_attention_with_dropout(backend: Any, dtype: torch.dtype, cuda_graph: bool) -> None:
    torch.manual_seed(0)
    model = Attention().to("cuda", dtype)
    eager, x = copy.deepcopy(model), torch.randn(4, 64, 64, device="cuda", dtype=dtype)
    with torch.nn.attention.sdpa_kernel(backend):
        compiled = compile(model, x, cuda_graph=cuda_graph)
        names = {op.target for op in compiled.plan.graph.ops}
        assert any("attention" in name for name in names), names
        for seed in range(3):
            losses = loss_of(compiled, x, seed=seed), loss_of(eager, x, seed=seed)
            _assert_like_eager(model, eager, *losses, loose=1 if dtype is torch.float32 else 300)


class Blocks(nn.Module):
    """Transformer blocks with dropout on a large batch: most memory waits for the backward, so a budget can be kept."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (Block(32, 2), nn.Dropout(0.1))]
        self.layers = nn.Sequential(*layers, nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def _roomy_example(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a model with activations that a budget can evict, and its inputs."""
    if name != "blocks":
        return example_on_cuda(name)
    torch.manual_seed(0)
    return Blocks().cuda(), (torch.randn(16, 32, 32).cuda(),)


@pytest.mark.parametrize("policy", [QUICK, QUICK_RECOMPUTE], ids=["offload", "recompute"])
@pytest.mark.parametrize("name", ["blocks", "resnet"])
def test_a_budget_changes_no_bit(name: str, policy: Any) -> None:
    """Copies run on streams of their own, from and to pinned memory."""
    model, args = _roomy_example(name)
    other = copy.deepcopy(model)
    plain = compile(model, args)
    kept = _within_a_budget(other, args, policy)
    if policy is QUICK:
        program = kept._calls.programs.main.program
        assert program.host.nbytes == 0 or program.host.memory.is_pinned()
    for seed in range(3):
        assert torch.equal(loss_of(plain, *args, seed=seed), loss_of(kept, *args, seed=seed))
    assert same_gradients(model, other)


def test_pages_are_locked_as_they_are_and_a_refusal_leaves_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device, nbytes = torch.device("cuda"), (5 << 20) + 1
    made, there = host_bytes(nbytes, device), torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)
    assert made.is_pinned()
    made.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(made, there.cpu())
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    refuses = SimpleNamespace(
        cudaHostRegister=lambda at, size, flags: runtime.cudaHostRegister(made.data_ptr(), 4096, flags)
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refuses)  # what is locked already
    assert host_bytes(nbytes, device).is_pinned()
    assert torch.ones(1, device=device).item() == 1


def _within_a_budget(model: nn.Module, args: tuple[Any, ...], policy: Any) -> CompiledModule:
    compiled = compile(model, args, arena_budget=0.7, policy=policy, costs=FAST_LINK)
    assert compiled.plan.evictions
    return compiled


@pytest.mark.parametrize(
    "options", [{}, {"clip_grad_norm": 0.5}, {"accumulate": 2}], ids=["plain", "clip", "accumulate"]
)
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_whole_steps_follow_their_schedule(cuda_graph: bool, options: dict[str, Any]) -> None:
    model, args = example_on_cuda("gpt2")
    eager = copy.deepcopy(model)
    count = options.get("accumulate", 1)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (model, eager))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, theirs)]
    step = compile_step(model, ours, lambda loss: loss, args, cuda_graph=cuda_graph, **options)
    for seed in range(4):
        for k in range(count):
            torch.manual_seed(10 * seed + k)
            one = step(*args)
            torch.manual_seed(10 * seed + k)
            two = eager(*args)
            (two / count).backward()
            torch.testing.assert_close(one, two.detach(), rtol=1e-3, atol=1e-4)
        if "clip_grad_norm" in options:
            torch.nn.utils.clip_grad_norm_(eager.parameters(), options["clip_grad_norm"])
        theirs.step()
        theirs.zero_grad()
        for schedule in schedules:
            schedule.step()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("options", [{}, {"fused": False, "foreach": False}], ids=["as torch chooses", "not fused"])
def test_an_optimizer_that_was_not_fused_is_taken_over(options: dict[str, Any], cuda_graph: bool) -> None:
    """Its step counters are in the host's memory. Fused updates need them on the device, and its own ops do not."""
    model, args = example_on_cuda("mlp")
    eager = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), **options) for m in (model, eager))
    for m, optimizer in ((model, ours), (eager, theirs)):
        loss_of(m, *args, seed=0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(state["step"].device.type == "cpu" for state in ours.state.values())
    step = compile_step(model, ours, lambda loss: loss, args, cuda_graph=cuda_graph)
    for seed in range(2):
        torch.manual_seed(seed)
        torch.testing.assert_close(step(*args), loss_of(eager, *args, seed=seed), rtol=1e-4, atol=1e-5)
        theirs.step()
        theirs.zero_grad()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    assert all(int(state["step"]) == 3 for state in ours.state.values())
    assert {state["step"].device.type for state in ours.state.values()} == {"cpu" if options else "cuda"}


def test_steps_on_other_streams_take_turns() -> None:
    """One arena: what a second stream computes must not overwrite what the first still reads."""
    model, args = example_on_cuda("gpt2")
    model.eval()
    compiled = compile(model, args, train=False)
    expected = compiled(*args).clone()
    streams = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    found = []
    torch.cuda.synchronize()
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
            found.append(compiled(*args))
    torch.cuda.synchronize()
    assert all(torch.equal(f, expected) for f in found)


@contextmanager
def _torchs_sanitizer() -> Iterator[tuple[Any, type[Exception]]]:
    """Let torch's own check for races watch the kernels that Python launches in the block, by their addresses.

    Nothing may be traced in it: the check takes fake tensors for real ones, and ended a process that traced. Nor may
    much come after it, because the callbacks of streams, events and allocations stay until the process ends.
    """
    from torch.cuda import _sanitizer  # which sets the callbacks

    sanitizer = _sanitizer.cuda_sanitizer
    sanitizer.enable()  # type: ignore[no-untyped-call]
    try:
        yield sanitizer.dispatch.event_handler, _sanitizer.CUDASanitizerErrors
    finally:
        sanitizer.disable()  # type: ignore[no-untyped-call]


@pytest.mark.skipif(os.environ.get(SANITIZER) != "1", reason=f"needs a process of its own, with {SANITIZER}=1")
def test_torchs_sanitizer_finds_no_race() -> None:
    """In steps within a budget and on several streams; it must find a race of the test's own."""
    trained = []
    for name in ("blocks", "resnet"):
        for policy in (QUICK, QUICK_RECOMPUTE):
            model, args = _roomy_example(name)
            trained.append((_within_a_budget(model, args, policy), args))
    evaluated, inputs = example_on_cuda("gpt2")
    evaluated.eval()
    compiled = compile(evaluated, inputs, train=False)
    for _ in range(2):  # all that first calls make
        losses = [[loss_of(call, *args, seed=seed) for seed in range(2)] for call, args in trained]
        expected = compiled(*inputs).clone()
    streams = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with _torchs_sanitizer() as (seen, racy):
        watched = [[loss_of(call, *args, seed=seed) for seed in range(2)] for call, args in trained]
        launched, states = seen.seq_num, seen.syncs.current_sync_states
        assert launched > 100, "the kernels of steps"
        assert sum(state.get(stream, 0) > 0 for stream, state in states.items()) > 1, "copies on streams of their own"
        found = []
        for stream in streams * 2:
            with torch.cuda.stream(stream):
                found.append(compiled(*inputs))
        torch.cuda.synchronize()
        assert all(states[stream.cuda_stream][stream.cuda_stream] > launched for stream in streams)
        raced = torch.zeros(1 << 20, device="cuda").add_(1)
        with pytest.raises(racy), torch.cuda.stream(streams[0]):
            raced.add_(1)
    torch.cuda.synchronize()
    assert all(torch.equal(f, expected) for f in found)
    for ours, theirs in zip(watched, losses, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_recordings_keep_their_workspaces() -> None:
    """Torch's cuBLAS workspaces may be cleared by anybody who records, and their memory be unmapped."""
    model, args = example_on_cuda("gpt2")
    model.eval()
    compiled = compile(model, args, train=False, cuda_graph=True)
    expected = compiled(*args).clone()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            held = torch.full((64 << 20,), 1.0, device="cuda")
            torch.cuda.synchronize()
            assert torch.equal(compiled(*args), expected)
            torch.cuda.synchronize()
            assert torch.equal(held, torch.ones_like(held))


def test_moved_parameters_are_recorded_anew_while_results_are_held() -> None:
    """The model has dropout: both must begin at the same random numbers."""
    model, args = example_on_cuda("mlp")
    compiled = compile(model, args, cuda_graph=True)
    held = compiled(*args)
    held.backward()
    before = held.detach().clone()
    for p in model.parameters():
        p.data = p.data.clone() * 0.5
    model.zero_grad()
    eager = copy.deepcopy(model)
    for seed in range(2):  # recorded, replayed
        _assert_like_eager(model, eager, loss_of(compiled, *args, seed=seed), loss_of(eager, *args, seed=seed))
    assert torch.equal(held, before)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch 2.11's own reset, on CUDA
def test_torch_compile_backend() -> None:
    model, args = example_on_cuda("gpt2")
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=memplan.Backend(sanitize="poison"))
    for seed in range(3):
        losses = loss_of(compiled, *args, seed=seed), loss_of(eager, *args, seed=seed)
    _assert_like_eager(model, eager, *losses)
    torch._dynamo.reset()


def test_ops_are_measured() -> None:
    model, args = _roomy_example("blocks")
    costs = memplan.profile(model, args, rounds=3)
    assert costs.measured
    assert all(0 < seconds < 0.1 for seconds in costs.measured.values())
    assert 1e9 < costs.to_host.bytes_per_second < 1e12
    plan = memplan.plan(model, args, arena_budget=0.8, costs=costs)
    assert plan.evictions
    assert plan.arena_size <= 0.8 * memplan.plan(model, args).arena_size
    kept = compile(model, args, arena_budget=0.8).plan.eviction
    assert kept is not None
    assert kept.costs.startswith("measured on"), "evictions are decided by what the device takes"
    assert kept.base_seconds < 2 * sum(costs.seconds(memplan.plan(model, args).graph))


def test_convolutions_write_into_the_arena() -> None:
    model, args = example_on_cuda("resnet")
    ops = compile(model, args).plan.graph.ops
    assert all(op.direct for op in ops if op.target == "aten.convolution.default")


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_measured_peak_is_the_predicted_one(name: str) -> None:
    """Bytes that were asked for, without the caching allocator's rounding, and without libraries' workspaces."""
    torch._C._cuda_clearCublasWorkspaces()
    _free_garbage()  # of earlier tests: what one that failed had is freed only after its own clearing up
    before = _requested()
    model, args = example_on_cuda(name)
    compiled = compile(model, args)
    _settle(model, compiled, args)
    standing = _requested()
    torch.cuda.reset_peak_memory_stats()
    compiled(*args).backward()
    torch.cuda.synchronize()
    step = int(torch.cuda.memory_stats()["requested_bytes.all.peak"]) - standing
    plan = compiled.plan
    assert step == pytest.approx(max(plan.outside_profile), rel=0.02, abs=512 * 8), (
        "what a step allocates beside the arena"
    )
    assert compiled._calls.programs.main.program.arena.memory.nbytes == plan.arena_size
    model.zero_grad()
    fixed = plan.arena_size + plan.outside["parameters"] + plan.outside["inputs"] + plan.outside["constants"]
    torch._C._cuda_clearCublasWorkspaces()
    _free_garbage()
    assert _requested() - before == pytest.approx(fixed, rel=0.02, abs=512 * 8), "what stands between steps"


def _settle(model: nn.Module, compiled: CompiledModule, args: tuple[Any, ...]) -> None:
    for _ in range(3):
        compiled(*args).backward()
        model.zero_grad()
    _free_garbage()


def _free_garbage() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _requested() -> int:
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])
