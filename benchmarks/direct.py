"""Which bytes of a step the kernels write where they belong, and which are copied there.

    python -m benchmarks.direct --compile --threads 1

counts what `memplan.compile` found on this machine. Without `--compile`, traces are counted and nothing runs: a little
less is direct there, because convolutions are tried on the machine that runs them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Sequence

import torch

import memplan
from benchmarks.arguments import parser_of
from benchmarks.results import Cell, Table, to_markdown, write
from benchmarks.zoo import ZOO, Size
from memplan.core.graph import Graph
from memplan.runtime.memory.arena import dtype_of
from memplan.trace import trace

COLUMNS = {
    "model": "model",
    "written_mb": "written, MB",
    "direct": "by kernels in place, %",
    "returned": "returned to the caller as made, %",
    "copied": "made outside and copied, %",
    "most": "most copied, % of all",
}
NOTES = (
    "Of all bytes that the ops of a forward and backward write: into the arena (or what the caller gets) by the kernel"
    " itself; fresh results that the caller gets as they are; fresh results that are copied into the arena."
    " MB = 10^6 bytes; the last row is the sum over all models.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print and write the table; returns the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    counts: dict[str, Counter[str]] = {}
    for name in options.models:
        print(f"{name} {options.size} ...", file=sys.stderr, flush=True)
        counts[name] = count(graph_of(name, options.size, compiled=options.compile))
    counts["all"] = sum(counts.values(), Counter())
    table = Table(
        name=options.output,
        title=f"Bytes written directly, forward + backward, {options.size} models",
        columns=COLUMNS,
        rows=[row(name, counter) for name, counter in counts.items()],
        settings={"size": options.size, "compiled": options.compile, "threads": options.threads},
        notes=NOTES,
    )
    print(to_markdown(table))
    write(table, options.directory)
    return 0


def graph_of(name: str, size: Size, *, compiled: bool) -> Graph:
    """A model's training step, as traced or as compiled."""
    torch._dynamo.reset()
    model, inputs = ZOO[name](size)
    if compiled:
        return memplan.compile(model, inputs).plan.graph
    return trace(model, inputs, train=True).graph


def count(graph: Graph) -> Counter[str]:
    """Bytes by "direct" and "returned", and those that are copied by the op that makes them.

    What an op changes in place counts once, where it was made.
    """
    found: Counter[str] = Counter()
    for op in graph.ops:
        for v in set(op.writes) - set(op.reads):
            value = graph.values[v]
            nbytes = math.prod(value.shape) * dtype_of(value).itemsize
            if op.direct:
                found["direct"] += nbytes
            elif graph.storages[value.storage].planned:
                found[op.target] += nbytes
            else:
                found["returned"] += nbytes
    return found


def row(name: str, counter: Counter[str]) -> dict[str, Cell]:
    """The shares of one model, in percent."""
    total = counter.total()
    copied = [(nbytes, op) for op, nbytes in counter.items() if op not in ("direct", "returned")]
    most = sorted(copied, reverse=True)[:3]
    return {
        "model": name,
        "written_mb": total / 1e6,
        "direct": 100 * counter["direct"] / total,
        "returned": 100 * counter["returned"] / total,
        "copied": 100 * sum(nbytes for nbytes, _ in copied) / total,
        "most": ", ".join(f"{_short(op)} {100 * nbytes / total:.1f}" for nbytes, op in most) or "-",
    }


def _short(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default").replace("_scaled_dot_product", "sdpa")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("direct", "Bytes that kernels write directly.", list(ZOO))
    parser.add_argument("--size", choices=["nano", "medium"], default="medium")
    parser.add_argument("--compile", action="store_true", help="compile and run, instead of tracing alone")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
