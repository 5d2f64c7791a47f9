"""How long the first training step takes: tracing, planning and building included, against torch.compile's backends.

    python -m benchmarks.first_call --contenders aot_eager,memplan

Each measurement has a process of its own, in which the contender has compiled another model before: imports, and what
memplan keeps on disk of its own kernels, are not counted. CPU seconds of all threads, the fastest of `--repeats`.

    PYTHONPATH=. python -m benchmarks.first_call --target h200 --models gpt2,llama1b,bert,resnet

For a GPU that need not be there, at real sizes: from the model to the compiled kernels of its first step, by
torch.compile and by memplan without a budget and with shares. Two processes for each, one after the other, share caches
which begin empty. Seconds are of CPU, of the process that stands in for one on the GPU and of the compilers that it
starts, one after the other. Not in them, as neither runs here: loading and timing kernels on the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import Cell, Row, Table, collect, names, parser_of
from benchmarks.runtime import CONTENDERS
from benchmarks.zoo import ZOO, Size

BEFORE = "mlp"  # the model that is compiled before
NOTES = (
    "CPU seconds from the model to the end of the first step, forward and backward, the fastest of the repeats; each in"
    " a process of its own, in which another model was compiled before. Ratio: to the first contender's.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse(arguments)
    if options.one:
        name, contender = options.one
        print(first_call(name, contender, options.size))
        return 0

    def table(rows: Sequence[Row]) -> Table:
        seconds = {f"{contender}_s": f"{contender}, s" for contender in options.contenders}
        ratios = {contender: f"{contender} / {options.contenders[0]}" for contender in options.contenders[1:]}
        return Table(
            name=options.output,
            title=f"The first step, {options.size} models, cpu",
            columns={"model": "model"} | seconds | ratios,
            rows=rows,
            settings={"size": options.size, "repeats": options.repeats, "threads": 1},
            notes=NOTES,
        )

    return collect(([_row(name, options)] for name in options.models), table, options.directory)


def first_call(name: str, contender: str, size: Size) -> float:
    """CPU seconds of a contender's first step on a model, in a process that may have seen others."""
    torch.set_num_threads(1)
    CONTENDERS[contender](*ZOO[BEFORE]("nano")).run()
    torch._dynamo.reset()
    model, inputs = ZOO[name](size)
    started = time.process_time()
    CONTENDERS[contender](model, inputs).run()
    return time.process_time() - started


def _row(name: str, options: argparse.Namespace) -> dict[str, Cell]:
    print(f"{name} {options.size} ...", file=sys.stderr, flush=True)
    seconds = {contender: _apart(name, contender, options) for contender in options.contenders}
    reference = seconds[options.contenders[0]]
    ratios = {key: taken / reference if taken and reference else None for key, taken in seconds.items()}
    return {"model": name, **{f"{contender}_s": taken for contender, taken in seconds.items()}, **ratios}


def _apart(name: str, contender: str, options: argparse.Namespace) -> float | None:
    """The fastest `first_call` in new processes; None where one fails, as it says on stderr."""
    command = [sys.executable, "-m", "benchmarks.first_call", "--one", name, contender, "--size", options.size]
    seconds = []
    for _ in range(options.repeats):
        run = subprocess.run(command, check=False, capture_output=True, text=True)
        if run.returncode:
            said = [f"exit status {run.returncode}", *run.stderr.strip().splitlines()]
            print(f"{name} {contender}: {said[-1][:300]}", file=sys.stderr, flush=True)
            return None
        seconds.append(float(run.stdout.split()[-1]))
    return min(seconds)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("first_call", "The first step against torch.compile's.", list(ZOO))
    parser.add_argument("--size", choices=["nano", "medium"], default="nano")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--contenders", type=names(list(CONTENDERS)), default=["aot_eager", "memplan"],
        help="comma-separated; the first is the reference",
    )  # fmt: skip
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "CONTENDER"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


_TORCH = "torch.compile"
CONTENDERS_THERE = (_TORCH, "memplan", "0.7", "0.5")  # and memplan with shares as budgets
_COLUMNS = {
    "model": "model",
    "contender": "contender",
    "process": "process",
    "code_s": "code and plan, CPU s",
    "kernels_s": "compiling kernels, CPU s",
    "kernels": "kernels compiled",
    "code": "graphs that Inductor lowered",
    "code_ratio": "code and plan / torch.compile's",
    "ratio": "both / torch.compile's",
}


class _Ready(Exception):
    """The first step could begin."""


class _Counted:
    """Counts what Inductor does in this process: the kernels that it compiles, for a GPU that is not there."""

    def __init__(self) -> None:
        from torch._inductor import graph, output_code
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.runtime import triton_helpers
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        self.kernels_s, self.kernels, self.lowered = 0.0, set[str](), 0
        classes: Any = AsyncCompile, CachingAutotuner, output_code.CompiledFxGraph, graph.GraphLowering
        compiling, kernel, compiled, lowering = classes
        compile_kernel, lower = compiling.triton, lowering.run

        def timed(compiler: Any, name: str, source: str, *args: Any, **kwargs: Any) -> Any:
            started = _cpu()
            try:
                return compile_kernel(compiler, name, source, *args, **kwargs)
            finally:
                self.kernels_s += _cpu() - started
                self.kernels.add(source)

        def counted(graph: Any, *args: Any) -> Any:
            self.lowered += 1
            return lower(graph, *args)

        def ready(*_: Any) -> None:
            raise _Ready

        compiling.triton, lowering.run, compiled.__call__ = timed, counted, ready
        kernel.precompile = lambda self, *_, **__: self._precompile_worker()  # nothing can be loaded
        triton_helpers.set_driver_to_gpu = lambda: None


def _run_there(model: str, contender: str, target: str, results: Any) -> None:
    """Send the row of the first step of a new process: seconds of CPU, and what was compiled."""
    from benchmarks import real_sizes
    from memplan.core.gpus import find_gpu
    from memplan.targets.child import asked_for
    from memplan.targets.stand_in import DEVICE
    from memplan.trace.capture.effects import with_fake_tensors

    torch.set_num_threads(1)
    module, inputs = real_sizes.MODELS[model]()
    for name in ("torch._inductor.compile_fx", "memplan.trace.planning", "memplan.trace.fused.step"):
        import_module(name)  # what both need

    def question() -> Row:
        """Compile where the target stands in for the GPU of the process."""
        there, given = with_fake_tensors(module, inputs, device=str(DEVICE))
        counted, started = _Counted(), _cpu()
        compile_there = _by_torch if contender == _TORCH else partial(_by_memplan, contender=contender, target=target)
        compile_there(there, given)
        code_s = _cpu() - started - counted.kernels_s
        found = {"code_s": code_s, "kernels_s": counted.kernels_s, "kernels": len(counted.kernels)}
        return {**found, "code": counted.lowered}

    results.send(asked_for(find_gpu(target), question))
    results.close()


def _by_torch(model: Any, inputs: Any) -> None:
    """Compile a training step by torch.compile, whose backward is otherwise compiled when it is first called."""
    import torch._functorch.config as functorch

    with functorch.patch(force_non_lazy_backward_lowering=True), contextlib.suppress(_Ready):
        compiled: Any = torch.compile(model, fullgraph=True, dynamic=False)
        compiled(*inputs)


def _by_memplan(model: Any, inputs: Any, *, contender: str, target: str) -> None:
    """Plan a step as `memplan.plan(target=)` does, and compile its kernels."""
    from memplan.core.gpus import find_gpu
    from memplan.planning.options import PlanOptions
    from memplan.trace.planning import captured_step, plan_step
    from memplan.trace.traced import GeneratedCall

    gpu = find_gpu(target)
    budget = None if contender == "memplan" else float(contender)
    options = PlanOptions(budget=budget, reserve=gpu.workspace, costs=gpu.costs)
    options, traced, captured = captured_step(model, inputs, None, None, options)
    traced, _ = plan_step(traced, captured, options)
    for call in traced.kernels:
        if isinstance(call, GeneratedCall) and call.kernel.later is not None:
            call.kernel.later.start()


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _measured_there(model: str, contender: str, target: str) -> Row:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_there, args=(model, contender, target, theirs))
    process.start()
    theirs.close()
    found: Row = ours.recv()
    process.join()
    return found


def rows_of(model: str, contenders: Sequence[str], target: str) -> list[Row]:
    """Return the rows of one model."""
    rows: list[Row] = []
    first: dict[str, Any] = {}
    for contender in contenders:
        with tempfile.TemporaryDirectory() as folder:
            for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"):
                os.environ[variable] = str(Path(folder) / variable)
            for process in ("first", "second"):
                print(f"{model} {contender} {process} ...", file=sys.stderr, flush=True)
                row: Any = _measured_there(model, contender, target)
                reference = first.setdefault(process, row)
                both = (row["code_s"] + row["kernels_s"]) / (reference["code_s"] + reference["kernels_s"])
                ratios = {"code_ratio": row["code_s"] / reference["code_s"], "ratio": both}
                rows.append({"model": model, "contender": contender, "process": process, **row, **ratios})
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def there_main(target: str, arguments: Sequence[str] | None = None) -> int:
    """Measure for a GPU that need not be there, print and write the table; returns the exit status."""
    models = ["gpt2", "llama1b", "bert", "resnet"]
    parser = parser_of("first-call-there", "The first step on a GPU.", models)
    parser.add_argument("--contenders", type=names(list(CONTENDERS_THERE)), default=list(CONTENDERS_THERE))
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

    def table(rows: Sequence[Row]) -> Table:
        command = f"python -m benchmarks.first_call --target {target} --models {','.join(options.models)}"
        return Table(
            name=options.output,
            title=f"From a model to the first step with Inductor's kernels, {target}",
            columns=_COLUMNS,
            rows=rows,
            settings={"threads": 1},
            notes=(f"Ratios are to the same process of torch.compile. Command: {command}",),
        )

    return collect((rows_of(model, options.contenders, target) for model in options.models), table, options.directory)


if __name__ == "__main__":
    there = sys.argv[1:2] == ["--target"]
    sys.exit(there_main(sys.argv[2], sys.argv[3:]) if there else main())
