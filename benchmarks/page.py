"""The page of a plan with many buffers: the size of the file, the time to draw it and to follow a pointer.

    python -m benchmarks.page --counts 20000,200000

Needs Chromium and its driver, which draws by the processor alone, without a graphics card. Each page is opened
`--repeats` times, in a browser of its own; times are the medians. The plans are made up:
buffers of random sizes that begin one after the other, as those of a training step do, in 96 layers.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, Cell, Row, Table, collect
from memplan.analysis.buffers import Holder, OpAt
from memplan.core.problem import Buffer, Interval, Problem
from memplan.report.pages import picture_html
from memplan.report.picture import Picture, PictureBlock
from tests.report.browser import CHROMIUM, DRIVER, MISSING, browser

LAYERS, OPS, LANES, LANE = 96, ("aten.mm.default", "aten.add.Tensor", "aten.gelu.default"), 400, 1 << 24
MODULES = [f"{part}.{name}" for part in ("attn", "mlp", "norm") for name in ("in", "out", "act", "drop")]
HOVERS = 400
NOTES = (
    "File: of one page. Written: to make the page of the picture. Painted: from the start of the navigation to the"
    " first picture, reading and parsing the file included; after load: of it, what comes after the page's text was"
    f" parsed. Hover: one move of the pointer, with tooltip and layout, {HOVERS} of them all over the picture: the"
    " median, and the 99th percentile. Redrawn: a zoom or pan that shows everything. Filtered: a search, with the"
    " list.",
)
_TIMES = """
const painted = performance.getEntriesByName("memplan-painted")[0].startTime;
const parsed = performance.getEntriesByType("navigation")[0].domInteractive;
const { report } = window.memplan, canvas = report.arena.arena, box = canvas.getBoundingClientRect(), hovers = [];
for (let k = 0; k < arguments[0]; k++) {
  const x = box.left + 90 + (k * 37) % (box.width - 110), y = box.top + 30 + (k * 53) % (box.height - 80);
  const from = performance.now();
  canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true }));
  document.body.offsetHeight;
  hovers.push(performance.now() - from);
}
let from = performance.now();
report.arena.paint();
const redrawn = performance.now() - from;
from = performance.now();
report.look.wanted = "mlp";
report.filtered();
hovers.sort((a, b) => a - b);
return { painted, after: painted - parsed, hover: hovers[hovers.length >> 1],
  hover99: hovers[Math.floor(hovers.length * .99)], redrawn, filtered: performance.now() - from };
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse(arguments)
    if not (CHROMIUM and DRIVER):
        print(MISSING, file=sys.stderr)
        return 1

    def table(rows: Sequence[Row]) -> Table:
        columns = {
            "buffers": "buffers",
            "file_mb": "file, MB",
            "written_s": "written, s",
            "painted_ms": "painted, ms",
            "after_ms": "after load, ms",
            "hover_ms": "hover, ms",
            "hover99_ms": "hover, 99 %, ms",
            "redrawn_ms": "redrawn, ms",
            "filtered_ms": "filtered, ms",
        }
        title = "The page of a plan, 1400 pixels wide, Chromium without a graphics card"
        return Table(
            name=options.output,
            title=title,
            columns=columns,
            rows=rows,
            settings={"repeats": options.repeats},
            notes=NOTES,
        )

    return collect(([row(count, options.repeats)] for count in options.counts), table, options.directory)


def row(count: int, repeats: int) -> dict[str, Cell]:
    """Measure the page of `count` buffers."""
    picture = made_up(count)
    started = time.perf_counter()
    html = picture_html(picture)
    written = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(html, encoding="utf-8")
        runs = [measure(file) for _ in range(repeats)]
    medians = {f"{name}_ms": statistics.median(run[name] for run in runs) for name in runs[0]}
    return {"buffers": count, "file_mb": len(html.encode()) / 1e6, "written_s": written, **medians}


def measure(file: Path) -> dict[str, float]:
    """Open a page in a new browser; return its times in milliseconds."""
    with browser() as page:
        page.emulate(1400)
        page.open(file)
        page.wait("return window.memplan && document.getElementById('rows').children.length")
        found: dict[str, Any] = page.run(_TIMES, HOVERS)
    return found


def made_up(count: int, seed: int = 1) -> Picture:
    """Return a picture of `count` buffers that overlap nowhere, one of them begun by each step."""
    rng = random.Random(seed)
    ops, blocks = [], []
    free = [0] * LANES  # the step at which each lane of the arena is free again
    for step in range(count):
        phase = "forward" if step < count // 2 else "backward"
        module, source = f"h.{step * LAYERS // count}.{rng.choice(MODULES)}", f"model.py:{rng.randrange(400)}"
        target = rng.choice(OPS)
        ops.append(OpAt(step=step, name=f"op_{step}", target=target, phase=phase, module=module, source=source))
        lane = rng.randrange(LANES)
        start = max(free[lane], step)
        end = free[lane] = start + rng.randrange(2, 600)
        holder = Holder(
            id=f"{'activation' if phase == 'forward' else 'gradient'}_{step}",
            size=rng.randrange(1, LANE >> 6) << 6,
            kind="activation" if phase == "forward" else "gradient",
            start=start,
            end=end,
            module=module,
            source=source,
            op=target,
        )
        tensor = f"float32 [{rng.randrange(1, 2000)}, {rng.choice((768, 3072))}]"
        blocks.append(PictureBlock(holder=holder, offset=lane * LANE, segments=(Interval(start, end),), tensor=tensor))
    problem = Problem(buffers=tuple(Buffer(id=b.holder.id, size=b.holder.size, live=b.segments[0]) for b in blocks))
    return Picture(
        title=f"made up: {count} buffers",
        steps=max(block.holder.end for block in blocks),
        arena=max(block.offset + block.holder.size for block in blocks),
        max_live=problem.max_live,
        peak_step=problem.peak_step,
        blocks=tuple(blocks),
        profile=(),
        ops=tuple(ops),
        backward_from=count // 2,
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.page", description="The page of a plan with many buffers.")
    parser.add_argument("--counts", type=lambda text: [int(n) for n in text.split(",")], default=[20_000, 200_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", default="page", help="name of the result files")
    parser.add_argument("--directory", type=Path, default=RESULTS, help="folder of the result files")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
