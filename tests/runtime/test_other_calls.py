"""Calls that differ from the example, with no option: plans of their own, then eager."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import InputMismatch
from memplan.runtime import CompiledModule, compile
from tests.models import Made
from tests.runtime.reference import same_gradients
from tests.slow import slow


class Classifier(nn.Module):
    """Returns logits, or a loss where it gets labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None, scale: float = 1.0) -> Any:
        logits = self.head(self.drop(self.layer(self.embed(tokens)).relu()).mean(1)) * scale
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _batch(rows: int = 6, length: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(0, 11, (rows, length), generator=made),
        "labels": torch.randint(0, 3, (rows,), generator=made),
    }


def _pair(**options: Any) -> tuple[Classifier, CompiledModule]:
    eager = Classifier()
    compiled = compile(copy.deepcopy(eager), _batch(), **{"sanitize": "poison", **options})
    return eager, compiled


def _require_step_as_eager(eager: nn.Module, compiled: CompiledModule, batch: dict[str, Any], seed: int = 0) -> None:
    losses = []
    for call in (eager, compiled):
        torch.manual_seed(seed)
        call.zero_grad()
        losses.append(call(**batch)["loss"])
        losses[-1].backward()
    assert torch.equal(*losses)
    assert same_gradients(eager, compiled)
    eager.zero_grad()
    compiled.zero_grad()


def test_epochs_with_a_last_batch_and_an_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    eager, compiled = _pair()
    with caplog.at_level(logging.INFO, logger="memplan"):
        for epoch in range(2):
            for n, rows in enumerate((6, 6, 4)):
                _require_step_as_eager(eager, compiled, _batch(rows, seed=n), epoch)
            eager.eval()
            compiled.eval()
            with torch.no_grad():
                batch = _batch(9)
                assert torch.equal(compiled(**batch)["loss"], eager(**batch)["loss"])
                del batch["labels"]
                assert torch.equal(compiled(**batch)["logits"], eager(**batch)["logits"])
            eager.train()
            compiled.train()
    messages = [r.message for r in caplog.records if "makes program" in r.message]
    assert len(messages) == 3, "the last batch, the evaluation, the evaluation without labels"
    assert "program 2 of 8, for another call: input 'tokens': is torch.int64 (4, 7)" in messages[0]
    assert "it is in evaluation mode, no gradients are wanted; input" in messages[1]
    assert "keywords tokens" in messages[2]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    arenas = {id(r.arena.memory) for r in compiled._calls.programs}
    assert arenas == {id(compiled._calls.arena.memory)}


def test_a_program_for_another_mode_says_so(caplog: pytest.LogCaptureFixture) -> None:
    _, compiled = _pair()
    caplog.set_level(logging.INFO, logger="memplan")
    changes = {
        "no gradients are wanted": compiled.train,
        "it is in evaluation mode, no gradients are wanted": compiled.eval,
    }
    for change in changes.values():
        change()
        with torch.no_grad():
            compiled(**_batch())
    said = [r.message.partition("for another call: ")[2] for r in caplog.records if "makes program" in r.message]
    assert said == list(changes)


def test_gradients_survive_a_larger_arena() -> None:
    """Accumulation over a small and a large batch: what the small one left in the arena moves before it is freed."""
    eager, compiled = _pair()
    for call in (eager, compiled):
        for rows in (6, 60, 6):
            torch.manual_seed(rows)
            call(**_batch(rows))["loss"].backward()
    assert same_gradients(eager, compiled)


@pytest.mark.parametrize("budget", [slow(None), 10**6])
def test_beyond_the_limit_the_original_runs_with_one_warning(
    budget: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    eager, compiled = _pair(arena_budget=budget)
    for n in range(9):
        _require_step_as_eager(eager, compiled, {**_batch(), "scale": 1.0 + n})
    (warning,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    within = "" if budget is None else " within 976.6 KiB"
    assert f"a call runs eagerly{within}, without a plan: arguments: the call has" in warning
    assert "there are 8 programs for other calls; next step: name the dimensions that vary in" in warning
    assert len(compiled._calls.programs) == 8


@pytest.mark.slow
def test_a_model_that_keeps_changing_runs_eagerly_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = Made(lambda m, x: m.layer(x) * m.temperature, layer=nn.Linear(4, 4), temperature=0.0)
    x = torch.randn(3, 4)
    compiled = compile(model, x)
    with caplog.at_level(logging.INFO, logger="memplan"):
        for n in range(20):
            model.temperature = float(n)
            assert torch.equal(compiled(x), model(x))
    assert sum("all its programs are made again" in r.message for r in caplog.records) == 8
    assert sum("a call runs eagerly" in r.message for r in caplog.records) == 1


def test_a_given_plan_runs_its_own_shapes_and_its_budget_holds_for_others() -> None:
    model, x = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4)), torch.randn(32, 8)
    plan = memplan.plan(model, x, arena_budget="20KiB", policy="recompute")
    compiled = compile(model, x, plan=plan)
    for rows in (20, 32):
        other = torch.randn(rows, 8)
        assert torch.equal(compiled(other), model(other))
    assert compiled.plan.solution.offsets == plan.solution.offsets
    assert compiled._calls.programs.main.plan.arena_size == plan.arena_size
    assert plan.eviction is not None
    (more,) = tuple(compiled._calls.programs)[1:]
    assert more.plan.eviction is not None
    assert more.plan.eviction.arena_budget == plan.eviction.arena_budget
    with pytest.raises(InputMismatch):
        compile(model, x, plan=plan, on_mismatch="error")(torch.randn(20, 8))


def test_a_call_that_fails_in_eager_too_raises_its_error_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    compiled = memplan.compile(net, x)
    step = memplan.compile_step(net, torch.optim.SGD(net.parameters(), lr=0.0), nn.functional.mse_loss, (x, x))
    for call in (lambda: compiled(torch.randn(2, 5)), lambda: step(torch.randn(2, 5), x)):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            call()
    assert torch.equal(step([x, x]), step(x, x))  # as a DataLoader yields them
    assert not caplog.records


class Wrapper(nn.Module):
    """Ten times what a module returns; it answers for its attributes, as wrappers of checkpoints and PEFT do."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return 10 * self.inner(x)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


@pytest.mark.parametrize("how", ["torch", "memplan", "plain"])
def test_a_wrapper_around_a_compiled_model_is_planned_itself(how: str) -> None:
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    ways: dict[str, Any] = {"torch": torch.compile, "memplan": lambda net: compile(net, x), "plain": lambda net: net}
    inner = ways[how](net)
    assert torch.equal(compile(Wrapper(inner), x)(x), 10 * net(x))


def test_what_eager_can_run_is_said_and_what_it_cannot_raises_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A custom op without a fake kernel fails under tracing alone; a wrong shape fails in eager too."""

    @torch.library.custom_op("memplan_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    model, x = Made(lambda m, x: doubled(m.layer(x)), layer=nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    compiled = memplan.compile(model)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    (warning,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert "a call runs eagerly" in warning
    assert "register_fake" in warning
    caplog.clear()
    fails = memplan.compile(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fails(torch.randn(2, 5))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
