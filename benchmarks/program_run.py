"""Runs one program one way in this process, and keeps what came out: losses, results, the state of its models, peak.

    python -m benchmarks.program_run mnist compile --to mnist-compile.pt

A *way* is how the program is moved to memplan: "eager" and "aot_eager" are what it is compared with, "backend" is
`model.compile(backend=memplan.Backend())`, "compile" is `memplan.compile` and "compile_step" `memplan.compile_step`,
without options; `FUSED` and `WHOLE` are variants of the first two. `benchmarks.programs` runs each in its own process.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

import memplan
from benchmarks.peak_measure import events_of, live_bytes, spans_of

WAYS = ("eager", "aot_eager", "backend", "compile", "compile_step")
FUSED = "eager_fused"  # eager with torch's fused optimizers, whose bits `compile_step` has
# aot_eager that traces recurrent layers too, instead of breaking the graph, and draws numpy's random numbers by numpy:
WHOLE = "aot_eager_rnn"  # both as `compile` does
STEPS = 5  # training steps of each program
_KNOWN, _MEASURED = 2, 3  # the steps that are profiled: the second of both is measured (see `peak_growth`)
_BACKENDS = ("aot_eager", WHOLE, "backend")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program: what runs it, the libraries that it imports beside torch, and the ways that make sense for it."""

    run: Callable[[Run], None]
    libraries: tuple[str, ...] = ()
    ways: tuple[str, ...] = WAYS


NO_STEP = WAYS[:-1]  # of programs with several optimizers or losses, or a loop that is not theirs


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of a program: it compiles the models as `way` says, and takes what the program computes.

    Attributes:
        way: One of `WAYS`.
        losses: The losses so far, one for each `loss` call.
        results: Other results by name: of the evaluation, and the parameters and buffers of the models.
        backend: The backend of "backend".
        peak: The highest sum of bytes during one training step, and of what is alive before; None if none was measured.
        passes_peak: The same, where no optimizer's own `step()` was running: of forward and backward.
        padding: Bytes that alignment adds in the plans of compiled models and steps.
    """

    way: str
    losses: list[Tensor] = field(default_factory=list)
    results: dict[str, Tensor] = field(default_factory=dict)
    peak: int | None = None
    passes_peak: int | None = None
    backend: memplan.Backend = field(default_factory=memplan.Backend)
    _plans: list[Any] = field(default_factory=list)
    _step: int = 0
    _standing: int = 0
    _profiler: profile | None = None

    @property
    def whole_step(self) -> bool:
        """Whether the program is to call `compile_step` instead of its own loop."""
        return self.way == "compile_step"

    @property
    def padding(self) -> int:
        """Bytes that alignment adds in the plans of compiled models and steps."""
        plans = [compiled.plan for compiled in self._plans]
        return sum(plan.padding for plan in [*plans, *(plan for graph in self.backend.graphs for plan in graph.plans)])

    def compile(self, model: nn.Module, *example: Any, **example_kwargs: Any) -> Any:
        """Return the model to be called in the loop; the example is the arguments of a call."""
        if self.way in _BACKENDS:
            backend: Any = self.backend if self.way == "backend" else "aot_eager"
            if type(model).__module__.startswith("torch.nn."):  # nn.Module.compile leaves these as they are
                return torch.compile(model, backend=backend)
            model.compile(backend=backend)
        if self.way != "compile":
            return model
        compiled = memplan.compile(model, example, example_kwargs)
        self._plans.append(compiled)
        return compiled

    def compile_step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Tensor],
        batch: Any = (),
        kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Callable[..., Tensor]:
        """Return the compiled training step."""
        compiled = memplan.compile_step(model, optimizer, loss_fn, batch, kwargs, **options)
        self._plans.append(compiled)
        return compiled

    def steps(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, one for each training step, and measure one step's peak."""
        for batch in batches:
            self.begin_step()
            yield batch
        self.end_step()

    def begin_step(self) -> None:
        """End the step before, if there is one, and begin the next: called by loops that are not the program's own."""
        self.end_step()
        if self._step in (_KNOWN, _MEASURED):
            self._standing = live_bytes()
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profiler.start()
        self._step += 1

    def end_step(self) -> None:
        """End the step, if there is one."""
        if self._profiler is None:
            return
        self._profiler.stop()
        events, updates = events_of(self._profiler), spans_of(self._profiler, "Optimizer.step#")
        grown = [*zip(events, accumulate(event.nbytes for event in events), strict=True)]
        passes = (n for event, n in grown if not any(low <= event.time_ns <= high for low, high in updates))
        self.peak = self._standing + max((n for _, n in grown), default=0)
        self.passes_peak = self._standing + max(passes, default=0)
        self._profiler = None

    def loss(self, loss: Tensor) -> None:
        """Take the loss of a training step."""
        self.losses.append(loss.detach().clone())

    def result(self, name: str, value: Any) -> None:
        """Take a result: a tensor, or tensors in containers."""
        for i, leaf in enumerate(pytree.tree_leaves(value)):
            if isinstance(leaf, (Tensor, int, float)):
                self.results[f"{name}[{i}]"] = torch.as_tensor(leaf).detach().clone()

    def state(self, model: nn.Module, name: str = "model") -> None:
        """Take the parameters and buffers of a model."""
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            self.results[f"{name}.{key}"] = value.detach().clone()


def load_torchvision() -> None:
    """Declare the ops that `import torchvision` looks up where its compiled ops do not load.

    The wheel of the package index is built for CUDA. Beside torch for the CPU its models run, and its ops do not.
    """
    if find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except (RuntimeError, OSError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
        _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []  # a library is undone when it is deleted


def run_program(program: Program, way: str) -> Run:
    """Return the finished run of a program, from seed 0."""
    torch.manual_seed(0)
    run = Run(way=way)
    torch._dynamo.config.allow_rnn = torch._dynamo.config.use_numpy_random_stream = way == WHOLE
    fused = register_optimizer_step_pre_hook(_fuse) if way == FUSED else None
    program.run(run)
    run.end_step()
    if fused is not None:
        fused.remove()
    return run


def _fuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Have an optimizer that has a fused update take it."""
    for group in optimizer.param_groups:
        if "fused" in group:
            group["fused"], group["foreach"] = True, False


def outcome_of(program: Program, way: str) -> dict[str, Any]:
    """Run a program; return what came out, or `refused` or `failed` with the reason."""
    began = time.perf_counter()
    try:
        run = run_program(program, way)
    except Exception as error:  # whatever a third-party program raises is its result
        refusal = _refusal(error)
        if refusal is not None:
            traceback.print_exc()
            return {"refused": _sentence(refusal), "see": refusal.see}
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {_sentence(error)}"}
    return {
        "losses": run.losses,
        "results": run.results,
        "peak": run.peak,
        "passes_peak": run.passes_peak,
        "padding": run.padding,
        "compiled": way != "backend" or bool(run.backend.graphs),
        "seconds": time.perf_counter() - began,
    }


def _refusal(error: BaseException | None) -> memplan.MemplanError | None:
    """Return memplan's error in the chain of causes, within those of dynamo too; None if there is none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, memplan.MemplanError):
            return error
        seen.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None


def _sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else "no message"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program one way, and save what came out; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.program_run", description="One program, one way.")
    parser.add_argument("program")
    parser.add_argument("way", choices=[*WAYS, FUSED, WHOLE])
    parser.add_argument("--to", type=Path, help="the file for the outcome (torch.save); without it, it is printed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("memplan").setLevel(logging.ERROR)
    load_torchvision()
    from benchmarks.program_zoo import PROGRAMS

    outcome = outcome_of(PROGRAMS[options.program], options.way)
    if options.to is not None:
        torch.save(outcome, options.to)
    else:
        shown = {key: value for key, value in outcome.items() if key != "results"}
        print(shown, f"{len(outcome.get('results', ()))} results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
