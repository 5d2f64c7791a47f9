"""`memplan diff` compares two plans; `memplan explain` shows the live buffers of a step."""

from __future__ import annotations

from typing import Annotated

import typer

from memplan.cli import console as c
from memplan.cli.console import TARGET, Format, opt
from memplan.errors import InvalidOutput, InvalidSize

_BEFORE = f"{TARGET[:-1]}; or snapshot.pickle, see below."


def diff(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help=_BEFORE)],
    after: Annotated[str, typer.Argument(metavar="AFTER", help=TARGET)],
    *,
    gpu: c.Gpu = None,
    html: c.Html = None,
    form: c.Shown = Format.TABLE,
) -> None:
    """Show what changed between two plans.

    Totals, what explains the peak, and the buffers that came, went, grew, shrank or moved to the peak.

    Buffers are matched by module, op and kind, so that plans of two versions of a model can be compared.

    --target is for what is a model of the two.

    A snapshot.pickle of torch.cuda.memory._dump_snapshot in place of BEFORE shows what was really allocated.
    """
    from memplan.cli.outputs import require_outputs
    from memplan.cli.source import is_model, obtain, require_model
    from memplan.report.forms import allocated_form, diff_form

    require_outputs({"--html": html}, before, after)
    require_model(after, gpu is not None and not is_model(before))
    of_before, of_after = (gpu if is_model(target) else None for target in (before, after))
    if before.endswith((".pickle", ".pkl")):
        from memplan.analysis.allocated import read_snapshot

        if html is not None:
            what = "a recording has no plan that could be drawn"
            raise InvalidOutput(what, where="--html", hint="compare two plans, or give --format markdown")
        c.show(allocated_form(read_snapshot(before), obtain(after, gpu=of_after)), form)
        return
    from memplan.analysis.diff import diff as compare

    plans = obtain(before, gpu=of_before), obtain(after, gpu=of_after)
    found = compare(*plans)
    if html is not None:
        from memplan.core.files import write_atomic
        from memplan.report.pages import diff_html

        text = diff_html(*plans)
        c.stop_if_interrupted()
        write_atomic(html, text)
        c.wrote(html)
    c.show(diff_form(found), form)


def explain(
    target: Annotated[str, typer.Argument(metavar="PLAN|MODEL", help=TARGET)],
    *,
    gpu: c.Gpu = None,
    at: Annotated[str, opt("--at STEP|peak", "Which step to explain.")] = "peak",
    form: c.Shown = Format.TABLE,
) -> None:
    """Show who is alive at a step, why, and what would shrink it.

    For every buffer: which later op holds it, and for how many steps nothing touches it.
    """
    from memplan.analysis.explain import explain as explain_plan
    from memplan.cli.source import obtain
    from memplan.report.forms import explain_form

    if at != "peak" and not (at.isascii() and at.isdigit() and len(at) < 10):
        raise InvalidSize(f"{at!r} is not a step of the plan", where="--at", hint="write a number, or peak")
    plan = obtain(target, gpu=gpu)
    c.show(explain_form(explain_plan(plan, None if at == "peak" else int(at))), form)
