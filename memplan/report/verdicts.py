"""Words the verdicts of `memplan check`: their form, and annotations for GitHub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.analysis.rows import Growth
from memplan.check.check import Finding, Verdict
from memplan.core.jsonio import to_json
from memplan.core.units import format_bytes, format_exact, format_share
from memplan.report.sections import Form, Section, columns, holders_section, op_name, printable, signed

SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict with the name that the user gave to the plan or model; `file` is the file of the model, if any."""

    name: str
    verdict: Verdict
    file: str = ""


def check_form(judged: Sequence[Judged]) -> Form:
    """Return a line per finding, then what explains exceeded limits and what became smaller."""
    found = [(j.name, f) for j in judged for f in j.verdict.findings]
    failed = sum(not j.verdict.ok for j in judged)
    limits = f"{failed} of {len(judged)} over a limit" if failed else f"all {len(judged)} within their limits"
    names = columns("_ plan of measured>@60 limit>@60 too_much> against_the_baseline>@80")
    rows = tuple((_mark(f.ok), name, f.name, *f.texts(), _change(f)) for name, f in found)
    sections = [Section(columns=names, rows=rows)] if rows else []
    shown: list[Any] = []
    for name, f in found:
        why = (name, f.because, f.parts, f.grown)
        if not f.ok and why not in shown:  # once for findings with the same explanation
            sections.append(replace(_explanation(f), heading=sentence(name, f)))
            shown.append(why)
    if gains := gain_lines(judged):
        heading = "the baseline can shrink: run with --update-baseline"
        sections.append(Section(heading=heading, lines=gains))
    data = {"format": "memplan-check-2", "ok": not failed, "checked": [_json(j) for j in judged]}
    return Form(title=f"memplan: {limits}", sections=tuple(sections), data=data)


def _mark(ok: bool) -> str:
    return "ok" if ok else "FAIL"


def _change(finding: Finding) -> str:
    """Return the change from the baseline: "+1.50 MiB (+3.10 %)", or "same"; "" without a baseline."""
    if finding.before is None:
        return ""
    delta, sign = finding.measured - finding.before, "+" if finding.measured > finding.before else ""
    if not delta:
        return "same"
    if finding.is_share:
        return f"{sign}{format_share(float(delta))}"
    share = f" ({sign}{format_share(float(delta / finding.before))})" if finding.before else ""
    return f"{signed(int(delta))}{share}"


def place(growth: Growth) -> str:
    """Return the origin of a row's buffers: module, op, source line."""
    return ", ".join(part for part in (growth.module, op_name(growth.op), growth.source) if part)


def counts(growth: Growth) -> str:
    """Return the number of buffers of a row before and after: "12 -> 13"; "" for a row without buffers."""
    before, after = growth.count_before, growth.count_after
    changed = f"{before}" if before == after else f"{before} -> {after}"
    return changed if before or after else ""


def _grown_rows(finding: Finding) -> tuple[tuple[str, str, str, str], ...]:
    """Return (bytes added, buffers, kind, where) of the rows that changed most; the last row sums up the others."""
    ordered = sorted(finding.grown, key=lambda g: -abs(g.delta))
    shown, others = sorted(ordered[:SHOWN], key=lambda g: -g.delta), ordered[SHOWN:]
    rows = [(signed(g.delta), counts(g), g.kind, place(g)) for g in shown]
    rows += [(signed(sum(g.delta for g in others)), "", "", f"{len(others)} more rows")] if others else []
    return tuple(rows)


def _explanation(finding: Finding) -> Section:
    """Return the table that explains an exceeded limit: rows that grew, buffers at the peak, or bytes by kind."""
    if finding.grown:
        return Section(columns=columns("grew_by> buffers>@60 kind@60 where"), rows=_grown_rows(finding))
    if finding.because:
        return holders_section("", finding.because)
    rows = tuple((name, format_exact(size)) for name, size in finding.parts)
    return Section(columns=columns("outside_the_arena size>"), rows=rows)


def sentence(name: str, finding: Finding) -> str:
    """Return a sentence on one failed finding: "arena of gpt2 is 12.00 KiB (12,288 B): 1 B more than ..."."""
    measured, limit, excess = finding.texts()
    grew = ""
    if finding.before is not None:
        before = format_share(float(finding.before)) if finding.is_share else format_exact(int(finding.before))
        grew = f"; baseline {before}, {_change(finding)}"
    return f"{finding.name} of {name} is {measured}: {excess} more than {limit} ({finding.rule}){grew}"


def gain_lines(judged: Sequence[Judged]) -> tuple[str, ...]:
    """Return a line for each figure that is smaller than in the baseline."""
    found = ((j.name, *gain) for j in judged for gain in j.verdict.gains)
    return tuple(
        f"{name}: {metric} {format_exact(before)} -> {format_exact(now)} ({signed(now - before)})"
        for name, metric, before, now in found
    )


def _json(judged: Judged) -> dict[str, Any]:
    verdict, figures = judged.verdict, judged.verdict.figures
    sizes = {name: getattr(figures, name) for name in ("arena", "max_live", "outside", "total")}
    return {
        **{"name": judged.name, "ok": verdict.ok, **sizes},
        "findings": [_finding_json(finding) for finding in verdict.findings],
        "gains": [{"of": metric.value, "before": before, "now": now} for metric, before, now in verdict.gains],
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    """Return a finding; its figures are exact: whole bytes, or shares between 0 and 1."""
    figures = {name: getattr(finding, name) for name in ("measured", "limit", "before")}
    number = float if finding.is_share else int
    return {
        **{"of": finding.name, "rule": finding.rule, "ok": finding.ok},
        **{name: None if value is None else number(value) for name, value in figures.items()},
        **{"because": to_json(finding.because), "parts": dict(finding.parts)},
        "grown": [{**to_json(growth), "delta": growth.delta} for growth in finding.grown],
    }


# -- GitHub --------------------------------------------------------------------------------------------------

Location = tuple[str, int]
"""A file as annotations name it, and its line; 0 for the whole file."""


def sources_of(finding: Finding) -> tuple[str, ...]:
    """Return the source lines ("model.py:12") that explain a failed finding, those with the most bytes first."""
    sources = [g.source for g in finding.grown if g.delta > 0] + [h.source for h in finding.because]
    return tuple(dict.fromkeys(source for source in sources if source))


def github_lines(judged: Sequence[Judged], locate: Callable[[Judged, Finding], Location | None]) -> Iterator[str]:
    """Yield GitHub workflow commands: one per failed finding, and a notice if the baseline can shrink.

    `locate` returns the file and line to which the annotation of a finding belongs.
    """
    for j in judged:
        for f in (f for f in j.verdict.findings if not f.ok):
            why = [" ".join(filter(None, (delta, kind, at))) for delta, _, kind, at in _grown_rows(f)]
            why += [f"{format_bytes(h.size)} {h.module or h.id} {h.source}" for h in f.because]
            why += [f"{name} {format_exact(size)}" for name, size in f.parts]
            file, line = locate(j, f) or ("", 0)
            at = (f"file={_property(file)}," if file else "") + (f"line={line}," if line else "")
            yield command(f"error {at}", f"memplan: {f.name} of {j.name}", "\n".join((sentence(j.name, f), *why)))
    if gains := gain_lines(judged):
        yield command("notice ", "memplan: the baseline can shrink", "; ".join(gains))


def command(what: str, title: str, text: str) -> str:
    """Return a workflow command such as "notice " with a title and a text, which are escaped."""
    return f"::{what}title={_property(title)}::{_message(text)}"


def _message(text: str) -> str:
    lines = "\n".join(map(printable, text.split("\n")))
    return lines.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
