"""What `memplan check` checks, against what: the command line's targets and rules, or those of pyproject.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memplan.figures import Figures
    from memplan.plan import Plan
    from memplan.project import Entry, Project
    from memplan.report.verdicts import Judged
    from memplan.rules import Rule
    from memplan.verify import Proof


@dataclass(frozen=True, slots=True)
class Work:
    """Hold what is checked against what: rules of the command line come before an entry's, those before the project's.

    `verify`: prove again what the plans say, each proof within `time_limit` seconds; then no limit is needed.
    """

    entries: tuple[Entry, ...]
    given: tuple[Rule, ...]
    project: Project | None
    file: Path | None
    verify: bool = False
    time_limit: float | None = None

    def rules(self, entry: Entry) -> tuple[Rule, ...]:
        from memplan.errors import InvalidSize
        from memplan.rules import NOTHING_GROWS

        theirs = self.project.rules if self.project else None
        chosen = self.given or (entry.rules if entry.rules is not None else theirs)
        if chosen is None and self.file is not None:
            chosen = NOTHING_GROWS
        if self.verify:
            return chosen or ()
        if not chosen:
            raise InvalidSize(
                "no limit is given", hint="add --baseline FILE, --fail-over arena:12GiB or --max-arena 12GiB"
            )
        return chosen

    def judge(self, before: Mapping[str, Figures], *, absolute_only: bool = False) -> list[Judged]:
        """Plan or load everything, one after the other, and check it."""
        from memplan.check import check as check_plan
        from memplan.cli.source import is_model, obtain
        from memplan.plan import check_consistency
        from memplan.report.verdicts import Judged

        asked = [(entry, () if absolute_only and not self.file else self.rules(entry)) for entry in self.entries]
        judged = []
        for entry, every in asked:
            rules = tuple(r for r in every if not (absolute_only and r.needs_baseline))
            if any(r.needs_baseline for r in rules):
                self._require(entry, before)
            plan = obtain(entry.target, infer=entry.infer)
            if absolute_only:
                check_consistency(plan)
            file = entry.target.rpartition(":")[0] if is_model(entry.target) and ".py:" in entry.target else ""
            verdict = check_plan(plan, rules, before.get(entry.name))
            judged.append(Judged(name=entry.name, verdict=verdict, proofs=self._proofs(entry, plan), file=file))
        return judged

    def _proofs(self, entry: Entry, plan: Plan) -> tuple[Proof, ...]:
        if not self.verify:
            return ()
        from memplan.cli.console import progress
        from memplan.verify import verify

        with progress(f"Proving {entry.name} again"):
            return verify(plan, self.time_limit)

    def _require(self, entry: Entry, before: Mapping[str, Figures]) -> None:
        from memplan.errors import InvalidSize, UnreadableFile

        if self.file is None:
            raise InvalidSize("limits with a plus sign count from a baseline", hint="add --baseline FILE")
        if entry.name not in before:
            raise UnreadableFile(
                f"has no figures of {entry.name}",
                where=str(self.file),
                hint="add them with --update-baseline, and commit the file",
            )


def given_rules(
    texts: list[str], arena: int | None, fragmentation: float | None, outside: int | None
) -> tuple[Rule, ...]:
    """The rules that the command line's limits mean. Raises `InvalidSize` naming the option."""
    from memplan.check import Limits
    from memplan.errors import InvalidSize
    from memplan.rules import parse_rule

    try:
        rules = tuple(map(parse_rule, texts))
    except InvalidSize as error:
        error.where = "--fail-over"
        raise
    limits = Limits(max_arena=arena, max_fragmentation=fragmentation, max_outside=outside)
    return (*limits.rules, *rules)


def entries_of(targets: list[str], infer: bool, project: Project | None) -> tuple[tuple[Entry, ...], bool]:
    """What to check, and whether the project lists it: only then do its baseline and rules count."""
    from memplan.cli.source import is_model
    from memplan.errors import InvalidModel
    from memplan.project import Entry

    known = {entry.name: entry for entry in project.entries} if project else {}
    if targets and all(target in known for target in targets) and not infer:
        return tuple(known[target] for target in dict.fromkeys(targets)), True
    if targets:
        # --infer is for the models among the targets; saved plans are what they are.
        return tuple(Entry(name=t, target=t, infer=infer and is_model(t)) for t in dict.fromkeys(targets)), False
    if infer:
        raise InvalidModel(
            "--infer is for models named on the command line", hint="in pyproject.toml write infer = true for a model"
        )
    if not known:
        raise InvalidModel(
            "nothing to check",
            hint="name plans or models, or list them in pyproject.toml: [tool.memplan] models = [...]",
        )
    return tuple(known.values()), True
