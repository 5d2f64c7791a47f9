"""Tests what can be traced; the rest is refused with the node, the reason and a hint, and nothing else is said."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import memplan
from benchmarks.zoo import ZOO
from memplan.errors import UnsupportedGraph
from memplan.runtime import compile as memplan_compile
from memplan.trace import capture_call, plan
from memplan.trace.capture.front_ends import quiet
from tests.cli.helpers import python
from tests.models import Apply, traced_nano
from tests.slow import slow


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 0:
            x = x + 1
        return x * 2


def _raises(_: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the model's own complaint")


@dataclass(slots=True)
class Made:
    out: torch.Tensor


class MakesItsOwn(nn.Module):
    def forward(self, x: torch.Tensor) -> Made:
        return Made(x.sin())


def test_results_of_unknown_types_are_refused_with_what_makes_them_known() -> None:
    x = torch.randn(4)
    with pytest.raises(UnsupportedGraph, match=r"not a known type|unhashable type") as caught:
        plan(MakesItsOwn(), x, train=False)
    assert "torch.export.register_dataclass" in str(caught.value)
    torch.export.register_dataclass(Made)
    assert torch.equal(memplan_compile(MakesItsOwn(), x, train=False)(x).out, x.sin())


def test_a_model_that_computes_otherwise_in_an_export_is_not_exported() -> None:
    model, x = Apply(lambda _, x: x * (2 if torch.compiler.is_exporting() else 3)), torch.randn(3)
    assert torch.equal(memplan_compile(model, x, train=False)(x), model(x))
    assert not torch.compiler.is_exporting()


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (Breaks(), "[Dd]ata-dependent"),
        (Apply(lambda _, x: x[x > 0].sum()), "nonzero"),
        (Apply(_raises), "own complaint"),
    ],
)
def test_untraceable_models_are_refused_with_a_hint(
    model: nn.Module, word: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedGraph, match=word) as caught:
        plan(model, torch.randn(4), train=False)
    assert caught.value.where
    assert caught.value.hint
    assert capfd.readouterr() == ("", "")


def test_not_a_module() -> None:
    with pytest.raises(UnsupportedGraph, match=r"not an nn\.Module"):
        plan(lambda x: x, torch.randn(3))  # type: ignore[arg-type]


def test_training_without_anything_to_train() -> None:
    with pytest.raises(UnsupportedGraph, match="requires a gradient"):
        plan(nn.ReLU(), torch.randn(3), train=True)


@pytest.mark.parametrize("name", [slow("vit"), "resnet"])  # moving a model to meta unties its tied parameters
def test_a_meta_model_gets_the_plan_of_the_real_one(name: str) -> None:
    model, args = ZOO[name]("nano")
    real = plan(model, args)
    meta = plan(model.to("meta"), tuple(a.to("meta") for a in args))
    assert meta.fingerprint == real.fingerprint
    assert meta.arena_size == real.arena_size


def test_buffers_know_where_they_come_from() -> None:
    names = {name for name, _ in ZOO["gpt2"]("nano")[0].named_modules()}
    origins = [s.origin for s in traced_nano("gpt2").graph.storages if s.planned]
    assert all(o.module in names for o in origins if o.module), {o.module for o in origins} - names
    assert sum(bool(o.module) for o in origins) > 0.8 * len(origins)
    assert any(o.source.startswith("modeling_gpt2.py:") for o in origins)


@pytest.mark.slow
def test_planning_seven_billion_parameters_allocates_next_to_nothing() -> None:
    code = """
import resource, torch
from benchmarks.zoo import llama_7b
from memplan.trace import plan
torch.ones(2, 2) @ torch.ones(2, 2)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
import torch._dynamo, torch._functorch.aot_autograd
before = peak()
model, args = llama_7b()
p = plan(model, args)
parameters = sum(x.numel() for x in model.parameters())
assert parameters > 6.5e9, parameters
assert p.arena_size > 2**30
assert p.outside["parameters"] >= 2 * parameters
print(peak() - before)
"""
    run = python(code)
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout.split()[-1]) < 2**30


def test_a_wrong_shape_is_said_in_one_line() -> None:
    with pytest.raises(UnsupportedGraph, match=r"\[3, 5\] X \[4, 8\]") as caught:
        plan(nn.Linear(4, 8), torch.randn(3, 5))
    assert "\n" not in caught.value.reason
    assert "FakeTensor" not in caught.value.reason


@pytest.mark.parametrize("function", [torch.nonzero, lambda x: x[x > 0], lambda x: x.sum().item()])
def test_what_depends_on_data_says_so(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(UnsupportedGraph, match="depend on tensor values") as caught:
        plan(Apply(lambda w, x: w * function(x)), torch.ones(4))
    assert "without fullgraph=True" in str(caught.value)


def test_a_view_of_a_parameter_that_has_no_bytes_in_the_trace_is_refused() -> None:
    class Real(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.w.real, (self.w * x).abs()

    with pytest.raises(UnsupportedGraph, match="a view of a parameter or an input"):
        plan(Real(), torch.randn(4, 3))


def test_one_thread_is_silent_while_another_one_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch.some_internal")

    def say(words: str) -> None:
        log.warning(words)
        warnings.warn(words, stacklevel=1)

    other = threading.Thread(target=say, args=("of another thread",))
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        with quiet():
            say("of the tracing thread")
            other.start()
            other.join()
        say("afterwards")
    assert [record.message for record in caplog.records] == ["of another thread", "afterwards"]
    assert [str(one.message) for one in raised] == ["of another thread", "afterwards"]


def test_threads_that_overlap_leave_everything_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    before = (logging.root.manager.disable, list(warnings.filters), [list(h.filters) for h in logging.root.handlers])
    entered, left = threading.Event(), threading.Event()

    def second() -> None:
        with quiet():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=second)
    with quiet():
        thread.start()
        assert entered.wait(10)
    left.set()  # the one that came later leaves later
    thread.join()
    after = (logging.root.manager.disable, list(warnings.filters), [list(h.filters) for h in logging.root.handlers])
    assert after == before
    logging.getLogger("torch.some_internal").warning("afterwards")
    assert caplog.messages == ["afterwards"]


def test_a_captured_step_is_never_changed_by_tracing_it() -> None:
    model = Apply(lambda w, x, target: nn.functional.cross_entropy(nn.functional.dropout(x * w), target))
    captured = capture_call(model, (torch.randn(16, 32), torch.randint(0, 32, (16,))), train=True)
    whole = captured.retrace()
    divided = captured.retrace(division=memplan.Division(blocks=4), compress="int8")
    assert len(divided.graph.ops) > len(whole.graph.ops)
    assert (divided.division is not None, divided.compress) == (True, "int8")
    assert captured.retrace().graph == whole.graph


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(4, 8), torch.randn(3, 4).double()),
        (nn.Linear(4, 8), torch.ones(3, 4, dtype=torch.long)),
        (nn.LayerNorm(4), torch.randn(3, 4).double()),
        (nn.BatchNorm1d(4).eval(), torch.randn(3, 4).double()),
    ],
)
def test_several_types_are_refused_as_in_eager(layer: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError):
        layer(x)
    with pytest.raises(UnsupportedGraph, match=r"takes one type, and is given .*\["):
        plan(layer, x)
