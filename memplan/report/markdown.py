"""Renders the report as GitHub-flavoured markdown, for pull requests and job summaries."""

from __future__ import annotations

from memplan.core.units import format_bytes
from memplan.report.lines import (
    budget_lines,
    certificate,
    memory_lines,
    peak_line,
    title,
    verdict,
    waiting_lines,
)
from memplan.report.sections import cell, section_markdown, table, table_sections
from memplan.report.summary import Report


def report_markdown(report: Report) -> str:
    """Return the report as headings and tables, with exact bytes next to the rounded sizes."""
    groups = memory_lines(report)
    memory = [
        (label, *_size(size), remark or ("not measured" if size is None else ""))
        for group in groups
        for label, size, remark in group
    ]
    parts = [f"## {cell(title(report))}", cell(verdict(report)) + ".", cell(certificate(report)) + "."]
    parts += [cell(line) + "." for line in (*waiting_lines(report), *budget_lines(report))]
    parts.append(table(("memory", "size", "bytes", ""), memory))
    if report.peak is not None:
        parts.append(f"**Peak** at {cell(peak_line(report.peak))}.")
    if report.advice:
        parts.append("### What would shrink it\n\n" + "\n".join(f"- {cell(lever.text)}" for lever in report.advice))
    parts += [part for section in table_sections(report) for part in section_markdown(section)]
    return "\n\n".join(parts) + "\n"


def _size(size: int | None) -> tuple[str, str]:
    return ("-", "-") if size is None else (format_bytes(size), f"{size:,}")
