"""Renders plans and reports where they are printed: in a terminal without colours, a log, or a notebook."""

from __future__ import annotations

from html import escape

from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.report.lines import budget_lines, memory_lines, peak_line, printable, title, verdict, waiting_lines
from memplan.report.picture import picture_of_plan
from memplan.report.summary import Report
from memplan.report.svg import picture_svg

_MOST_BLOCKS = 3000  # buffers that a picture in a notebook still shows


def report_text(report: Report) -> str:
    """Return the report as plain text, without a trailing newline: what was planned, a line for each part, the peak."""
    rows = [row for group in memory_lines(report) for row in (*group, None)][:-1]
    sizes = ["" if row is None else "-" if row[1] is None else format_bytes(row[1]) for row in rows]
    left = max(len(row[0]) for row in rows if row is not None)
    right = max(map(len, sizes))
    lines = [title(report), verdict(report), *waiting_lines(report), *budget_lines(report), ""]
    for row, size in zip(rows, sizes, strict=True):
        lines.append("" if row is None else f"  {row[0]:<{left}}  {size:>{right}}  {row[2]}".rstrip())
    if report.peak is not None:
        lines += ["", f"peak at {peak_line(report.peak)}"]
    lines += [f"to shrink it: {lever.text}" for lever in report.advice]
    return "\n".join(map(printable, lines))


def report_table(report: Report) -> str:
    """Return the report as an HTML fragment for notebooks."""
    rows = "".join(
        f"<tr><td>{escape(printable(label))}</td>"
        f'<td style="text-align:right">{"-" if size is None else escape(format_bytes(size))}</td>'
        f"<td>{escape(printable(remark))}</td></tr>"
        for group in memory_lines(report)
        for label, size, remark in group
    )
    head, what = escape(printable(title(report))), escape(printable(verdict(report)))
    return f"<div><b>{head}</b><br>{what}<table>{rows}</table></div>"


def plan_fragment(plan: Plan) -> str:
    """Return the report of a plan as an HTML fragment, with the picture of its arena unless it has many buffers."""
    table = report_table(plan.report())
    return table + picture_svg(picture_of_plan(plan)) if len(plan.problem.buffers) <= _MOST_BLOCKS else table
