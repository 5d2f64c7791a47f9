"""Plans for a GPU that is not here: what they are held to, its attention, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._inductor.utils import fresh_cache

import memplan
from benchmarks import real_sizes
from benchmarks.zoo import ZOO, llama_of
from memplan.core.evictions import OFFLOAD, RELOAD, TRANSFERS, EvictionPlan
from memplan.core.gpus import find_gpu, gpu_called
from memplan.core.graph import StorageKind
from memplan.core.plan import Plan
from memplan.core.units import format_bytes, parse_size
from memplan.errors import (
    BudgetInfeasible,
    InvalidShapes,
    LibraryNotInstalled,
    MemplanError,
    UnsupportedDevice,
    UnsupportedGraph,
)
from memplan.evict.costs import cost_model, simulate
from memplan.planning.base_graph import eager_total, without_evictions
from memplan.planning.budget import plan_within
from memplan.planning.options import PlanOptions
from memplan.trace.optimizer.optimizers import state_bytes
from tests.models import Made
from tests.slow import slow

MEASURED: dict[str, Any] = json.loads(Path(__file__).with_name("h200.json").read_text(encoding="utf-8"))
_LOG = logging.getLogger(__name__)
HAS_TRITON = importlib.util.find_spec("triton") is not None


def test_a_plan_has_the_gpus_kernels_alignment_and_costs() -> None:
    model, inputs = ZOO["gpt2"]()
    plan = memplan.plan(model, inputs, target="h100")
    assert plan.alignment == 512
    assert plan.versions["target"] == "h100"
    assert plan.reserve == find_gpu("h100").workspace
    assert "NVIDIA H100" in str(plan.report())
    assert plan.total - plan.reserve < memplan.plan(model, inputs).total * 1.2
    names = {op.target for op in plan.graph.ops}
    assert not any("for_cpu" in name for name in names)
    assert any("attention" in name for name in names)


@pytest.mark.parametrize(
    ("target", "dtype", "width", "counted"),
    [
        pytest.param("h100", torch.bfloat16, 64, True, id="cudnn"),
        pytest.param("a100", torch.bfloat16, 64, True, id="flash"),
        pytest.param("h100", torch.float32, 64, False, id="efficient"),
    ],
)
def test_the_backward_of_attention_adds_up_in_32_bits(
    target: str, dtype: torch.dtype, width: int, counted: bool
) -> None:
    class Attention(nn.Module):
        """Attention of a projection to itself."""

        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(2 * width, 2 * width, dtype=dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Attend with two heads."""
            heads = self.project(x).unflatten(-1, (2, width)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads)

    x = torch.empty(4, 32, 2 * width, dtype=dtype)
    plan = memplan.plan(Attention(), x, target=target, kernels="aten")
    report = plan.report()
    assert plan.outside["temporaries"] == counted * 4 * x.numel()
    assert ("attention's backward" in str(report)) == counted
    assert report.outside.workspaces == find_gpu(target).workspace
    assert report.outside.reserve == 0


def _attended(keys: int = 16, **how: Any) -> Callable[..., Any]:
    """Return an attention of a tensor to itself, up to some of its keys, with a mask if one is given."""

    def attended(m: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        mask = mask if mask is None else mask.expand(-1, -1, 16, 16)
        return nn.functional.scaled_dot_product_attention(x, x[:, :, :keys], x[:, :, :keys], mask, **how)

    return attended


@pytest.mark.parametrize(
    ("function", "mask", "how", "reason"),
    [
        pytest.param(_attended(), True, {"kernels": "aten"}, "last stride of its mask", id="mask"),
        pytest.param(
            _attended(), True, {}, "", id="laid out", marks=pytest.mark.skipif(not HAS_TRITON, reason="Triton")
        ),
        pytest.param(_attended(), False, {"kernels": "aten", "dtype": torch.float64}, "types are float64", id="type"),
        pytest.param(_attended(0), False, {"kernels": "aten"}, "no queries or no keys", id="empty"),
        pytest.param(
            *(lambda m, x: _attended()(m, x[0]), False, {"kernels": "aten"}),
            "not have four dimensions",
            id="dimensions",
        ),
        pytest.param(_attended(), False, {"kernels": "aten"}, "", id="fused"),
    ],
)
def test_attention_in_single_ops_is_said_in_the_log_and_the_report(
    function: Callable[..., Any], mask: bool, how: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`mask`: there is one whose last stride is 0, which generated kernels get in rows; eager's keep eager's bits."""
    how = {"target": "h100", "dtype": torch.bfloat16, **how}
    x = torch.empty(2, 2, 16, 8, dtype=how.pop("dtype"), requires_grad=True)
    inputs = (x, torch.ones(2, 1, 1, 1, dtype=torch.bool)) if mask else (x,)
    report = str(memplan.plan(Made(function), inputs, **how).report())
    assert ("attention runs in single ops" in caplog.text) == ("attention runs in single ops" in report) == bool(reason)
    assert reason in caplog.text
    assert reason in report


class _Biased(nn.Module):
    """Attention under autocast with a learned bias of positions, laid out as T5 and Swin compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(128, 3 * 128)
        self.bias = nn.Parameter(torch.zeros(256, 256, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend with two heads."""
        with torch.autocast("cuda", torch.bfloat16):
            query, key, value = self.project(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
            bias = self.bias.permute(2, 0, 1)[None]
            return nn.functional.scaled_dot_product_attention(query, key, value, bias).float().square().mean()


def _padded(name: str) -> real_sizes.Example:
    """Return a model of transformers with its loss, and tokens of which some are padding."""
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "bert":
        model: Any = BertForMaskedLM(BertConfig(**sizes, vocab_size=64))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=64))
    tokens = torch.zeros(4, 256, dtype=torch.long)
    padding = torch.arange(256).ge(torch.tensor([[0], [16], [32], [64]])).long()  # on the left

    def loss(m: Any, tokens: torch.Tensor, padding: torch.Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return m.model(input_ids=tokens, attention_mask=padding).logits.float().square().mean()

    return Made(loss, model=model), (tokens, padding)


@pytest.mark.skipif(not HAS_TRITON, reason="Inductor generates Triton's code")
@pytest.mark.parametrize(
    ("make", "kernel"),
    [
        pytest.param(lambda: (_Biased(), (torch.empty(4, 256, 128),)), "efficient", id="bias"),
        pytest.param(lambda: _padded("bert"), "efficient", id="bert"),
        pytest.param(lambda: _padded("llama"), "cudnn", id="llama"),
    ],
)
def test_attention_with_a_mask_that_cannot_be_dropped_runs_fused(
    make: Callable[[], real_sizes.Example], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = make()
    plan = memplan.plan(model, inputs, target="h200")
    names = Counter(op.target.split(".")[1] for op in plan.graph.ops)
    assert names[f"_scaled_dot_product_{kernel}_attention"] == 1
    assert names[f"_scaled_dot_product_{kernel}_attention_backward"] == 1
    assert not any("softmax" in name for name in names)
    if model.__class__ is _Biased:
        monkeypatch.setattr("memplan.trace.capture.fused_attention.in_rows", lambda mask: mask)
        products = 2 * 4 * 2 * 256 * 256  # bytes: of queries and keys
        assert plan.total + products < memplan.plan(model, inputs, target="h200").total


def test_a_plan_is_saved_and_loaded_with_its_target(tmp_path: Path) -> None:
    model, inputs = ZOO["mlp"]()
    plan = memplan.plan(model, inputs, target="a100", reserve="1MiB")
    plan.save(tmp_path / "plan.json")
    loaded = memplan.load(tmp_path / "plan.json")
    assert loaded.versions["target"] == "a100"
    assert loaded.total == plan.total
    assert loaded.reserve == find_gpu("a100").workspace + (1 << 20)


def test_a_model_on_the_cpu_and_one_on_meta_have_the_same_plan() -> None:
    model, inputs = ZOO["mlp"]()
    here = memplan.plan(model, inputs, target="h200")
    on_meta = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), inputs)
    there = memplan.plan(model.to("meta"), on_meta, target="h200")
    assert (here.arena_size, here.total, here.problem.fingerprint) == (
        there.arena_size,
        there.total,
        there.problem.fingerprint,
    )


def test_a_budget_is_kept_and_its_plan_is_refused_where_none_keeps_it() -> None:
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
    model, inputs = nn.Sequential(*layers), torch.empty(512, 64)
    how: dict[str, Any] = {"target": "rtx4090", "kernels": "aten"}
    kept = memplan.plan(model, inputs, arena_budget=0.8, **how)
    assert kept.arena_size <= 0.8 * memplan.plan(model, inputs, **how).max_live
    assert kept.evictions
    with pytest.raises(memplan.errors.BudgetInfeasible):
        memplan.plan(model, inputs, budget="1MiB", **how)


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"target": "h1000"}, UnsupportedDevice, "did you mean 'h100'"),
        ({"target": "h100", "device": "cpu"}, UnsupportedDevice, "target with device"),
        ({"target": "h100", "dynamic_shapes": {"x": {0: torch.export.Dim("n")}}}, InvalidShapes, "one shape"),
    ],
)
def test_what_a_target_cannot_be_planned_with_is_refused(
    how: dict[str, Any], error: type[Exception], said: str
) -> None:
    model, inputs = ZOO["mlp"]()
    with pytest.raises(error, match=said):
        memplan.plan(model, inputs, **how)


def _llama_7b(layers: int) -> tuple[nn.Module, torch.Tensor]:
    size = {"width": 4096, "mlp": 11008, "heads": 32, "kv": 32, "vocab": 32000}
    model, (tokens,) = llama_of({**size, "layers": layers}, batch=8, length=2048)
    return model.to(torch.bfloat16), tokens


@pytest.mark.parametrize(("layers", "budget"), [(2, "12GiB"), slow(32, "24GiB")])
def test_a_step_whose_model_is_larger_than_the_card_is_as_fast_as_its_kernels(layers: int, budget: str) -> None:
    model, tokens = _llama_7b(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = memplan.plan_step(
        *(model, optimizer, lambda loss: loss, tokens), device="cuda", target="rtx4090", budget=budget
    )
    assert plan.on_device <= parse_size(budget)
    assert plan.graph.is_generated == HAS_TRITON, "a GPU's default kernels"
    assert not optimizer.state
    held = plan.outside["parameters"] + plan.outside["optimizer state"]
    assert held == pytest.approx(3 * sum(p.nbytes for p in model.parameters()), rel=1e-4)
    copies: dict[str, Counter[str]] = {RELOAD: Counter(), OFFLOAD: Counter()}
    for op in plan.graph.ops:
        if op.target in copies:
            ends = [plan.graph.storages[plan.graph.values[v].storage] for v in (*op.reads, *op.writes)]
            for end in ends:
                copies[op.target][end.name] += end.device == "cpu"
    kept = (StorageKind.PARAMETER, StorageKind.OPTIMIZER_STATE)
    names = [s.name for s in plan.graph.storages if s.kind in kept and s.device == "cpu"]
    assert len(names) > 80
    written = [n for n in names if copies[OFFLOAD][n] == 1 and copies[RELOAD][n]]
    assert len(written) == len(names) - len(list(model.buffers()))
    costs = cost_model("rtx4090")
    kernels = sum(costs.op_seconds(plan.graph, op) for op in plan.graph.ops if op.target not in TRANSFERS)
    assert held / costs.to_host.bytes_per_second < kernels
    assert simulate(plan.graph, costs)[0] <= 1.25 * kernels


@pytest.mark.slow
def test_a_step_in_less_than_its_state_takes_at_most_half_again_as_long() -> None:
    model, (tokens,) = real_sizes.llama1b()
    step = (model, torch.optim.AdamW(model.parameters()), lambda loss: loss, tokens)
    free = memplan.plan_step(*step, target="rtx4090")
    plan = memplan.plan_step(*step, device="cuda", target="rtx4090", budget="6GB")
    assert plan.on_device <= 6e9 < plan.outside["optimizer state"] + plan.outside["parameters"]
    costs = cost_model("rtx4090")
    assert simulate(plan.graph, costs)[0] <= 1.5 * sum(costs.seconds(free.graph))
    assert 0 < plan.graph.updated_on_host < plan.outside["optimizer state"] + plan.outside["parameters"]


class _Deep(nn.Module):
    """A model that returns its loss, and whose layers are much smaller than the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        found: torch.Tensor = self.layers(x).square().mean()
        return found


@pytest.mark.parametrize(("memory", "loaded"), [("4MiB", True), ("64KiB", False)])
def test_what_fits_a_card_while_the_model_stays_on_the_cpu(memory: str, loaded: bool) -> None:
    answer = memplan.fits(_Deep(), torch.empty(8, 256), target=f"sm89:{memory}", kernels="aten", allowance=0, slack=0)
    assert not answer
    assert answer.need.fixed > parse_size(memory)
    assert (answer.within is not None, answer.smallest is None) == (loaded, loaded)
    assert ("bound by" in str(answer)) == loaded
    if loaded:
        assert answer.within is not None
        assert answer.within.on_device <= parse_size(memory)
        assert f"{format_bytes(answer.within.on_host)} there" in str(answer)
        assert "in the predicted time of a step" in str(answer)
        lanes = answer.lanes
        assert lanes is not None
        assert lanes["step"] >= max(lanes.values())
        assert max(lanes, key=lambda lane: (lane != "step", lanes[lane])) in str(answer)


def test_a_step_is_planned_as_it_is_compiled() -> None:
    model, inputs = ZOO["mlp"]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    plan = memplan.plan_step(model, optimizer, lambda loss: loss, inputs)
    assert not optimizer.state
    compiled = memplan.compile_step(model, optimizer, lambda loss: loss, inputs)
    assert plan.graph == compiled.plan.graph
    assert plan.arena_size == compiled.plan.arena_size
    away = memplan.plan_step(model, torch.optim.SGD(model.parameters()), lambda loss: loss, inputs, target="h100")
    assert away.versions["target"] == "h100"
    assert {s.device for s in away.graph.storages if s.kind is StorageKind.PARAMETER} == {"cuda:0"}


@pytest.mark.parametrize(
    ("make", "how", "error", "said"),
    [
        (torch.optim.Adagrad, {}, UnsupportedGraph, "its own step"),
        (torch.optim.SGD, {"clip_grad_norm": -1}, MemplanError, "clip_grad_norm=-1"),
        (torch.optim.SGD, {"target": "h100", "device": "cpu"}, UnsupportedDevice, "target with device"),
        (torch.optim.SGD, {"device": "cpu", "budget": "4KiB"}, BudgetInfeasible, "needs at least"),
    ],
)
def test_a_step_that_cannot_be_planned_is_refused(
    make: Any, how: dict[str, Any], error: type[Exception], said: str
) -> None:
    model, inputs = ZOO["mlp"]()
    with pytest.raises(error, match=said):
        memplan.plan_step(model, make(model.parameters()), lambda loss: loss, inputs, **how)


def test_without_triton_generated_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("memplan.trace.for_target.find_spec", lambda name: None if name == "triton" else find(name))
    model, inputs = ZOO["mlp"]()
    with pytest.raises(LibraryNotInstalled, match="pip install triton"):
        memplan.plan(model, inputs, target="h100", kernels="inductor")


def test_a_model_that_is_on_another_device_is_refused() -> None:
    """Any device but the CPU and meta: fake tensors on cuda stand for a model that is on a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Linear(4, 4)
    with FakeTensorMode():
        x = torch.empty(2, 4, device="cuda")
    with pytest.raises(UnsupportedDevice, match="is on cuda:0 already"):
        memplan.plan(model, x, target="h100")


@pytest.mark.skipif(not HAS_TRITON, reason="Inductor generates Triton's code")
def test_generated_kernels_are_tritons() -> None:
    model, inputs = ZOO["gpt2"]()
    plan = memplan.plan(model, inputs, target="h100")
    assert any(".triton_" in op.target for op in plan.graph.ops), "they are the default"
    eagers = memplan.plan(model, inputs, target="h100", kernels="aten")
    assert plan.total < eagers.total


def _product(m: Any, x: torch.Tensor) -> Any:
    return x @ m.weight


def _logged(m: Any, x: torch.Tensor) -> Any:
    _LOG.info("a product")
    return _product(m, x)


@pytest.mark.skipif(not HAS_TRITON, reason="Inductor generates Triton's code")
@pytest.mark.parametrize(
    ("function", "sizes", "how", "expected"),
    [
        pytest.param(_product, (4096, 64, 1024), {}, 4 * (4096 + 64) * 1024, id="overwritten"),
        pytest.param(
            *(lambda m, x: _product(m, x).unflatten(0, (2, -1))[:, :-1].flatten(0, 1), (4096, 64, 1024), {}),
            4 * (4096 + 4096) * 1024,
            id="cut",
        ),
        pytest.param(_product, (2048, 2048, 2047), {"dtype": "bfloat16"}, 2 * (2048 + 2048) * 2048, id="padded"),
        pytest.param(_logged, (64, 64, 64), {}, None, id="graph-break"),
        pytest.param(_product, (64, 64, 64), {"kernels": "aten"}, None, id="eager"),
        pytest.param(_product, (64, 64, 64), {"train": False}, None, id="forward"),
    ],
)
def test_what_torch_compile_needs_is_counted_by_its_own_code(
    function: Any, sizes: tuple[int, int, int], how: dict[str, Any], expected: int | None
) -> None:
    """A product and the gradient of its weight: the product's own gradient lies over it, but where Inductor reads
    it at another index. Rows of half precision are padded, and so is the gradient of the weight.
    """
    rows, inner, columns = sizes
    weight = nn.Parameter(torch.empty(inner, columns))
    model = Made(lambda m, x: function(m, x).square().mean(), weight=weight)
    x = torch.empty(rows, inner)
    answer = memplan.fits(model, x, target="h100", optimizer="none", allowance=0, search=False, **how)
    assert (answer.compiled is None) == (expected is None) == ("torch.compile" not in str(answer))
    if answer.compiled is not None:
        assert answer.compiled - answer.need.fixed == pytest.approx(expected, abs=4096)


@pytest.mark.skipif(not HAS_TRITON, reason="Inductor generates Triton's code")
@pytest.mark.parametrize(("budget", "divided"), [("min", True), slow(0.9, True), (1.0, False), slow("10GiB", False)])
def test_a_step_is_captured_and_code_generated_once_under_a_budget(
    budget: float | str, divided: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The head is in blocks where the budget may be less than the undivided step needs.

    A share is one of what the undivided step needs, which is not generated.
    """
    caplog.set_level(logging.INFO, "memplan.time")

    def loss(m: Any, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(m.head(m.project(x).tanh()), words)

    model = Made(loss, project=nn.Linear(64, 64), head=nn.Linear(64, 8192))
    data = (torch.randn(2048, 64), torch.zeros(2048, dtype=torch.long))
    with fresh_cache():
        plan = memplan.plan(model, data, target="h100", budget=budget)
        begun = Counter(record.getMessage() for record in caplog.records)
        assert begun["tracing Made ..."] == begun["generating kernels of Made ..."] == 1
        assert (plan.division is not None) is divided
        if budget == 0.9:
            whole = memplan.plan(model, data, target="h100")
            assert plan.eviction is not None
            assert plan.eviction.budget == pytest.approx(0.9 * (eager_total(whole.graph) + whole.reserve), rel=0.001)


@pytest.mark.skipif(not HAS_TRITON, reason="Inductor generates Triton's code")
@pytest.mark.parametrize(("make", "kept"), [(torch.optim.SGD, 0), (torch.optim.AdamW, 2)])
def test_the_head_of_a_whole_step_is_whole_where_the_budget_has_room_for_what_the_optimizer_keeps(
    make: Any, kept: int
) -> None:
    def loss(m: Any, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(m.head(x), words)

    model = Made(loss, head=nn.Linear(1024, 8192))
    data = (torch.randn(128, 1024), torch.zeros(128, dtype=torch.long))
    optimizer = make(model.parameters())
    parameters = sum(p.nbytes for p in model.parameters())
    assert state_bytes(optimizer) == kept * parameters

    def planned(budget: int | None) -> Plan:
        return memplan.plan_step(model, optimizer, lambda loss: loss, data, target="h100", budget=budget)

    undivided = planned(None)
    need = eager_total(undivided.graph) + undivided.reserve
    assert planned(need + parameters).division is None


@pytest.mark.skipif(not HAS_TRITON, reason="Inductor generates Triton's code")
def test_the_gradient_of_a_padded_head_is_one_kernel_per_block() -> None:
    """Blocks share the zeros that their rows are padded with, which are of no block: nothing is written in 32 bits."""

    def loss(m: Any, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return nn.functional.cross_entropy(m.head(m.project(x).tanh()).float(), words)

    model = Made(loss, project=nn.Linear(128, 128), head=nn.Linear(128, 2001, bias=False))
    plan = memplan.plan(model, (torch.randn(4096, 128), torch.zeros(4096, dtype=torch.long)), target="h100", budget=0.9)
    assert plan.division is not None
    blocks = plan.division.blocks
    assert blocks is not None
    wide = (4096 // blocks, 2008)
    made = [plan.graph.values[v] for op in plan.graph.ops for v in op.writes]
    assert [v.dtype for v in made if v.shape == wide] == ["bfloat16"] * 2 * blocks  # logits, and their gradient


def _of_real_size(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model that an H200 has trained, and its inputs."""
    make: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]] = getattr(real_sizes, name)
    return make()


@pytest.mark.parametrize(
    ("name", "kernels", "within"),
    [
        slow("resnet", "aten", 0.01),
        slow("gpt2", "aten", 0.02),
        ("gpt2", "inductor", 0.01),
        slow("llama1b", "inductor", 0.01),
        slow("resnet", "inductor", 0.04),
        slow("bert", "inductor", 0.01),
    ],
)
def test_totals_are_those_that_an_h200_had(name: str, kernels: str, within: float) -> None:
    """Within 1 % of the total, in which there libraries' workspaces were not, and of a generated step's arena.

    ResNet's may differ: which results of convolutions leave its arena is decided by their workspaces there. By torch
    2.11, as on the H200, its total is equal to 0.1 %; the Inductor of 2.13 makes it 3.4 % smaller.
    """
    if kernels == "inductor" and not HAS_TRITON:
        pytest.skip("Inductor generates Triton's code")
    model, inputs = _of_real_size(name)
    how: dict[str, Any] = {"kernels": kernels}
    known = MEASURED[name][kernels]
    plan = memplan.plan(model, inputs, target="h200", **how)
    assert (plan.total - plan.reserve) / 1e9 == pytest.approx(known["total"], rel=within)
    if kernels == "inductor" and name != "resnet":
        within_step = plan.arena_size + plan.outside["intermediate"]
        assert within_step / 1e9 == pytest.approx(known["arena"], rel=0.01)
        assert all(
            op.direct or not plan.graph.storages[s].planned for op in plan.graph.ops for s in plan.graph.written(op)
        )
    assert not plan.evictions, "nobody asked for a budget"


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Inductor generates Triton's code")
@pytest.mark.parametrize("name", ["resnet", "gpt2", "bert", "llama1b"])
def test_what_fits_answers_is_the_peak_of_an_h200(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's within 5 %, torch.compile's and the planned step's within 3 %, with cuBLAS's workspaces as the allowance.

    The optimizer was fused there: it allocated nothing beside its state. ResNet's is within 3 % by torch 2.11, as on
    the H200; the Inductor of 2.13 makes its step smaller. To transformers, the torch.compile of 2.11 was an export,
    in which BERT keeps a mask that hides nothing: by 2.13 it has none, and torch.compile needs 9.1 GB.
    """
    monkeypatch.setattr("transformers.masking_utils.is_torchdynamo_exporting", lambda: True)
    model, inputs = _of_real_size(name)
    workspace = find_gpu("h200").workspace
    answer = memplan.fits(model, inputs, target="h200", search=False, allowance=workspace)
    assert answer.eager / 1e9 == pytest.approx(MEASURED["eager"][name], rel=0.05)
    assert answer.compiled is not None
    assert answer.compiled / 1e9 == pytest.approx(MEASURED["compile"][name], rel=0.03)
    step = answer.plan.total + answer.need.state + workspace
    assert step / 1e9 == pytest.approx(MEASURED["peak"][name], rel=0.04 if name == "resnet" else 0.03)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Inductor generates Triton's code")
@pytest.mark.parametrize(("budget", "peak"), [("2.55GiB", 3.807), ("2GiB", 3.205)])
def test_a_budgets_peak_is_that_of_an_h200(budget: str, peak: float) -> None:
    """Within 3 %: GPT-2 with its head in blocks. The budget there did not count cuBLAS's workspaces."""
    model, inputs = _of_real_size("gpt2")
    plan = memplan.plan(model, inputs, target="h200", budget=parse_size(budget) + find_gpu("h200").workspace)
    state = 8 * sum(p.numel() for p in model.parameters())
    assert (plan.total + state) / 1e9 == pytest.approx(peak, rel=0.03)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Inductor generates Triton's code")
@pytest.mark.parametrize("name", ["gpt2", "llama1b"])
def test_no_budget_takes_more_time_than_a_smaller_one(name: str) -> None:
    """24 budgets, every 2.5 %, of the step that `memplan budget` takes; one of them by `memplan.plan` too."""
    model, inputs = _of_real_size(name)
    whole = memplan.plan(model, inputs, target="h200", budget=0.999)
    assert not whole.evictions
    kept = list[EvictionPlan]()
    with suppress(BudgetInfeasible):
        for k in range(24):
            asked = PlanOptions(reserve=whole.reserve, budget=whole.on_device * (40 - k) // 40)
            made = plan_within(without_evictions(whole), asked, cost_model("h200")).eviction
            assert made is not None
            kept.append(made)
    assert len(kept) > 14
    assert all(one.seconds <= two.seconds for one, two in pairwise(kept))
    again = memplan.plan(model, inputs, target="h200", budget=kept[8].budget)
    assert again.eviction == kept[8]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available")
@pytest.mark.parametrize("kernels", ["aten", "inductor"])
def test_a_gpu_plans_what_its_stand_in_does(kernels: str) -> None:
    """Graph, order and arena, in two processes: one has the GPU, from the other it is hidden."""
    code = (
        "import json, sys, torch, memplan; from benchmarks.real_sizes import gpt2\n"
        "device, how = ('cuda', {}) if torch.cuda.is_available() else ('meta', {'target': sys.argv[2]})\n"
        "model, inputs = gpt2(device, tiny=True)\n"
        "plan = memplan.plan(model, inputs, kernels=sys.argv[1], **how)\n"
        "ops = [op.target for op in plan.graph.ops]\n"
        "print(json.dumps([ops, list(plan.schedule.order), plan.arena_size, plan.problem.fingerprint]))"
    )
    known = gpu_called(torch.cuda.get_device_name())
    if known is None:
        pytest.skip(f"{torch.cuda.get_device_name()} is no known target")
    found = []
    for hidden in ({}, {"CUDA_VISIBLE_DEVICES": ""}):
        command = [sys.executable, "-c", code, kernels, known.name]
        ended = subprocess.run(command, env={**os.environ, **hidden}, capture_output=True, text=True, check=True)
        found.append(json.loads(ended.stdout.splitlines()[-1]))
    here, there = found
    assert here == there


def test_what_cannot_stand_in_is_traced_as_the_cpu_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> None:
        """Refuse, as a system without fork does."""
        raise UnsupportedDevice("needs a system that forks", where="target")

    monkeypatch.setattr("memplan.trace.fits.require_child", refused)
    model, inputs = ZOO["mlp"]()
    assert memplan.fits(model, inputs, target="h100", search=False)
    assert "traced as the CPU's" in caplog.text
