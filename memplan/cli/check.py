"""`memplan check`: fails the build if a model needs more memory than its limits or its baseline allow."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli.console import console, error_console

if TYPE_CHECKING:
    from memplan.analysis.figures import Figures
    from memplan.check.project import Entry
    from memplan.cli.gate import Work
    from memplan.report.verdicts import Judged


class VerdictFormat(enum.StrEnum):
    """The output formats of the verdicts."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"
    GITHUB = "github"


def check(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLAN|MODEL]...",
            help="plan.json, FILE.py:FACTORY or package.module:FACTORY; else those of pyproject.toml.",
        ),
    ] = None,
    *,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="FILE", help="Figures to compare with: nothing may grow.")
    ] = None,
    fail_over: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-over",
            metavar="FIGURE:LIMIT",
            help="arena:12GiB, arena:+2%, arena:+64MiB, fragmentation:5%, outside:+0; also peak and total. Repeatable.",
        ),
    ] = None,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write the current figures to the baseline.")
    ] = False,
    max_arena: Annotated[
        str | None, typer.Option("--max-arena", metavar="SIZE", help="The same as --fail-over arena:SIZE.")
    ] = None,
    max_fragmentation: Annotated[
        str | None,
        typer.Option("--max-fragmentation", metavar="SHARE", help="The same as --fail-over fragmentation:SHARE."),
    ] = None,
    max_outside: Annotated[
        str | None, typer.Option("--max-outside", metavar="SIZE", help="The same as --fail-over outside:SIZE.")
    ] = None,
    max_total: Annotated[
        str | None, typer.Option("--max-total", metavar="SIZE", help="The same as --fail-over total:SIZE.")
    ] = None,
    infer: Annotated[bool, typer.Option("--infer", help="Plan the forward of a model alone.")] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Prove a plan's claims about all orders and layouts again; exit 1 if one fails."),
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", metavar="SECONDS", help="How long --verify may take for each proof."),
    ] = None,
    form: Annotated[
        VerdictFormat, typer.Option("--format", help="What to print; github: annotations and a job summary.")
    ] = VerdictFormat.TABLE,
) -> None:
    """Fail when a plan or a model needs more than it may, or more than it did.

    Exits 1 when a limit is exceeded, and shows by how much and which buffers explain it; with --verify also when
    something that the plan says is not proven again.

    A figure that is equal to its limit keeps it. Saved plans are checked without torch.

    \\[tool.memplan] in pyproject.toml may list models, baseline and fail-over: then `memplan check` does it all.
    """
    from memplan.check.baseline import read_baseline
    from memplan.check.project import find_project
    from memplan.cli.gate import Work, entries_of, given_rules
    from memplan.cli.source import seconds_option, share_option, size_option
    from memplan.errors import InvalidSize

    given = given_rules(
        fail_over or [],
        size_option("--max-arena", max_arena),
        share_option("--max-fragmentation", max_fragmentation),
        size_option("--max-outside", max_outside),
        size_option("--max-total", max_total),
    )
    limit = seconds_option("--time-limit", time_limit)
    if limit is not None and not verify:
        raise InvalidSize("is for --verify", where="--time-limit", hint="add --verify, or leave it out")
    project = find_project(Path.cwd())
    entries, listed = entries_of(targets or [], infer, project)
    file = baseline or (project.baseline if project and listed else None)
    work = Work(entries, given, project if listed else None, file, verify=verify, time_limit=limit)
    if update_baseline:
        _update(work, whole=listed and not targets, form=form)
        return
    before = read_baseline(file) if file else {}
    judged = work.judge(before)
    _show(judged, form)
    if listed and not targets:
        _mention_unlisted(before, entries)
    if not all(j.ok for j in judged):
        raise typer.Exit(1)


def _update(work: Work, *, whole: bool, form: VerdictFormat) -> None:
    """Write the current figures to the baseline, unless a plan is invalid or exceeds an absolute limit."""
    from memplan.check.baseline import read_baseline, update_baseline
    from memplan.cli.interrupt import stop_if_interrupted
    from memplan.cli.outputs import require_outputs
    from memplan.errors import InvalidSize

    if work.file is None:
        raise InvalidSize("there is no baseline to update", hint="add --baseline FILE")
    require_outputs({"--baseline": work.file}, *(entry.target for entry in work.entries))
    before = read_baseline(work.file) if work.file.exists() else {}
    judged = work.judge(before, absolute_only=True)
    if not all(j.ok for j in judged):
        _show(judged, form)
        why = "something is not proven" if all(j.verdict.ok for j in judged) else "a limit is exceeded"
        error_console().print(f"{work.file} was not written: {why}", style="bold red", soft_wrap=True)
        raise typer.Exit(1)
    now = {j.name: j.verdict.figures for j in judged}
    stop_if_interrupted()
    _say_written(work.file, update_baseline(work.file, now, whole=whole), now)


def _say_written(file: Path, before: Mapping[str, Figures], now: Mapping[str, Figures]) -> None:
    from rich.text import Text

    from memplan.core.units import format_exact
    from memplan.report.lines import printable

    screen = console()
    screen.print(Text(f"wrote {printable(str(file))}: {len(now)} updated"), soft_wrap=True)
    for name, figures in now.items():
        old = before.get(name)
        if old is None or (old.arena, old.outside) != (figures.arena, figures.outside):
            was = "new" if old is None else f"was {format_exact(old.arena)} and {format_exact(old.outside)}"
            sizes = f"arena {format_exact(figures.arena)}, outside {format_exact(figures.outside)}"
            screen.print(Text(f"  {printable(name)}: {sizes}; {was}"), soft_wrap=True)


def _mention_unlisted(before: Mapping[str, Figures], entries: tuple[Entry, ...]) -> None:
    names = {entry.name for entry in entries}
    for name in before:
        if name not in names:
            line = f"note: {name} is in the baseline, and pyproject.toml does not list it; --update-baseline removes it"
            error_console().print(line, soft_wrap=True, markup=False)


def _show(judged: list[Judged], form: VerdictFormat) -> None:
    from memplan.cli.github import Sources, add_summary
    from memplan.report import verdicts

    if form is VerdictFormat.JSON:
        typer.echo(json.dumps(verdicts.verdicts_json(judged), indent=2, allow_nan=False))
        return
    if form is VerdictFormat.MARKDOWN:
        typer.echo(verdicts.verdicts_markdown(judged), nl=False)
        return
    from memplan.report.verdict_table import verdicts_table

    screen = console()
    screen.print(verdicts_table(judged, screen.width))
    if form is VerdictFormat.GITHUB:
        for line in verdicts.github_lines(judged, Sources.of(judged).locate):
            typer.echo(line)
        add_summary(verdicts.verdicts_markdown(judged))
