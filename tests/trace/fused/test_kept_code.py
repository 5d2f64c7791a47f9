"""Recorded code is kept beside Inductor's cache, and read instead of written again where nothing has changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import compile_fx, config
from torch._inductor.codecache import FxGraphCache
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache

import memplan
from memplan.trace import capture_call
from tests.models import Made

pytestmark = pytest.mark.skipif(
    "require_shape_env" not in inspect.signature(FxGraphCache._check_can_cache).parameters,
    reason="before torch 2.13, Inductor keeps no graph whose sizes are all fixed",
)


def _small() -> Made:
    """A product, elementwise ops, and an attention kernel that returns new tensors."""
    attend = nn.functional.scaled_dot_product_attention
    return Made(lambda m, x: attend(y := m.up(x).tanh(), y, y).square().mean(), up=nn.Linear(8, 8))


def _x() -> torch.Tensor:
    return torch.linspace(0, 1, 2 * 2 * 4 * 8).view(2, 2, 4, 8)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs whose code Inductor writes, with an empty cache."""
    graphs: list[Any] = []
    own = compile_fx.compile_fx_inner

    def counted(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return own(graph, inputs, **options)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", counted)
    with fresh_cache():
        yield graphs


def _files() -> list[Path]:
    return [path for path in (Path(cache_dir()) / "memplan").rglob("*") if path.is_file()]


def test_code_is_written_once_and_the_plan_is_the_same(written: list[Any]) -> None:
    torch.manual_seed(0)
    model = _small()
    first = memplan.plan(model, _x(), kernels="inductor")
    assert len(written) == len(_files()) == 2
    again = memplan.plan(model, _x(), kernels="inductor")
    assert len(written) == 2
    assert again.graph == first.graph
    assert again.arena_size == first.arena_size
    compiled = memplan.compile(model, _x(), kernels="inductor")
    assert len(written) == 2
    compiled(_x()).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with config.patch(fx_graph_cache=False):
        memplan.compile(model, _x(), kernels="inductor")(_x()).backward()
    assert len(written) == 4
    assert all(torch.equal(one, p.grad) for one, p in zip(found, model.parameters(), strict=True))  # type: ignore[arg-type]


def test_other_options_settings_and_source_lines_have_code_of_their_own(written: list[Any]) -> None:
    captured = capture_call(_small(), _x(), kernels="inductor", train=False)
    captured.retrace()
    with config.patch({"cpp.simdlen": 0}):
        captured.retrace()
    for node in captured.captured.graph_module.graph.nodes:
        node.meta["stack_trace"] = 'File "other.py", line 3, in forward\n    x.tanh()'
    moved = captured.retrace()
    assert len(written) == len(_files()) == 3
    assert any("other.py:3" in op.origin.source for op in moved.graph.ops)
    captured.retrace()
    assert len(written) == 3


def test_a_damaged_file_is_written_again(written: list[Any]) -> None:
    captured = capture_call(_small(), _x(), kernels="inductor", train=False)
    first = captured.retrace()
    (file,) = _files()
    for content in (b"", b"no pickle", file.read_bytes()[:-9]):
        before = len(written)
        file.write_bytes(content)
        assert captured.retrace().graph == first.graph
        assert len(written) == before + 1


def test_code_is_found_whatever_was_compiled_before(written: list[Any]) -> None:
    """Compiling for a GPU marks the inputs that stay where they are; the same fake tensors belong to other variants."""
    captured = capture_call(_small(), _x(), kernels="inductor")
    first, count = captured.retrace(), len(written)
    for node in captured.captured.graph_module.graph.find_nodes(op="placeholder"):
        node.meta["val"]._is_inductor_static = True
    assert captured.retrace().graph == first.graph
    assert len(written) == count


def test_without_caches_code_is_written_each_time(written: list[Any]) -> None:
    """Disabled caches, as by `TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`, which no setting of Inductor's overrides."""
    captured = capture_call(_small(), _x(), kernels="inductor")
    first, count = captured.retrace(), len(written)
    config: Any = torch.compiler.config
    with config.patch(force_disable_caches=True):
        assert captured.retrace().graph == first.graph
    assert len(written) == 2 * count
