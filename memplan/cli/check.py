"""`memplan check`: fails the build if a model needs more memory than its limits or its baseline allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli import console as c
from memplan.cli.console import Format, opt
from memplan.errors import InvalidModel, InvalidSize, UnreadableFile, located

if TYPE_CHECKING:
    from memplan.analysis.rows import Figures
    from memplan.check.check import Finding, Rule
    from memplan.check.project import Entry, Project
    from memplan.report.verdicts import Judged, Location

_TARGETS = "plan.json, FILE.py:FACTORY or package.module:FACTORY; else those of pyproject.toml."
_FAIL_OVER = "arena:12GiB, arena:+2%, arena:+64MiB, fragmentation:5%, outside:+0; also peak and total. Repeatable."


def check(
    targets: Annotated[list[str] | None, typer.Argument(metavar="[PLAN|MODEL]...", help=_TARGETS)] = None,
    *,
    baseline: Annotated[Path | None, opt("--baseline FILE", "Figures to compare with: nothing may grow.")] = None,
    fail_over: Annotated[list[str] | None, opt("--fail-over FIGURE:LIMIT", _FAIL_OVER)] = None,
    update_baseline: Annotated[bool, opt("--update-baseline", "Write the current figures to the baseline.")] = False,
    max_arena: Annotated[str | None, opt("--max-arena SIZE", "As --fail-over arena:SIZE.")] = None,
    max_fragmentation: Annotated[str | None, opt("--max-fragmentation SHARE", "As --fail-over fragmentation:.")] = None,
    max_outside: Annotated[str | None, opt("--max-outside SIZE", "As --fail-over outside:SIZE.")] = None,
    max_total: Annotated[str | None, opt("--max-total SIZE", "As --fail-over total:SIZE.")] = None,
    gpu: c.Gpu = None,
    optimizer: Annotated[str | None, opt("--optimizer NAME", "Whose state the total has; default AdamW.")] = None,
    infer: c.Infer = False,
    form: c.Shown = Format.TABLE,
) -> None:
    """Fail when a plan or a model needs more than it may, or more than it did.

    Exits 1 when a limit is exceeded, and shows by how much and which buffers explain it.

    A figure that is equal to its limit keeps it. Saved plans are checked without torch.

    \\[tool.memplan] in pyproject.toml may list models, baseline and fail-over: then `memplan check` does it all.
    """
    from memplan.check.baseline import read_baseline
    from memplan.check.project import find_project

    most = {"arena": max_arena, "fragmentation": max_fragmentation, "outside": max_outside, "total": max_total}
    given = [_rule(f"--max-{name}", f"{name}:{text}") for name, text in most.items() if text is not None]
    given += [_rule("--fail-over", text) for text in fail_over or ()]
    project = find_project(Path.cwd())
    entries, listed = _entries(targets or [], infer, gpu, project)
    owner, whole = project if listed else None, listed and not targets
    file = baseline or (owner.baseline if owner else None)
    if update_baseline and file is None:
        raise InvalidSize("there is no baseline to update", hint="add --baseline FILE")
    work = _Work(file, optimizer)
    asked = [(entry, work.rules(given, entry, owner)) for entry in entries]
    if update_baseline:
        _update(work, asked, whole=whole, form=form)
        return
    before = read_baseline(file) if file else {}
    judged = [work.judge(entry, rules, before) for entry, rules in asked]
    _show(judged, form)
    for name in before.keys() - {entry.name for entry in entries} if whole else ():
        line = f"note: {name} is in the baseline, and pyproject.toml does not list it; --update-baseline removes it"
        c.say(line, stderr=True)
    if not all(j.verdict.ok for j in judged):
        raise typer.Exit(1)


def _rule(option: str, text: str) -> Rule:
    """Return the rule that an option's text describes. Raises `InvalidSize`, which names the option."""
    from memplan.check.check import parse_rule

    with located(option):
        return parse_rule(text)


def _entries(
    targets: list[str], infer: bool, gpu: str | None, project: Project | None
) -> tuple[tuple[Entry, ...], bool]:
    """Return the entries to check, and whether the project lists them: only then its baseline and rules apply."""
    from memplan.check.project import Entry
    from memplan.cli.source import is_model

    known = {entry.name: entry for entry in project.entries} if project else {}
    if targets and all(target in known for target in targets) and not (infer or gpu):
        return tuple(known[target] for target in dict.fromkeys(targets)), True
    if targets:
        # --infer and --target apply to the models among the targets, not to saved plans.
        models = {t: is_model(t) for t in targets}
        found = [
            Entry(name=_named(t, gpu if ours else None), target=t, infer=infer and ours, gpu=gpu if ours else None)
            for t, ours in models.items()
        ]
        return tuple(found), False
    if infer or gpu:
        hint = 'in pyproject.toml write infer = true, or gpu = "h100", for a model'
        raise InvalidModel("--infer and --target are for models named on the command line", hint=hint)
    if not known:
        hint = "name plans or models, or list them in pyproject.toml: [tool.memplan] models = [...]"
        raise InvalidModel("nothing to check", hint=hint)
    return tuple(known.values()), True


def _named(target: str, gpu: str | None) -> str:
    """Return the name of a model in the baseline: its plan for a GPU is another one."""
    return target if gpu is None else f"{target} on {gpu}"


@dataclass(frozen=True, slots=True)
class _Work:
    """The way in which entries are checked: against the baseline in `file`, if any.

    `optimizer`: the one that counts in the total of every entry; None: the entry's own.
    """

    file: Path | None
    optimizer: str | None

    def rules(self, given: Sequence[Rule], entry: Entry, project: Project | None) -> tuple[Rule, ...]:
        """Return the limits of an entry: those of the command line, else its own, else the project's."""
        from memplan.check.check import NOTHING_GROWS

        theirs = project.rules if project else None
        chosen = given or (entry.rules if entry.rules is not None else theirs)
        if chosen is None and self.file is not None:
            chosen = NOTHING_GROWS
        if not chosen:
            hint = "add --baseline FILE, --fail-over arena:12GiB or --max-arena 12GiB"
            raise InvalidSize("no limit is given", hint=hint)
        return tuple(chosen)

    def judge(
        self,
        entry: Entry,
        rules: tuple[Rule, ...],
        before: Mapping[str, Figures],
        *,
        absolute_only: bool = False,
    ) -> Judged:
        """Plan or load an entry, check it against `before` and return the result."""
        from memplan.check.check import check as check_plan
        from memplan.cli.source import is_model, obtain
        from memplan.planning.planfile import check_consistency
        from memplan.report.verdicts import Judged

        rules = tuple(r for r in rules if not (absolute_only and r.needs_baseline))
        if any(r.needs_baseline for r in rules) and self.file is None:
            raise InvalidSize("limits with a plus sign are relative to a baseline", hint="add --baseline FILE")
        if any(r.needs_baseline for r in rules) and entry.name not in before:
            hint = "add them with --update-baseline, and commit the file"
            raise UnreadableFile(f"has no figures of {entry.name}", where=str(self.file), hint=hint)
        plan = obtain(entry.target, infer=entry.infer, gpu=entry.gpu)
        if absolute_only:
            check_consistency(plan)
        file = entry.target.rpartition(":")[0] if is_model(entry.target) and ".py:" in entry.target else ""
        verdict = check_plan(plan, rules, before.get(entry.name), optimizer=self.optimizer or entry.optimizer)
        return Judged(name=entry.name, verdict=verdict, file=file)


def _update(work: _Work, asked: Sequence[tuple[Entry, tuple[Rule, ...]]], *, whole: bool, form: Format) -> None:
    """Write the current figures to the baseline, unless a plan is invalid or exceeds an absolute limit."""
    from memplan.check import baseline
    from memplan.cli.outputs import require_outputs
    from memplan.core.units import format_exact

    assert work.file is not None
    require_outputs({"--baseline": work.file}, *(entry.target for entry, _ in asked))
    before = baseline.read_baseline(work.file) if work.file.exists() else {}
    judged = [work.judge(entry, rules, before, absolute_only=True) for entry, rules in asked]
    if not all(j.verdict.ok for j in judged):
        _show(judged, form)
        c.say(f"{work.file} was not written: a limit is exceeded", stderr=True, style="bold red")
        raise typer.Exit(1)
    now = {j.name: j.verdict.figures for j in judged}
    c.stop_if_interrupted()
    before = baseline.update_baseline(work.file, now, whole=whole)
    c.say(f"wrote {work.file}: {len(now)} updated")
    for name, figures in now.items():
        old = before.get(name)
        if old is None or (old.arena, old.outside) != (figures.arena, figures.outside):
            was = "new" if old is None else f"was {format_exact(old.arena)} and {format_exact(old.outside)}"
            sizes = f"arena {format_exact(figures.arena)}, outside {format_exact(figures.outside)}"
            c.say(f"  {name}: {sizes}; {was}")


def _show(judged: Sequence[Judged], form: Format) -> None:
    from memplan.cli.outputs import Sources
    from memplan.report.verdicts import check_form, github_lines, sources_of

    c.show(check_form(judged), form)
    if form is Format.GITHUB:
        findings = (finding for j in judged for finding in j.verdict.findings)
        files = Sources(source for finding in findings for source in sources_of(finding))

        def locate(one: Judged, finding: Finding) -> Location | None:
            """Return the line that explains `finding` best, else the file of the model's factory, else None."""
            lines = (files.find(source, one.file) for source in sources_of(finding))
            file = files.relative(one.file) if one.file else ""
            return next((line for line in lines if line), (file, 0) if file else None)

        for line in github_lines(judged, locate):
            typer.echo(line)
