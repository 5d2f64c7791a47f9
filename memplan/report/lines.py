"""Words the report of a plan: the form that every readable format shows."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from memplan.core.gpus import described
from memplan.core.plan import Plan
from memplan.core.units import bytes_apart, format_bytes, format_exact, format_share
from memplan.report.sections import (
    Form,
    Section,
    columns,
    fragment,
    holders_section,
    lanes_section,
    markdown,
    op_name,
    origin,
    percent,
)
from memplan.report.summary import Peak, Report, report_json
from memplan.report.terminal import text

MOST_BLOCKS = 3000  # buffers that a picture in a notebook still shows

Line = tuple[str, int | None, str]

_RELEASED = "freed after their last use, the most at one step"
_WORKSPACES = "not known: cuBLAS keeps some for each thread and stream; in no total, reserve= sets bytes aside for it"
_KNOWN = "of attention's backward; others are not measured"
_IDLE = "while the optimizer runs; the rest holds gradients"


def answer_lines(report: Report) -> tuple[str, ...]:
    """Return what people ask first: what the step needs and why, where it peaks, and how it would need less."""
    need, out, at, kept = report.needed, report.outside, report.peak, report.kept
    state = f"{need.optimizer}'s state" if need.optimizer else "set aside" if out.reserve else "optimizer state"
    names = {"optimizer": state, "activations": "activations"}
    if report.gradients > 2 * need.parts["gradients"]:
        names["activations"] += f" (later gradients, {format_bytes(report.gradients)}, in their place)"
    parts = sorted(((size, name) for name, size in need.parts.items() if size * 200 >= need.total > 0), reverse=True)
    held = ", ".join(f"{format_bytes(size)} {names.get(name, name)}" for size, name in parts)
    using = f" with {need.optimizer}" if need.optimizer not in ("", "none") else ""
    eager = "" if need.eager is None else f" (eager: {format_bytes(need.eager)})"
    where = " on device and host together" if kept and kept.device else ""
    lines = [f"This step needs {format_bytes(need.total)}{where}{using}{eager}" + (f": {held}." if held else ".")]
    if at is not None:
        place, most = f" of {at.module}" if at.module else "", at.holders[0]
        named = ", ".join(filter(None, (op_name(at.target), at.source)))
        tensor = f"the largest tensor there has {format_bytes(most.size)}, of {origin(most)}"
        lines.append(f"It peaks in the {at.phase}{place} ({named}); {tensor}.")
    if kept is not None and kept.budget is not None and need.state:
        lines.append(f"The budget of {format_bytes(kept.budget)} leaves {state} out: reserve={need.state} puts it in.")
    lines += [
        "Cheapest way to make it smaller: a budget. Recomputing or offloading activations saves at most "
        f"{format_bytes(lever.saves)}, at the price that `memplan budget` shows."
        for lever in report.advice
    ]
    return tuple(lines)


def memory_lines(report: Report) -> tuple[tuple[Line, ...], ...]:
    """Return groups of (label, bytes or None if not known, remark) without what is 0; a group ends with its sum."""
    out, need = report.outside, report.needed
    arena = (
        ("peak (max live)", report.max_live, _peak(report.peak)),
        ("  of it padding", report.padding, "alignment and red zones"),
        (f"fragmentation {format_share(report.fragmentation)}", report.arena_size - report.max_live, "of the arena"),
        ("  idle after the step", report.arena_size - report.gradients if report.gradients else 0, _IDLE),
        ("arena", report.arena_size, "one allocation"),
    )
    step = (
        ("outputs", out.outputs, "the caller's"),
        ("gradients", out.gradients, "the caller's"),
        ("intermediate", out.intermediate, _RELEASED),
        ("fallbacks", out.fallbacks, "results of kernels without out=, the most at one step"),
        (
            "kernels' temporaries",
            out.temporaries,
            "the most at one step" if out.measured else _KNOWN * bool(out.temporaries),
        ),
        ("allocated by the step", out.during, "the most of these together at one step"),
    )
    where = "device and host hold together" if report.kept and report.kept.device else "the device must hold"
    unknown = ", and kernels' temporaries" if not out.measured else ""
    total = (
        ("parameters", out.parameters, ""),
        ("optimizer state", out.optimizer_state + need.state, need.optimizer),
        ("constants", out.constants, ""),
        ("inputs", out.inputs, ""),
        ("tangents", out.tangents, "gradients of the outputs, made by autograd"),
        ("reserve", out.reserve, f"set aside for {need.optimizer or 'what the step does not show'}"),
        ("libraries' workspaces", out.workspaces, _WORKSPACES if out.workspaces is None else "an allowance for cuBLAS"),
        ("arena", report.arena_size, "what forward and backward make, below"),
        ("beside the arena", out.during, "results and temporaries, below"),
        ("total", need.total, f"what {where}{unknown}"),
    )
    return tuple((*(line for line in g[:-1] if line[1] != 0), g[-1]) for g in (total, arena, step))


def _peak(peak: Peak | None) -> str:
    return f"at step {peak.step}, of {peak.alive} buffers" if peak else "nothing is planned"


def title(report: Report) -> str:
    """Return what was planned, such as "gpt2: forward + backward, 812 steps, 530 buffers"."""
    what = "forward + backward" if report.backward else "forward only"
    return f"{report.model or 'model'}: {what}, {report.steps} steps, {report.buffers} buffers"


_CLAIMED = "claimed by the plan file, and was not proved again here"


def verdict(report: Report) -> str:
    """Return a sentence on the quality of the layout, and how far it is proven."""
    by = f"layout by {report.solver!r}"
    if report.layout_claimed:
        return f"{by}: that no smaller arena than {format_bytes(report.bound)} exists in this order is {_CLAIMED}"
    if report.status != "optimal":
        return f"{by}: not proven; a smaller arena may exist, down to {format_bytes(report.bound)}"
    return f"{by}: no layout can need less in this order"


def certificate(report: Report) -> str:
    """Return the order's quality and its proof: "optimal: no order of these ops needs less than 826.1 MiB, ..."."""
    by = report.order_evidence.value.format(op=report.order_proof)
    proof = f"proven by {by}"
    needs, least = bytes_apart(report.order_max_live, report.order_bound)
    if report.order_certified:
        text = f"optimal: no order of these ops needs less than {least}, {proof}"
    else:
        most = format_share(report.order_gap)
        text = f"{needs}, at most {most} more than the best order can need: {least}, {proof}"
    if report.order_traced > report.order_max_live:
        text += f"; traced, they need {bytes_apart(report.order_traced, report.order_max_live)[0]}"
    return f"order by {report.policy!r}: {text}"


def waiting_lines(report: Report) -> tuple[str, ...]:
    """Return what the step sends to other ranks, and what it holds of theirs."""
    lines = []
    if report.exchanged is not None:
        x = report.exchanged
        again = f" ({x.again} of them again)" if x.again else ""
        lines.append(
            f"this rank runs {x.gathers} gathers of parameters{again} and {x.others} other collectives, which take "
            f"{format_bytes(x.sent)} over its link each way; buffers of the library that runs them (NCCL) are not known"
        )
        if x.gathered:
            most = f"{format_bytes(x.gathered)}, at step {x.gathered_step}"
            lines.append(f"gathered parameters hold at most {most}")
    return tuple(lines)


def budget_lines(report: Report) -> tuple[str, ...]:
    """Return which kernels were chosen, how ops are divided, how a budget is kept, and its predicted cost in time."""
    k, d = report.kept, report.division
    how_it_runs = [f"kernels: {report.kernels}"] if report.kernels else []
    if d is not None:
        same = "equal up to rounding" if d.sums else "the same bits"
        how_it_runs.append(f"ops whose rows are independent run in {d.blocks} blocks of rows: {same}")
    if k is None:
        return tuple(how_it_runs)
    what = []
    if k.recomputes:
        what.append(f"{format_bytes(k.recomputed)} computed again ({_times(k.recomputes, 'recompute')})")
    if k.offloads:
        back = "from" if k.device else "back from"
        copied = f"{format_bytes(k.offloaded)} copied {back} the host ({_times(k.offloads, 'reload')}"
        lie = f"up to {format_bytes(k.host_size)} of what the step makes lie there" if k.device else ""
        what.append(f"{copied}; {lie or f'up to {format_bytes(k.host_size)} lie there'})")
    cost = f"predicted {percent(k.overhead)} of a step's time by the costs of {described(k.costs)}"
    if k.pinned:
        what.append(f"up to {format_bytes(k.pinned)} of the host's memory are page-locked")
    how = f"{'; '.join(what)}; {cost}" if what else "nothing is evicted"
    limit = f"arena budget {format_exact(k.arena_budget)}"
    limit = limit if k.budget is None else f"budget {format_exact(k.budget)}, {limit}"
    kept = f"{limit}, kept by {k.policy!r}: {how}"
    if not k.device:
        return (*how_it_runs, kept)
    runs = (
        f"runs on {k.device}; the model, its inputs and its results stay on the host, outside the arena: "
        f"{format_bytes(k.on_host)} of its memory, with copies of what is evicted"
    )
    if k.updated:
        runs += f"; updates on the host: {format_bytes(k.updated)} of parameters and state change there"
    if not k.sections:
        return (*how_it_runs, runs, kept)
    each = (f"{s.device}: arena {format_exact(s.size)}, max live {format_exact(s.max_live)}" for s in k.sections)
    return (*how_it_runs, runs, *each, f"{format_bytes(k.sent)} are sent from device to device in a step; {cost}")


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def report_form(report: Report) -> Form:
    """Return all of a report: the answer, memory, advice, graphs, the largest buffers and ops, and what is proven."""
    sections = [
        Section(lines=(*answer_lines(report), *waiting_lines(report), *budget_lines(report))),
        _memory(report),
    ]
    if report.advice:
        sections.append(Section(heading="what would shrink it", lines=tuple(lever.text for lever in report.advice)))
    if report.lanes:
        sections.append(lanes_section(report.lanes))
    if report.graphs:
        parts = ((g.name, str(g.forward + g.backward), format_bytes(g.arena_size), g.ends) for g in report.graphs)
        names = columns("graph steps> alone> ends@100")
        sections.append(Section(heading="graphs, which share the arena", columns=names, rows=tuple(parts)))
    if report.largest:
        sections.append(holders_section("largest buffers", report.largest))
    if report.functional:
        names = columns("op calls> size> bytes>@100 most_at_once>@60")
        rows = (
            (op_name(f.target), str(f.calls), format_bytes(f.bytes), f"{f.bytes:,}", format_bytes(f.most))
            for f in report.functional
        )
        heading = "ops that run functionally (no out= kernel)"
        sections.append(Section(heading=heading, columns=names, rows=tuple(rows)))
    sections.append(Section(heading="how it was planned", lines=planned_lines(report)))
    return Form(title=title(report), sections=tuple(sections), data=report_json(report))


def planned_lines(report: Report) -> tuple[str, ...]:
    """Return how good the plan is, and what proves it."""
    return verdict(report), certificate(report)


def _memory(report: Report) -> Section:
    groups = memory_lines(report)
    rows = tuple((label, *_size(size, remark), remark) for group in groups for label, size, remark in group)
    sums = frozenset(end - 1 for end in accumulate(map(len, groups)))
    return Section(columns=columns("memory size> bytes>@100 remark@60"), rows=rows, sums=sums)


def _size(size: int | None, remark: str) -> tuple[str, str]:
    return ("not known" if remark else "not measured", "-") if size is None else (format_bytes(size), f"{size:,}")


def report_markdown(report: Report) -> str:
    """Return the report as GitHub-flavoured markdown, with exact bytes next to the rounded sizes."""
    return markdown(report_form(report))


def report_text(report: Report) -> str:
    """Return the report as plain text, without a trailing newline."""
    return text(report_form(report))


def report_fragment(report: Report) -> str:
    """Return the report as an HTML fragment for notebooks."""
    return fragment(title(report), replace(_memory(report), lines=answer_lines(report)))


def plan_fragment(plan: Plan) -> str:
    """Return the report of a plan as an HTML fragment, with the picture of its arena unless it has many buffers."""
    table = report_fragment(plan.report())
    return table + plan.to_svg() if len(plan.problem.buffers) <= MOST_BLOCKS else table
