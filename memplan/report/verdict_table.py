"""Renders the verdicts of `memplan check` for terminals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from memplan.check.check import Finding
from memplan.core.units import format_exact
from memplan.report.lines import printable
from memplan.report.table import NARROW, literal, new_table, section_table
from memplan.report.verdicts import Judged, change, explanation, gain_lines, proof_lines, sentence


def verdicts_table(judged: Sequence[Judged], width: int) -> RenderableType:
    """Return a line per finding, then the buffers that explain exceeded limits, then improvements and proofs."""
    parts: list[RenderableType] = [_findings(judged)] if width >= NARROW else list(_sentences(judged))
    for j in judged:
        parts += _why(j, width)
    if gains := gain_lines(judged):
        parts += [Text(), Text("the baseline can shrink: run with --update-baseline", "bold green")]
        parts += [literal(f"  {line}") for line in gains]
    for ok, line in proof_lines(judged):
        head = ("ok    ", "green") if ok else ("FAIL  ", "bold red")
        parts.append(Text.assemble(head, printable(line)))
    return Group(*parts)


def _sentences(judged: Sequence[Judged]) -> Iterator[Text]:
    """Yield a sentence per finding, for narrow terminals."""
    for j in judged:
        for finding in j.verdict.findings:
            head = ("ok    ", "green") if finding.ok else ("FAIL  ", "bold red")
            measured, limit, _ = finding.texts()
            kept = f"{finding.name} of {j.name} is {measured}; the limit is {limit}"
            yield Text.assemble(head, printable(kept if finding.ok else sentence(j.name, finding)))


def _findings(judged: Sequence[Judged]) -> RenderableType:
    """Return a table with a line per finding."""
    compared = any(f.before is not None for j in judged for f in j.verdict.findings)
    table = new_table()
    names = ["", "plan", "of", "measured", "limit", "too much", *(["change"] if compared else [])]
    for name in names:
        table.add_column(name, overflow="fold", justify="left" if name in ("", "plan", "of") else "right")
    for j in judged:
        for finding in j.verdict.findings:
            mark = Text("ok", "green") if finding.ok else Text("FAIL", "bold red")
            cells = [mark, literal(j.name), Text(finding.name), *map(Text, finding.texts())]
            table.add_row(*cells, *([Text(change(finding))] if compared else []))
    return table if table.rows else Group()


def _why(judged: Judged, width: int) -> list[RenderableType]:
    """Return what explains the exceeded limits of one plan, once for findings with the same explanation."""
    parts: list[RenderableType] = []
    shown: list[Finding] = []
    for finding in judged.verdict.findings:
        same = any((finding.because, finding.parts, finding.grown) == (f.because, f.parts, f.grown) for f in shown)
        if not finding.ok and not same:
            parts += [Text(), _explained(judged.name, finding, width)]
            shown.append(finding)
    return parts


def _explained(name: str, finding: Finding, width: int) -> RenderableType:
    """Return a table of what explains an exceeded limit, below what it is."""
    heading = f"{name}: what lies outside the arena"
    if finding.grown and finding.is_share:
        heading = f"{name}: what changed the {finding.name} since the baseline"
    elif finding.grown:
        sizes = f"{format_exact(int(finding.before or 0))} -> {format_exact(int(finding.measured))}"
        heading = f"{name}: {finding.name} {sizes} since the baseline"
    elif finding.because:
        heading = f"{name}: largest buffers alive at the peak"
    return Group(section_table(replace(explanation(finding), heading=heading), width), Text())
