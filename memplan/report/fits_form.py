"""Renders the answer to "does it fit" as sections, as plain text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memplan.core.jsonio import to_json
from memplan.core.units import format_bytes, format_share
from memplan.planning.memory_answer import Fits, Remedy
from memplan.report.lines import printable
from memplan.report.sections import Section, columns

FORMAT = "memplan-fits-1"


def fits_title(answer: Fits) -> str:
    """Return the verdict, such as "Llama fits h100: it needs 46.61 GiB of 79.00 GiB"."""
    verdict = "fits" if answer.fits else "does not fit"
    batch = "" if answer.batch is None else f", batch {answer.batch}"
    sizes = f"{format_bytes(answer.total)} of {format_bytes(answer.capacity.total)}"
    return f"{answer.model or 'model'} ({', '.join(answer.dtypes)}{batch}) {verdict} {answer.capacity.device}: {sizes}"


def fits_sections(answer: Fits) -> Iterator[Section]:
    """Yield the parts of the total, then the largest batch and the time, then what would make the step fit."""
    rows = tuple((label, format_bytes(size), f"{size:,}", remark) for label, size, remark in _parts(answer))
    yield Section(columns=columns("memory size> bytes>@60 remark@100"), rows=rows)
    yield Section(lines=tuple(_lines(answer)))
    if answer.remedies:
        yield Section(heading="what was tried to make it fit", lines=tuple(map(_remedy, answer.remedies)))


def _parts(answer: Fits) -> Iterator[tuple[str, int, str]]:
    """Yield (label, bytes, remark) of each part, the total, the slack and the device."""
    need, capacity = answer.need, answer.capacity
    held = f", gradients of {format_bytes(need.gradients)} among them" if need.gradients else ""
    when = "forward and backward" if need.during >= need.beside else f"{answer.optimizer}.step()"
    yield "parameters", need.parameters, "and buffers"
    yield "optimizer state", need.state, answer.optimizer
    yield "inputs", need.inputs, ""
    yield "arena", need.arena, f"what forward and backward make{held}"
    yield "beside the arena", need.beside, f"results and temporaries, the most at once: in {when}"
    yield "context, libraries", capacity.allowance, "an allowance, not measured"
    yield "needed", answer.total, ""
    yield "slack", capacity.slack, "to be left free"
    yield "device", capacity.total, capacity.device


def _lines(answer: Fits) -> Iterator[str]:
    if answer.largest_batch is not None:
        none = "not even a batch of 1 fits" if answer.batch != 1 or not answer.fits else ""
        yield f"largest batch that fits: {answer.largest_batch}" if answer.largest_batch else none
    yield f"eager is predicted to need {format_bytes(answer.eager)}"
    if answer.seconds is not None:
        what = "forward and backward" if answer.train else "the forward"
        long = answer.seconds >= 1
        time = f"{answer.seconds:,.2f} s" if long else f"{answer.seconds * 1e3:.3g} ms"
        yield f"{what} by the roofline of {answer.capacity.costs or 'the costs given'}: {time}"
    if not answer.capacity.is_host:
        yield "kernels were traced as the CPU's; what an accelerator's allocate is not known"
    elif answer.unmeasured:
        yield f"kernels are this machine's; what {answer.unmeasured} of them allocate for themselves is not known"
    else:
        yield "kernels are this machine's; what they allocate for themselves was measured, on zeros"


def _remedy(remedy: Remedy) -> str:
    verdict = "fits" if remedy.fits else "does not fit"
    sizes = f", {format_bytes(remedy.total)}" if remedy.total else ""
    time = f", predicted +{format_share(remedy.overhead)} of a step's time" if remedy.overhead is not None else ""
    return f"{remedy.how}: {verdict}{sizes}{time}: {remedy.text}"


def fits_text(answer: Fits) -> str:
    """Return the answer as plain text, without a trailing newline."""
    rows = list(_parts(answer))
    left, right = max(len(row[0]) for row in rows), max(len(format_bytes(row[1])) for row in rows)
    lines = [fits_title(answer), ""]
    lines += [f"  {label:<{left}}  {format_bytes(size):>{right}}  {remark}".rstrip() for label, size, remark in rows]
    lines += ["", *_lines(answer), *(f"tried {_remedy(remedy)}" for remedy in answer.remedies)]
    return "\n".join(map(printable, lines))


def fits_json(answer: Fits) -> dict[str, Any]:
    """Return the answer as plain types; every size is exact, in bytes. The plan is left out."""
    names = ("model", "batch", "optimizer", "dtypes", "train", "eager", "largest_batch", "seconds", "total", "fits")
    own = {name: to_json(getattr(answer, name)) for name in names}
    parts = {"need": to_json(answer.need), "capacity": to_json(answer.capacity)}
    return {"format": FORMAT, **own, **parts, "remedies": [to_json(remedy) for remedy in answer.remedies]}
