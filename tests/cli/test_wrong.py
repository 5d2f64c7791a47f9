"""Wrong calls and command lines, as newcomers write them: each a typed error with the right next step; exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memplan
from memplan.errors import MemplanError
from tests.cli.helpers import Run
from tests.samples import sample_plan

MODEL = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
X, FROZEN = torch.randn(4, 8), torch.nn.Linear(8, 8).requires_grad_(False)
SGD, LOSS = torch.optim.SGD(MODEL.parameters(), lr=0.1), torch.nn.functional.mse_loss
PLAN = sample_plan()
a: Any = memplan  # what is called wrongly here is wrong for mypy too


def make(batch: int) -> Any:
    return MODEL, torch.randn(batch, 8)


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: a.plan(MODEL, X, budget=1.5), "a share of the need without a budget (0.5, '50%')"),
    (lambda: a.plan(MODEL, X, arena_budget="0%"), "or 'min'"),
    (lambda: a.plan(MODEL, X, reserve="80"), "did you mean 80GiB?"),
    (lambda: a.plan(MODEL, X, budget="half"), "one with a unit: 1048576, 512MiB"),
    (lambda: a.plan(MODEL, X, budget=X), "give bytes (8589934592), a text ('8GiB')"),
    (lambda: a.plan(MODEL, X, budget="1KiB"), "give at least 1088 bytes (1.06 KiB), or budget='min'"),
    (lambda: a.plan(MODEL, [X]), "a list is one argument; several are a tuple"),
    (lambda: a.plan(MODEL, X, X), "pass several example inputs as a tuple"),
    (lambda: a.plan(X, MODEL), "pass the model itself, then its inputs"),
    (lambda: a.plan("model.py:make", target="h100"), "pass the model itself, then its inputs"),
    (lambda: a.plan(MODEL), "check that model(*example_inputs) runs eagerly"),
    (lambda: a.plan(MODEL, torch.randn(4, 9)), "check the shapes and types of the example inputs"),
    (lambda: a.plan(MODEL, X, policy="recompte"), "choose one of: 'auto', 'recompute'"),
    (lambda: a.plan(MODEL, X, kernels="triton"), "choose one of: None, 'aten', 'inductor'"),
    (lambda: a.plan(MODEL, X, solver="best"), "choose one of: auto, portfolio"),
    (lambda: a.plan(MODEL, X, costs="h1000"), "choose one of: h200, h100"),
    (lambda: a.plan(MODEL, X, target="h1000"), "did you mean 'h100'?"),
    (lambda: a.plan(MODEL, X, target=24), "name a GPU, such as 'h100'"),
    (lambda: a.fits(MODEL, X, target="24"), "did you mean 24GiB?"),
    (lambda: a.fits(MODEL, X, target=None), "name a GPU ('h100'), 'cpu', or its memory ('24GiB')"),
    (lambda: a.fits(MODEL, X, target="24GiB", batch=0), "give a number of 1 or more"),
    (lambda: a.fits(MODEL, X, target="24GiB", optimizer="AdamX"), "choose one of: Ada"),
    (lambda: a.fits("model", X, target="24GiB"), "pass the model itself, then its inputs"),
    (lambda: a.compile_step(SGD, MODEL, LOSS, (X, X)), "pass the model itself"),
    (lambda: a.compile_step(MODEL, MODEL, LOSS, (X, X)), "compile_step(model, optimizer, loss_fn, example_batch)"),
    (lambda: a.compile_step(MODEL, SGD, X), "pass a function that returns the loss"),
    (lambda: a.max_batch(MODEL, "1MiB"), "pass lambda batch: (model, example_inputs)"),
    (lambda: a.max_batch(lambda: (MODEL, X), "1MiB"), "pass lambda batch: (model, example_inputs)"),
    (lambda: a.max_batch(make), "give a budget, such as '8GiB'"),
    (lambda: a.max_batch(make, "80B"), "give at least 704 bytes (704 B)"),
    (lambda: a.explain(PLAN, "peak"), "its steps are 0 to 4"),
    (lambda: a.diff(PLAN, "plan.json"), "read it by memplan.load(path)"),
    (lambda: a.solve([1, 2]), "memplan.csvio.read_problem(path)"),
    (lambda: a.solve(PLAN), "give a Problem, or its buffers"),
    (lambda: a.validate([], {}), "give a Problem"),
    (lambda: a.load(PLAN), "memplan.plan(model, example_inputs).save(path)"),
    (lambda: a.plan(MODEL, 4), "check that model(*example_inputs) runs eagerly"),
    (lambda: a.plan(MODEL, X, train="yes"), "choose one of: None, True, False"),
    (lambda: a.plan(MODEL, X, compress="int4"), "choose one of: None, 'bits', 'int8'"),
    (lambda: a.plan(MODEL, X, time_limit="10"), "leave it out for no limit"),
    (lambda: a.plan(MODEL, X, device="gpu"), "name a device of this machine"),
    (lambda: a.plan(MODEL, X, ranks="8"), "pass 1 or more"),
    (lambda: a.plan(MODEL.requires_grad_, X), "pass the model itself"),
    (lambda: a.plan(FROZEN, X), "plan the forward alone (train=False, --infer)"),
    (lambda: a.compile(MODEL, "8GiB"), "check the shapes and types of the example inputs"),
    (lambda: a.compile(MODEL, X.to("meta")), "materialise the model and its inputs first"),
    (lambda: a.compile(MODEL, X, plan="gone.json"), "make the plan anew"),
    (lambda: a.compile(MODEL, X, plan="."), "make the plan anew"),
    (lambda: a.compile(MODEL, X, on_mismatch="raise"), "choose one of: 'replan'"),
    (lambda: a.compile_step(FROZEN, SGD, LOSS, (X, X)), "what is computed from parameters that require gradients"),
    (lambda: a.compile_step(MODEL, MODEL.parameters(), LOSS, (X, X)), "in this order: compile_step(model, optimizer"),
    (lambda: a.compile_step(torch.nn.Linear(8, 8), SGD, LOSS, (X, X)), "the parameters of this model"),
    (lambda: a.compile_step(MODEL, SGD, torch.nn.MSELoss, (X, X)), "pass a function that returns the loss"),
    (lambda: a.compile_step(MODEL, SGD, lambda model, x, y: x, (X, X)), "write loss_fn(output, targets)"),
    (lambda: a.compile_step(MODEL, SGD, LOSS, (X, X))(X), "pass (inputs, targets)"),
    (lambda: a.profile("model", X), "pass the model itself, then its inputs"),
    (lambda: a.record(MODEL(X)), "pass a function"),
    (lambda: a.solve([a.Buffer(id="a", size=4, live=(0, 1))]), "live=Interval(start, end)"),
    (lambda: a.load("."), "make the plan anew"),
    (lambda: a.Plan.save(PLAN, None), "name a file"),
    (lambda: PLAN.report(optimizer="Lion"), "`memplan fits` takes any other of torch.optim"),
]  # fmt: skip

LINES = [
    ("report model.py", "write model.py:FACTORY"),
    ("report model.py:mak", "did you mean model.py:make?"),
    ("report model.py:make --budget 24", "did you mean 24GiB?"),
    ("report model.py:make --budget 150%", "'50%'"),
    ("report model.py:make --target 24GiB", "or a capability and its memory, as 'sm90:80GiB'"),
    ("report plan.json --infer", "name the model as FILE.py:FACTORY"),
    ("report plan.json --optimizer Lion", "name one of SGD"),
    ("fits model.py:make --target 24", "did you mean 24GiB?"),
    ("fits plan.json --target h100", "name it FILE.py:FACTORY"),
    ("check plan.json --fail-over size:1GiB", "write FIGURE:LIMIT"),
    ("check plan.json", "add --baseline FILE, --fail-over arena:12GiB"),
    ("check", "list them in pyproject.toml"),
    ("check plan.json --max-arena much", "one with a unit"),
    ("check plan.json --max-fragmentation 2", "write 0.02 or 2%"),
    ("check plan.json --fail-over arena:+1%", "add --baseline FILE"),
    ("check plan.json --update-baseline", "add --baseline FILE"),
    ("check --infer", "infer = true"),
    ("budget plan.json --pinned-budget -1", "one with a unit"),
    ("report model.py:make --time-limit -1", "leave it out for no limit"),
    ("solve gone.csv", "give a CSV file"),
    ("solve buffers.csv --time-limit nan", "leave it out for no limit"),
    ("solve buffers.csv --solver magic", "choose one of: auto"),
    ("explain plan.json --at top", "write a number, or peak"),
    ("diff plan.json gone.json", "make the plan anew"),
    ("solve plan.json", "id,lower,upper,size"),
    ("help budgt", "budget"),
    ("report model.py:MODEL", "it has make"),
]


@pytest.mark.parametrize(("call", "hint"), CALLS, ids=[str(n) for n in range(len(CALLS))])
def test_a_wrong_call_says_what_to_write_instead(call: Callable[[], object], hint: str) -> None:
    with pytest.raises(MemplanError) as caught:
        call()
    assert hint in str(caught.value.hint), caught.value


@pytest.mark.parametrize(("line", "hint"), LINES, ids=[line for line, _ in LINES])
def test_a_wrong_command_line_says_what_to_write_instead(
    run: Run, plan_file: Path, csv_file: Path, line: str, hint: str
) -> None:
    source = "import torch\ndef make():\n    return torch.nn.Linear(8, 8), torch.randn(4, 8)\nMODEL = make()[0]\n"
    (plan_file.parent / "model.py").write_text(source)
    code, out, err = run(*line.split())
    assert (code, out) == (2, "")
    _, said, next_step = err.partition("next step:")
    assert said, err
    assert hint in next_step
