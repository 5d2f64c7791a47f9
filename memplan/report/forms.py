"""Forms of what is asked of plans: an explanation, a comparison, a recording beside a plan, what fits, a frontier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memplan.analysis.allocated import Allocated
from memplan.analysis.buffers import Holder, OpAt, alive_at
from memplan.analysis.diff import Diff
from memplan.analysis.explain import Explanation, HeldBuffer
from memplan.analysis.lanes import lanes_of
from memplan.core.evictions import Action
from memplan.core.gpus import described
from memplan.core.jsonio import to_json
from memplan.core.plan import Plan
from memplan.core.units import format_bytes, format_exact, format_share
from memplan.report.sections import (
    Form,
    Section,
    columns,
    lanes_section,
    limited,
    op_name,
    percent,
    seconds_of,
    signed,
    steps_of,
    where,
)
from memplan.report.terminal import text
from memplan.report.verdicts import counts, place

if TYPE_CHECKING:
    from memplan.planning.frontier import Frontier, FrontierPoint
    from memplan.planning.memory_answer import Fits

SHOWN = 20
_CHANGES = ("grew", "shrank", "to_peak", "off_peak", "came", "went")
_WORDS = {"to_peak": "moved to the peak", "off_peak": "left the peak"}


# -- memplan explain -----------------------------------------------------------------------------------------


def explain_form(e: Explanation) -> Form:
    """Return the live bytes of a step, what would save memory, and the live buffers in rows and one by one."""
    at = e.at
    module, source = f" in {at.module}" if at.module else "", f", {at.source}" if at.source else ""
    share = format_share(e.live / e.max_live) if e.max_live else "0 %"
    at_peak = "the peak" if e.live == e.max_live else f"{share} of the peak, {format_bytes(e.max_live)}"
    sections = [Section(lines=(f"{len(e.held)} buffers are alive: {format_exact(e.live)}, {at_peak}",))]
    if e.levers:
        sections.append(Section(heading="what would shrink it", lines=tuple(lever.text for lever in e.levers)))
    if len(e.groups) < len(e.held):
        rows = [(format_bytes(g.bytes), str(g.count), g.kind, g.module, g.source, op_name(g.op)) for g in e.groups]
        names = columns("size> buffers> kind@60 module source@60 op@100")
        sections.append(Section(heading="rows of like buffers", columns=names, rows=limited(rows, SHOWN // 2)))
    if e.held:
        held = [(format_bytes(h.holder.size), h.holder.module, op_name(h.holder.op), _why(h)) for h in e.held]
        names = columns("size> module op why_it_is_alive")
        sections.append(Section(heading="who is alive", columns=names, rows=limited(held, SHOWN)))
    data = {"format": "memplan-explain-1", **to_json(e)}
    return Form(title=f"{e.model or 'plan'}, {_short(at)}{module}{source}", sections=tuple(sections), data=data)


def _why(held: HeldBuffer) -> str:
    idle = f", untouched for {held.idle} steps" if held.idle > 1 else ""
    if held.next_use is None or held.holds_until is None:
        return f"{held.role.value}{idle}"
    following = "" if held.next_use == held.holds_until else f", next {_short(held.next_use)}"
    return f"{held.role.value}{following}, until {_short(held.holds_until)}{idle}"


def _short(at: OpAt) -> str:
    return f"step {at.step} ({at.phase}) {op_name(at.target)}"


# -- memplan diff --------------------------------------------------------------------------------------------


def diff_form(diff: Diff) -> Form:
    """Return the totals of two plans, then what changed at the peak, then every buffer that changed."""
    before, after = diff.before.total, diff.after.total
    names = " -> ".join(name or "plan" for name in dict.fromkeys(diff.names))
    share = f", {percent(after / before - 1)}" if before else ""
    grown = f"{format_bytes(before)} -> {format_bytes(after)} ({signed(after - before)}{share})"
    title = f"the total stays {format_exact(before)}" if before == after else f"total {grown}"
    graphs = f"the graphs differ: {diff.first_difference}"
    graphs = "the same graph: only order or layout differ" if diff.same_graph else graphs
    graphs = "the plans are the same" if diff.same else graphs
    shown = columns("memory before>@60 after> change>")
    sections = [Section(lines=(names, graphs), columns=shown, rows=tuple(_totals(diff)))]
    if diff.rows:
        rows = [(signed(g.delta), counts(g), g.kind, place(g)) for g in diff.rows]
        shown = columns("change> buffers>@60 kind@60 where")
        sections.append(Section(heading="what changed at the peak", columns=shown, rows=limited(rows, SHOWN)))
    shown = columns("before> after> steps_before@60 steps_after@60 module source@60 op")
    for name in _CHANGES:
        if found := getattr(diff, name):
            heading = f"{_WORDS.get(name, name)}: {len(found)} buffer{'s' if len(found) > 1 else ''}"
            changed = [_changed(*one) if isinstance(one, tuple) else _changed(one, one, name) for one in found]
            sections.append(Section(heading=heading, columns=shown, rows=limited(changed, SHOWN)))
    data = {"format": "memplan-diff-1", "same": diff.same, **to_json(diff)}
    data |= {name: [{"before": a, "after": b} for a, b in data[name]] for name in _CHANGES[:4]}
    return Form(title=title, sections=tuple(sections), data=data)


def _totals(diff: Diff) -> Iterator[tuple[str, ...]]:
    before, after = diff.before, diff.after
    lines = [
        ("total", before.total, after.total),
        ("arena", before.arena, after.arena),
        ("optimizer state (AdamW)", before.state, after.state),
        ("outside the arena", before.outside, after.outside),
        *((kind, before.parts.get(kind, 0), after.parts.get(kind, 0)) for kind in {**before.parts, **after.parts}),
        ("peak (max live)", before.max_live, after.max_live),
    ]
    for label, old, new in lines:
        share = f", {percent(new / old - 1)}" if old else ""
        change = "same" if old == new else f"{signed(new - old)} ({new - old:+,} B{share})"
        yield label, format_bytes(old), format_bytes(new), change
    shares = [format_share(float(f.fragmentation)) for f in (before, after)]
    yield "fragmentation", *shares, "" if before.fragmentation == after.fragmentation else "changed"


def _changed(before: Holder, after: Holder, name: str = "") -> tuple[str, ...]:
    """Return the sizes and steps of a buffer before and after, of one that came or went on one side, and its origin."""
    old = ("", "") if name == "came" else (format_bytes(before.size), steps_of(before))
    new = ("", "") if name == "went" else (format_bytes(after.size), steps_of(after))
    return old[0], new[0], old[1], new[1], *where(after)


def allocated_form(found: Allocated, plan: Plan) -> Form:
    """Return what CUDA's allocator recorded beside a plan: the totals, then the bytes at the peaks by source line."""
    planned = Counter[str]()
    for holder in alive_at(plan, plan.problem.peak_step) if plan.problem.buffers else ():
        planned[holder.source] += holder.size
    lines = [(line or "not recorded", found.lines.get(line, 0), planned[line]) for line in {**found.lines, **planned}]
    lines.sort(key=lambda row: (-max(row[1:]), row[0]))
    history = f"{found.events:,} events" if found.events else "no events recorded: what was alive at the end"
    more = found.peak - plan.total
    totals = [
        ("allocated at the peak", found.peak, history),
        ("reserved by the allocator", found.reserved, "at the end"),
        ("planned total", plan.total, "the arena and what is beside it"),
        ("planned arena", plan.arena_size, ""),
    ]
    sizes = [(label, format_bytes(size), f"{size:,}", remark) for label, size, remark in totals]
    sizes.append(("difference of the totals", signed(more), f"{more:+,}", ""))
    rows = [(format_bytes(was), format_bytes(now), signed(was - now), line) for line, was, now in lines]
    heading = "alive at the peak, by source line; parameters and inputs lie outside the arena"
    sections = (
        Section(columns=columns("memory size> bytes>@100 remark@60"), rows=tuple(sizes)),
        Section(heading=heading, columns=columns("allocated> planned> more> source"), rows=limited(rows, SHOWN)),
    )
    exact = {"peak": found.peak, "reserved": found.reserved, "total": plan.total, "arena": plan.arena_size}
    by_line = [{"source": line, "allocated": was, "planned": now} for line, was, now in lines]
    head = {"format": "memplan-allocated-1", "device": found.device, "events": found.events}
    what = f"{sizes[0][1]} allocated at the peak, {plan.model or 'the plan'}: {sizes[2][1]} planned"
    title = f"{found.file}, device {found.device}: {what}"
    return Form(title=title, sections=sections, data={**head, **exact, "lines": by_line})


# -- memplan fits --------------------------------------------------------------------------------------------


def fits_form(answer: Fits) -> Form:
    """Return the verdict, the parts of the total, the largest batch and the time, and what would make the step fit."""
    verdict, batch = (
        "fits" if answer.fits else "does not fit",
        "" if answer.batch is None else f", batch {answer.batch}",
    )
    sizes = f"{format_bytes(answer.total)} of {format_bytes(answer.capacity.total)}"
    what = f"{answer.model or 'model'} ({', '.join(answer.dtypes)}{batch})"
    rows = tuple((label, format_bytes(size), f"{size:,}", remark) for label, size, remark in _parts(answer))
    sections = [Section(columns=columns("memory size> bytes>@100 remark@60"), rows=rows)]
    sections.append(Section(lines=tuple(_lines(answer))))
    if answer.lanes is not None and answer.within is not None:
        sections.append(lanes_section(lanes_of(answer.within)))
    names = ("model", "batch", "optimizer", "dtypes", "train", "eager", "compiled", "largest_batch", "seconds", "total")
    data = {name: to_json(getattr(answer, name)) for name in (*names, "fits", "need", "capacity", "smallest")}
    if answer.within is not None and answer.within.eviction is not None:
        data["within"] = {**_budget(answer), "overhead": answer.within.eviction.overhead}
    if answer.lanes is not None:
        data["within"] = {"budget": answer.capacity.usable, "device": "cuda", "seconds": dict(answer.lanes)}
    title = f"{what} {verdict} {answer.capacity.device}: {sizes}"
    return Form(title=title, sections=tuple(sections), data={"format": "memplan-fits-2", **data})


def fits_text(answer: Fits) -> str:
    """Return the answer as plain text, without a trailing newline."""
    return text(fits_form(answer))


def _parts(answer: Fits) -> Iterator[tuple[str, int, str]]:
    """Yield (label, bytes, remark) of each part, the total, the slack and the device."""
    need, capacity = answer.need, answer.capacity
    held = f", gradients of {format_bytes(need.gradients)} among them" if need.gradients else ""
    room = ", for which the arena makes room" if need.given_back else ""
    when = "forward and backward" if need.during >= need.beside else f"{answer.optimizer}.step(){room}"
    yield "parameters", need.parameters, "and buffers"
    yield "optimizer state", need.state, answer.optimizer
    yield "inputs", need.inputs, ""
    yield "arena", need.arena, f"what forward and backward make{held}"
    yield "beside the arena", need.beside, f"results and temporaries, the most at once: in {when}"
    yield "context, libraries", capacity.allowance, "an allowance, not measured"
    yield "needed", answer.total, ""
    yield "slack", capacity.slack, "to be left free"
    yield "device", capacity.total, capacity.device


def _lines(answer: Fits) -> Iterator[str]:
    if answer.largest_batch is not None:
        none = "not even a batch of 1 fits" if answer.batch != 1 or not answer.fits else ""
        yield f"largest batch that fits: {answer.largest_batch}" if answer.largest_batch else none
    if answer.lanes is not None and answer.within is not None:
        step, *lanes = answer.lanes.items()
        slowest = max(lanes, key=lambda lane: lane[1])[0]
        busy = ", ".join(f"{name} {seconds_of(seconds)}" for name, seconds in lanes)
        call = f"compile_step(model, optimizer, loss_fn, batch, device='cuda', budget={answer.capacity.usable})"
        yield f"fits with the model on the CPU ({format_bytes(answer.within.on_host)} there), by memplan.{call}"
        yield f"then predicted {seconds_of(step[1])} a step, bound by {slowest}: {busy}"
    elif answer.within is not None and answer.within.eviction is not None:
        options = ", ".join(f"{name}={option!r}" for name, option in _budget(answer).items())
        kept = answer.within.eviction
        slower = f"predicted +{format_share(kept.overhead)} of a step's time by the costs of {described(kept.costs)}"
        yield f"fits with memplan.compile(model, inputs, {options}): {slower}"
    if answer.smallest is not None:
        yield f"no plan was found that fits: the smallest needs {format_bytes(answer.smallest)}"
    compiled = "" if answer.compiled is None else f", torch.compile by itself {format_bytes(answer.compiled)}"
    yield f"eager is predicted to need {format_bytes(answer.eager)}{compiled}"
    if answer.seconds is not None:
        what = "forward and backward" if answer.train else "the forward"
        yield f"{what} by the roofline of {answer.capacity.costs or 'the costs given'}: {seconds_of(answer.seconds)}"
    if any(s.device.startswith("cuda") for s in answer.plan.graph.storages):
        by = "generated by Inductor for" if answer.plan.graph.is_generated else "eager's on"
        own = "what they allocate for themselves is not known but for attention's"
        yield f"kernels are {by} {answer.capacity.device}; {own}"
    elif not answer.capacity.is_host:
        yield "kernels were traced as the CPU's; what an accelerator's allocate is not known"
    elif answer.unmeasured:
        yield f"kernels are this machine's; what {answer.unmeasured} of them allocate for themselves is not known"
    else:
        yield "kernels are this machine's; what they allocate for themselves was measured, on zeros"


def _budget(answer: Fits) -> dict[str, int | str]:
    """Return the options of `memplan.compile` with which a step that does not fit does."""
    policy = {"policy": "recompute"} if answer.capacity.is_host else {}
    return {"budget": answer.capacity.usable, "reserve": answer.need.state, **policy}


# -- memplan budget ------------------------------------------------------------------------------------------


def frontier_form(name: str, frontier: Frontier, optimizer: str = "") -> Form:
    """Return a table with a row per budget; the totals are those with an optimizer, if it has a name."""
    eager = frontier.eager
    least = next((p for p in reversed(frontier.points) if p.plan is not None), None)
    using = f" with {optimizer}" if optimizer else ""
    free = f"with its loss head in {frontier.blocks} blocks of rows" if frontier.blocks else "without a budget"
    lines = [f"This step needs {format_bytes(frontier.most)}{using} {free} (eager: {format_bytes(eager)})."]
    if least is not None:
        share, time = share_of(least.budget, eager), percent(least.overhead)
        lines.append(
            f"The smallest budget is {format_exact(least.budget)}, {share} of eager's: {time} of a step's time."
        )
    names = columns("budget> share> step_time> recomputed>@70 to_the_host>@70 waits_for_copies>@90")
    rows = tuple(_row(p, eager) for p in frontier.points)
    head = ("policy", "costs", "most", "eager", "base_seconds")
    data = {
        "format": "memplan-frontier-3",
        **{name: getattr(frontier, name) for name in head},
        "points": [{"budget": p.budget, **_figures(p)} for p in frontier.points],
    }
    title = f"{name}: memory against time, policy {frontier.policy!r}, costs of {described(frontier.costs)}"
    return Form(title=title, sections=(Section(lines=tuple(lines), columns=names, rows=rows),), data=data)


def _figures(point: FrontierPoint) -> dict[str, float]:
    """Return the figures of a point; none if its budget cannot be kept."""
    if point.plan is None:
        return {}
    moved = {"recomputed": point.evicted(Action.RECOMPUTE), "offloaded": point.evicted(Action.OFFLOAD)}
    times = {"seconds": point.seconds, "overhead": point.overhead, "stall": point.stall}
    return {"total": point.total, "arena": point.plan.arena_size, "max_live": point.plan.max_live, **times, **moved}


def _row(point: FrontierPoint, eager: int) -> tuple[str, ...]:
    head = format_bytes(point.budget), share_of(point.budget, eager)
    if point.plan is None:
        return *head, "cannot be kept", "", "", ""
    moved = (format_bytes(point.evicted(action)) for action in (Action.RECOMPUTE, Action.OFFLOAD))
    waiting = f"{point.stall / point.seconds * 100:.1f} %" if point.seconds else "0 %"
    return *head, percent(point.overhead), *moved, waiting


def share_of(total: int, eager: int) -> str:
    """Return a total as a share of the eager total."""
    return format_share(total / eager if eager else 0.0)
