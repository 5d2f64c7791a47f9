"""`memplan diff` compares two plans; `memplan explain` shows the live buffers of a step."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memplan.cli.console import console, wrote
from memplan.cli.outputs import SOURCE_URL_HELP
from memplan.errors import InvalidOutput

if TYPE_CHECKING:
    from memplan.core.plan import Plan
    from memplan.report.sections import Section

TARGET = "plan.json, FILE.py:FACTORY or package.module:FACTORY."
_SNAPSHOTS = (".pickle", ".pkl")


class TextFormat(enum.StrEnum):
    """The output formats of `diff`, `explain` and `budget`."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


def diff(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help=f"{TARGET[:-1]}; or what was recorded, see below.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help=TARGET)],
    *,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Draw both arenas as one page, zoomed together.")
    ] = None,
    source_url: Annotated[
        str | None,
        typer.Option("--source-url", metavar="TEMPLATE", help=f"With --html: {SOURCE_URL_HELP}"),
    ] = None,
    form: Annotated[TextFormat, typer.Option("--format", help="What to print.")] = TextFormat.TABLE,
) -> None:
    """Show what changed between two plans.

    Totals, what explains the peak, and the buffers that came, went, grew, shrank or moved to the peak.

    Buffers are matched by module, op and kind, so that plans of two versions of a model can be compared.

    A recording in place of BEFORE shows what was really allocated beside AFTER: snapshot.pickle of
    torch.cuda.memory._dump_snapshot, or of torch.profiler a memory timeline (.json, .json.gz, .raw.json.gz) or a
    chrome trace with memory (.json, .json.gz).
    """
    from memplan.analysis.profiled import is_profile
    from memplan.cli.outputs import require_outputs, require_source_url

    require_outputs({"--html": html}, before, after)
    require_source_url(source_url, html)
    if before.endswith(_SNAPSHOTS) or is_profile(before):
        if html is not None:
            what = "a recording has no plan that could be drawn"
            raise InvalidOutput(what, where="--html", hint="compare two plans, or give --format markdown")
        _allocated(before, after, form)
        return
    from memplan.analysis.diff import diff as compare
    from memplan.cli.source import obtain
    from memplan.report.diff_form import diff_json, diff_sections, diff_title

    one, two = obtain(before), obtain(after)
    found = compare(one, two)
    if html is not None:
        _page(html, one, two, source_url)
        wrote(html)
    print_sections(form, diff_title(found), diff_sections(found), lambda: diff_json(found))


def _page(path: Path, before: Plan, after: Plan, source_url: str | None) -> None:
    from memplan.analysis.holders import largest
    from memplan.cli.interrupt import stop_if_interrupted
    from memplan.cli.source_files import links_of
    from memplan.core.files import write_atomic
    from memplan.report.diff_page import diff_html

    links = links_of((holder.source for plan in (before, after) for holder in largest(plan)), source_url)
    text = diff_html(before, after, links=links)
    stop_if_interrupted()
    write_atomic(path, text)


def _allocated(recording: str, target: str, form: TextFormat) -> None:
    """Print what a recording shows beside a plan."""
    from memplan.analysis.allocated import read_snapshot
    from memplan.analysis.profiled import read_profile
    from memplan.cli.source import obtain
    from memplan.report.allocated_form import allocated_json, allocated_sections, allocated_title

    found = read_snapshot(recording) if recording.endswith(_SNAPSHOTS) else read_profile(recording)
    plan = obtain(target)
    title, sections = allocated_title(found, plan), allocated_sections(found, plan)
    print_sections(form, title, sections, lambda: allocated_json(found, plan))


def explain(
    target: Annotated[str, typer.Argument(metavar="PLAN|MODEL", help=TARGET)],
    *,
    at: Annotated[str, typer.Option("--at", metavar="STEP|peak", help="Which step to explain.")] = "peak",
    form: Annotated[TextFormat, typer.Option("--format", help="What to print.")] = TextFormat.TABLE,
) -> None:
    """Show who is alive at a step, why, and what would shrink it.

    For every buffer: which later op holds it, and for how many steps nothing touches it.
    """
    from memplan.analysis.explain import explain as explain_plan
    from memplan.cli.source import obtain
    from memplan.errors import InvalidSize
    from memplan.report.explain_form import explain_json, explain_sections, explain_title

    if at != "peak" and not (at.isascii() and at.isdigit() and len(at) < 10):
        raise InvalidSize(
            f"{at!r} is not a step of the plan", where="--at", hint="write a number of 0 or more, or peak"
        )
    found = explain_plan(obtain(target), None if at == "peak" else int(at))
    print_sections(form, explain_title(found), explain_sections(found), lambda: explain_json(found))


def print_sections(form: TextFormat, title: str, sections: Iterable[Section], data: Any) -> None:
    """Print sections in the chosen format; `data()` returns the content of the JSON."""
    if form is TextFormat.JSON:
        typer.echo(json.dumps(data(), indent=2, allow_nan=False))
    elif form is TextFormat.MARKDOWN:
        from memplan.report.sections import sections_markdown

        typer.echo(sections_markdown(title, sections), nl=False)
    else:
        from memplan.report.table import sections_table

        screen = console()
        screen.print(sections_table(title, sections, screen.width))
