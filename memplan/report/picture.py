"""The content of a picture of an arena, before it is drawn: blocks in steps x offsets, and live bytes by step.

`svg.py`, `pages.py` and `memory_viz.py` draw it. It is made from a `Plan`, or with less
detail from a `Problem` and a `Solution`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from memplan.analysis.buffers import Holder, OpAt, homes, largest, op_at, own_touches
from memplan.core.evictions import Action
from memplan.core.graph import Origin, Phase
from memplan.core.plan import Plan
from memplan.core.problem import Interval, Problem, Solution
from memplan.core.units import format_bytes, format_share
from memplan.errors import InvalidSolution
from memplan.report.lines import answer_lines, planned_lines, title
from memplan.report.sections import percent
from memplan.report.summary import Report

GREY = "#6b7079"
"""The fill colour of what has none of its own."""

COLOURS: Mapping[str, str] = MappingProxyType(
    {"activation": "#2f6fd8", "gradient": "#b8520f", "output": "#2a7d3f", "constant": GREY, "": "#2f6fd8"}
)
"""The fill colour of each kind of buffer; other kinds take the colours of `OTHERS` in order of appearance."""

OTHERS = ("#8d4cc7", "#0b7c8e", "#c42c78", "#77700f", "#cc2f2a", "#2f6fd8", "#b8520f", "#2a7d3f")
"""Eight colours that stay apart, and on which white text can be read (WCAG AA: a contrast of 4.5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureBlock:
    """A buffer at its offset: bytes [offset, offset + size) during each of `segments` (steps).

    A gap between two segments is an eviction. `tensor` is what it was made for, "float32 [4, 1024]"; "" if not known.
    """

    holder: Holder
    offset: int
    segments: tuple[Interval, ...]
    tensor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """An eviction: the bytes are freed at step `start` in block `leaves`, and are back from step `end` in `returns`.

    `offset` and `back_offset` are the middles of the two blocks, in bytes; `about` describes the eviction.
    """

    leaves: str
    returns: str
    start: int
    offset: int
    end: int
    back_offset: int
    offload: bool
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The content of a picture; sizes are bytes.

    `profile` are pairs of (step, live bytes from it on); `ops` is the op of each step, empty without a graph; the
    backward begins at step `backward_from`. `answer` are the sentences that come first, `figures` are (label, size,
    remark), `notes` ways to save memory, `proofs` what is proven.
    """

    title: str
    steps: int
    arena: int
    max_live: int
    peak_step: int
    blocks: tuple[PictureBlock, ...]
    profile: tuple[tuple[int, int], ...]
    ops: tuple[OpAt, ...] = ()
    backward_from: int | None = None
    figures: tuple[tuple[str, str, str], ...] = ()
    answer: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    proofs: tuple[str, ...] = ()
    arrows: tuple[Arrow, ...] = ()


def picture_of_plan(plan: Plan, report: Report | None = None) -> Picture:
    """Return the picture of a plan and its report. It takes milliseconds on thousands of ops."""
    report, graph = report or plan.report(), plan.graph
    backward = (i for i, op in enumerate(plan.schedule.order) if graph.ops[op].phase is Phase.BACKWARD)
    tensors = {graph.storages[v.storage].name: f"{v.dtype} {list(v.shape)}" for v in reversed(graph.values)}
    need = report.needed
    total = ("total", format_bytes(need.total), f"with {need.optimizer}" if need.optimizer else "everything together")
    eager = (("eager", format_bytes(need.eager), "predicted"),) if need.eager is not None else ()
    outside = ("outside the arena", format_bytes(report.outside_total), "parameters, inputs, gradients, the caller's")
    return replace(
        _placed(plan.problem, plan.solution, {holder.id: holder for holder in largest(plan)}, tensors),
        title=title(report),
        steps=report.steps,
        ops=tuple(op_at(plan, step) for step in range(report.steps)),
        backward_from=next(backward, None),
        figures=(total, *eager, *_budget(report), *_figures(plan.problem, plan.solution), outside),
        answer=answer_lines(report),
        notes=tuple(lever.text for lever in report.advice),
        proofs=planned_lines(report),
        arrows=tuple(_arrows(plan)),
    )


def picture_of(problem: Problem, solution: Solution, name: str) -> Picture:
    """Return the picture of a placed problem. Raises `InvalidSolution` if a buffer has no offset (infeasible)."""
    holders = {b.id: Holder.of(b, Origin(module=b.origin), "") for b in problem.buffers}
    title = f"{name}: {len(problem.buffers)} buffers by {solution.solver!r}"
    answer = (f"{solution.status.name.lower()}: {solution.status.value}",)
    return replace(_placed(problem, solution, holders, {}), title=title, answer=answer)


def _placed(problem: Problem, solution: Solution, holders: Mapping[str, Holder], tensors: Mapping[str, str]) -> Picture:
    """Return what any picture shows: the buffers at their offsets, and live bytes."""
    lies = solution.offsets
    missing = next((b.id for b in problem.buffers if b.id not in lies), None)
    if missing is not None:
        raise InvalidSolution("has no offset: there is nothing to draw", violation="missing", where=missing)
    blocks = (
        PictureBlock(holder=holders[b.id], offset=lies[b.id], segments=b.segments, tensor=tensors.get(b.id, ""))
        for b in problem.buffers
        if b.size
    )
    return Picture(
        title="",
        steps=max((b.live.end for b in problem.buffers), default=0),
        arena=solution.arena_size,
        max_live=problem.max_live,
        peak_step=problem.peak_step,
        blocks=tuple(blocks),
        profile=problem.live_profile,
        figures=_figures(problem, solution),
    )


def _figures(problem: Problem, solution: Solution) -> tuple[tuple[str, str, str], ...]:
    lost = solution.arena_size - problem.max_live
    share = format_share(lost / solution.arena_size if solution.arena_size else 0.0)
    return (
        ("arena", format_bytes(solution.arena_size), f"{solution.arena_size:,} bytes"),
        ("max live", format_bytes(problem.max_live), f"at step {problem.peak_step}: no layout needs less"),
        ("fragmentation", share, f"{lost:,} bytes lost at the peak"),
    )


def _budget(report: Report) -> Iterator[tuple[str, str, str]]:
    if (k := report.kept) is not None:
        how = f"{k.recomputes} computed again, {k.offloads} copied"
        name, limit = ("arena budget", k.arena_budget) if k.budget is None else ("budget", k.budget)
        yield name, format_bytes(limit), f"{how}; predicted {percent(k.overhead)} of a step's time"


_WORDS = {
    Action.OFFLOAD: "copied to the host, and back",
    Action.RECOMPUTE: "computed again",
    Action.COMPRESS: "packed, and unpacked",
}


def _arrows(plan: Plan) -> Iterator[Arrow]:
    """Yield an arrow for each eviction, from where its bytes are freed to where they are back in the arena."""
    lies, used, before = homes(plan), own_touches(plan), dict[str, str]()
    middles = {b.id: plan.solution.offsets[b.id] + b.size // 2 for b in plan.problem.buffers}
    for e in plan.evictions:
        gone = before.get(e.storage, e.storage)
        # The buffer may be that of an input whose bytes the storage reuses in place.
        leaves, returns = (lies.get(name, name) for name in (gone, e.instance))
        before[e.storage] = e.instance
        if leaves in middles and returns in middles:
            yield Arrow(
                leaves=leaves,
                returns=returns,
                start=min(used[gone][-1] + 1, e.in_trigger),
                offset=middles[leaves],
                end=e.in_trigger,
                back_offset=middles[returns],
                offload=e.action is Action.OFFLOAD,
                about=f"{e.storage} ({format_bytes(e.nbytes)}): {_WORDS[e.action]} for step {e.back_access}",
            )


def colours(picture: Picture) -> dict[str, str]:
    """Return a colour for each kind of buffer in `picture`, in order of appearance; grey when all others are taken."""
    kinds = dict.fromkeys(block.holder.kind for block in picture.blocks)
    taken = {COLOURS[kind] for kind in kinds if kind in COLOURS}
    free = (colour for colour in OTHERS if colour not in taken)
    return {kind: COLOURS.get(kind) or next(free, GREY) for kind in kinds}
