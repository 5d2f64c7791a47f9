"""Renders the verdicts of `memplan check` as rows and sentences, markdown, JSON and GitHub annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.analysis.groups import Growth
from memplan.check.check import Finding, Verdict
from memplan.core.jsonio import to_json
from memplan.core.units import format_bytes, format_exact, format_share
from memplan.report.lines import op_name, printable
from memplan.report.sections import Section, cell, columns, holders_section, section_markdown, table
from memplan.verify import Proof

FORMAT = "memplan-check-1"
SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict with the name that the user gave to the plan or model.

    `proofs` are those of the plan's claims, if they were requested; `file` is the file of the model, if any.
    """

    name: str
    verdict: Verdict
    proofs: tuple[Proof, ...] = ()
    file: str = ""

    @property
    def ok(self) -> bool:
        """Whether every limit is kept and every requested proof succeeded."""
        return self.verdict.ok and all(proof.ok for proof in self.proofs)


def signed(count: int) -> str:
    """Return a difference of bytes with its sign: "+1.50 MiB"."""
    return f"{'+' if count > 0 else ''}{format_bytes(count)}"


def change(finding: Finding) -> str:
    """Return the change from the baseline: "+1.50 MiB (+3.10 %)", or "same"; "" without a baseline."""
    if finding.before is None:
        return ""
    delta = finding.measured - finding.before
    if not delta:
        return "same"
    if finding.is_share:
        return f"{'+' if delta > 0 else ''}{format_share(float(delta))}"
    share = f" ({'+' if delta > 0 else ''}{format_share(float(delta / finding.before))})" if finding.before else ""
    return f"{signed(int(delta))}{share}"


def place(growth: Growth) -> str:
    """Return the origin of a row's buffers: module, op, source line."""
    known = (growth.module, op_name(growth.op), growth.source)
    return ", ".join(part for part in known if part)


def counts(growth: Growth) -> str:
    """Return the number of buffers of a row before and after: "12 -> 13"; "" for a row without buffers."""
    before, after = growth.count_before, growth.count_after
    if not before and not after:
        return ""
    return f"{before}" if before == after else f"{before} -> {after}"


def grown_rows(finding: Finding) -> tuple[tuple[str, str, str, str], ...]:
    """Return (bytes added, buffers, kind, where) of the rows that changed most; the last row sums up the others."""
    shown = sorted(finding.grown, key=lambda g: -abs(g.delta))[:SHOWN]
    rows = [(signed(g.delta), counts(g), g.kind, place(g)) for g in sorted(shown, key=lambda g: -g.delta)]
    others = len(finding.grown) - len(shown)
    if others:
        rest = sum(g.delta for g in finding.grown) - sum(g.delta for g in shown)
        rows.append((signed(rest), "", "", f"{others} more rows"))
    return tuple(rows)


def sentence(name: str, finding: Finding) -> str:
    """Return a sentence on one failed finding: "arena of gpt2 is 12.00 KiB (12,288 B): 1 B more than ..."."""
    measured, limit, excess = finding.texts()
    grew = "" if finding.before is None else f"; baseline {_value(finding, finding.before)}, {change(finding)}"
    return f"{finding.name} of {name} is {measured}: {excess} more than {limit} ({finding.rule}){grew}"


def _value(finding: Finding, value: Any) -> str:
    return format_share(float(value)) if finding.is_share else format_exact(int(value))


def gain_lines(judged: Sequence[Judged]) -> tuple[str, ...]:
    """Return a line for each figure that is smaller than in the baseline."""
    return tuple(
        f"{j.name}: {metric} {format_exact(before)} -> {format_exact(now)} ({signed(now - before)})"
        for j in judged
        for metric, before, now in j.verdict.gains
    )


def proof_lines(judged: Sequence[Judged]) -> tuple[tuple[bool, str], ...]:
    """Return (proven, sentence) for every proof."""
    return tuple((proof.ok, f"{j.name}: {proof.text}") for j in judged for proof in j.proofs)


def verdicts_json(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return the verdicts as plain types; every figure is exact: whole bytes, or shares between 0 and 1."""
    return {"format": FORMAT, "ok": all(j.ok for j in judged), "checked": [_one_json(j) for j in judged]}


def _one_json(judged: Judged) -> dict[str, Any]:
    verdict, figures = judged.verdict, judged.verdict.figures
    return {
        "name": judged.name,
        "ok": judged.ok,
        "arena": figures.arena,
        "max_live": figures.max_live,
        "outside": figures.outside,
        "total": figures.total,
        "findings": [_finding_json(finding) for finding in verdict.findings],
        "gains": [{"of": metric.value, "before": before, "now": now} for metric, before, now in verdict.gains],
        "proofs": [to_json(proof) for proof in judged.proofs],
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    def number(value: Any) -> float | int | None:
        return None if value is None else float(value) if finding.is_share else int(value)

    return {
        "of": finding.name,
        "rule": finding.rule,
        "ok": finding.ok,
        "measured": number(finding.measured),
        "limit": number(finding.limit),
        "before": number(finding.before),
        "because": to_json(finding.because),
        "parts": dict(finding.parts),
        "grown": [{**to_json(growth), "delta": growth.delta} for growth in finding.grown],
    }


def verdicts_markdown(judged: Sequence[Judged]) -> str:
    """Return the verdicts as markdown for a pull request: a table, what grew, what shrank, what is proven."""
    proofs = proof_lines(judged)
    rows = [
        ("ok" if f.ok else "**FAIL**", cell(j.name), f.name, *map(cell, f.texts()), cell(change(f)))
        for j in judged
        for f in j.verdict.findings
    ]
    heads, parts = [], []
    if rows or not proofs:
        failed = sum(not j.verdict.ok for j in judged)
        heads.append(f"{failed} of {len(judged)} over a limit" if failed else f"all {len(judged)} within their limits")
        header = ("", "plan", "of", " measured", " limit", " too much", " against the baseline")
        parts.append(table(header, ()) + "".join("\n| " + " | ".join(row) + " |" for row in rows))
    if proofs:
        heads.append(f"{sum(ok for ok, _ in proofs)} of {len(proofs)} claims proven again")
    parts.insert(0, f"## memplan: {'; '.join(heads)}")
    parts += [part for j in judged for f in j.verdict.findings if not f.ok for part in _why_markdown(j, f)]
    gains = gain_lines(judged)
    if gains:
        parts.append("### The baseline can shrink\n\n" + "\n".join(f"- {cell(line)}" for line in gains))
    if proofs:
        lines = [f"- {'ok' if ok else '**FAIL**'} {cell(line)}" for ok, line in proofs]
        parts.append("### Proofs\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def explanation(finding: Finding) -> Section:
    """Return the table that explains an exceeded limit: rows that grew, buffers at the peak, or bytes by kind."""
    if finding.grown:
        return Section(columns=columns("grew_by> buffers>@60 kind@60 where"), rows=grown_rows(finding))
    if finding.because:
        return holders_section("", finding.because)
    rows = tuple((name, format_exact(size)) for name, size in finding.parts)
    return Section(columns=columns("outside_the_arena size>"), rows=rows)


def _why_markdown(judged: Judged, finding: Finding) -> Iterator[str]:
    return section_markdown(replace(explanation(finding), heading=sentence(judged.name, finding)))


def sources_of(finding: Finding) -> tuple[str, ...]:
    """Return the source lines ("model.py:12") that explain a failed finding, those with the most bytes first."""
    sources = [g.source for g in finding.grown if g.delta > 0] + [h.source for h in finding.because]
    return tuple(dict.fromkeys(source for source in sources if source))


Location = tuple[str, int]
"""A file as annotations name it, and its line; 0 for the whole file."""


def github_lines(
    judged: Sequence[Judged], locate: Callable[[Judged, Finding], Location | None] = lambda *_: None
) -> Iterator[str]:
    """Yield GitHub workflow commands: one per failed finding and proof, and a notice if the baseline can shrink.

    `locate` returns the file and line to which the annotation of a finding belongs.
    """
    for j in judged:
        for finding in j.verdict.findings:
            if not finding.ok:
                yield _failure(j, finding, locate(j, finding))
    for ok, line in proof_lines(judged):
        if not ok:
            yield f"::error title=memplan: a plan's claim::{escape_message(line)}"
    if gains := gain_lines(judged):
        yield f"::notice title=memplan: the baseline can shrink::{escape_message('; '.join(gains))}"


def _failure(judged: Judged, finding: Finding, location: Location | None) -> str:
    why = [" ".join(filter(None, (delta, kind, where))) for delta, _, kind, where in grown_rows(finding)]
    why += [f"{format_bytes(h.size)} {h.module or h.id} {h.source}" for h in finding.because]
    why += [f"{name} {format_exact(size)}" for name, size in finding.parts]
    text = "\n".join((sentence(judged.name, finding), *why))
    title = escape_property(f"memplan: {finding.name} of {judged.name}")
    return f"::error {_place(location)}title={title}::{escape_message(text)}"


def _place(location: Location | None) -> str:
    if location is None:
        return ""
    file, line = location
    return f"file={escape_property(file)}," + (f"line={line}," if line else "")


def escape_message(text: str) -> str:
    """Return `text` escaped for the message of a workflow command."""
    lines = "\n".join(map(printable, text.split("\n")))
    return lines.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """Return `text` escaped for a property of a workflow command, such as its title."""
    return escape_message(text).replace(":", "%3A").replace(",", "%2C")
