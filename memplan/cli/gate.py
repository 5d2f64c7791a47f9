"""The work of `memplan check`: the targets and rules of the command line, or those of pyproject.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memplan.analysis.figures import Figures
    from memplan.check.project import Entry, Project
    from memplan.check.rules import Rule
    from memplan.core.plan import Plan
    from memplan.report.verdicts import Judged
    from memplan.verify import Proof


@dataclass(frozen=True, slots=True)
class Work:
    """The entries to check and their limits.

    Rules of the command line (`given`) replace an entry's own, which replace the project's. `file` is the baseline.
    `verify`: prove the claims of the plans again, each within `time_limit` seconds; then no limit is needed.
    """

    entries: tuple[Entry, ...]
    given: tuple[Rule, ...]
    project: Project | None
    file: Path | None
    verify: bool = False
    time_limit: float | None = None

    def rules(self, entry: Entry) -> tuple[Rule, ...]:
        from memplan.check.rules import NOTHING_GROWS
        from memplan.errors import InvalidSize

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
        """Plan or load every entry, one after the other, check it against `before` and return the results."""
        from memplan.check.check import check as check_plan
        from memplan.cli.source import is_model, obtain
        from memplan.planning.consistency import check_consistency
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
            raise InvalidSize("limits with a plus sign are relative to a baseline", hint="add --baseline FILE")
        if entry.name not in before:
            raise UnreadableFile(
                f"has no figures of {entry.name}",
                where=str(self.file),
                hint="add them with --update-baseline, and commit the file",
            )


def given_rules(
    texts: list[str], arena: int | None, fragmentation: float | None, outside: int | None, total: int | None
) -> tuple[Rule, ...]:
    """Return the rules that the command line's limits describe. Raises `InvalidSize`, which names the option."""
    from memplan.check.check import CheckLimits
    from memplan.check.rules import parse_rule
    from memplan.errors import InvalidSize

    try:
        rules = tuple(map(parse_rule, texts))
    except InvalidSize as error:
        error.where = "--fail-over"
        raise
    limits = CheckLimits(max_arena=arena, max_fragmentation=fragmentation, max_outside=outside, max_total=total)
    return (*limits.rules, *rules)


def entries_of(targets: list[str], infer: bool, project: Project | None) -> tuple[tuple[Entry, ...], bool]:
    """Return the entries to check, and whether the project lists them: only then its baseline and rules apply."""
    from memplan.check.project import Entry
    from memplan.cli.source import is_model
    from memplan.errors import InvalidModel

    known = {entry.name: entry for entry in project.entries} if project else {}
    if targets and all(target in known for target in targets) and not infer:
        return tuple(known[target] for target in dict.fromkeys(targets)), True
    if targets:
        # --infer applies to the models among the targets, not to saved plans.
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
