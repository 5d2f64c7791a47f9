"""`memplan fits`: says whether a training step fits a device, and what would make it fit."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memplan.cli import console as c
from memplan.cli.console import Format, opt
from memplan.errors import InvalidModel

if TYPE_CHECKING:
    from memplan.planning.memory_answer import Fits

_TARGET = "FILE.py:FACTORY or package.module:FACTORY; none with --hf."
_CLASS = "The class of the model, if the configuration has none."


def fits(
    target: Annotated[str | None, typer.Argument(metavar="MODEL", help=_TARGET)] = None,
    *,
    device: Annotated[str, opt("--device NAME|SIZE", "h100, h200, a100, a100-40gb, l4, cpu, or 24GiB.")],
    batch: Annotated[int | None, opt("--batch N", "Samples of a step; default: the example's.", min=1)] = None,
    optimizer: Annotated[str, opt("--optimizer NAME", "A class of torch.optim, or none.")] = "AdamW",
    dtype: Annotated[str | None, opt("--dtype TYPE", "The type of all floating-point tensors: bfloat16.")] = None,
    hf: Annotated[Path | None, opt("--hf CONFIG.json", "A configuration of transformers, or its folder.")] = None,
    architecture: Annotated[str | None, opt("--architecture CLASS", _CLASS)] = None,
    sequence: Annotated[int | None, opt("--sequence TOKENS", "Tokens of a sample, with --hf.")] = None,
    infer: c.Infer = False,
    allowance: Annotated[str | None, opt("--allowance SIZE", "What context and libraries take; default 1GiB.")] = None,
    slack: Annotated[str, opt("--slack SHARE|SIZE", "What is to stay free: 5% or 2GiB.")] = "5%",
    costs: c.Costs = None,
    search: Annotated[bool, opt("--search/--no-search", "Find the largest batch, and what would make it fit.")] = True,
    ranks: c.Ranks = None,
    form: c.Shown = Format.TABLE,
) -> None:
    """Say whether a training step fits a device, before it runs.

    Parameters, the optimizer's state, gradients, activations and an allowance for the device's context, each to the
    byte; the largest batch; and where it does not fit: the cheapest budget that does, and its price in time.

    Exits 1 when it does not fit.
    """
    from memplan.core.extras import require_torch
    from memplan.report.forms import fits_form

    if (target is None) == (hf is None):
        what = "names no model" if target is None else "names two models"
        hint = "give FILE.py:FACTORY, or --hf CONFIG.json of a model of transformers"
        raise InvalidModel(what, where="memplan fits", hint=hint)
    if hf is None and (architecture, sequence) != (None, None):
        what, hint = "--architecture and --sequence are for --hf", "leave them out: the factory decides"
        raise InvalidModel(what, where="memplan fits", hint=hint)
    require_torch("memplan fits")
    options = {
        "device": device, "batch": batch, "optimizer": optimizer, "dtype": dtype, "train": False if infer else None,
        "allowance": allowance, "slack": slack, "costs": costs, "search": search, "ranks": ranks,
    }  # fmt: skip
    made = _of_target(target or "", options) if hf is None else _of_config(hf, architecture, sequence, options)
    c.show(fits_form(made), form)
    if not made.fits:
        raise typer.Exit(1)


def _of_target(target: str, options: dict[str, Any]) -> Fits:
    """Return the answer for the model that a factory makes."""
    from memplan.cli.source import blame, load_factory

    with contextlib.redirect_stdout(sys.stderr):
        factory = load_factory(target)
        named = factory.call(options["batch"] if factory.takes_batch else None)
    given: tuple[Any, ...] = (named.model, named.args, dict(named.kwargs) or None)
    if factory.takes_batch:
        from memplan.trace.meta_model import batch_of

        def make(batch: int) -> tuple[Any, ...]:
            """Return the factory's model and inputs for a batch."""
            made = factory.call(batch)
            return made.model, made.args, dict(made.kwargs)

        own = options["batch"] or batch_of((named.args, dict(named.kwargs))) or 1
        given, options = (make,), {**options, "batch": own}
    try:
        return _answer(given, options, target)
    except Exception as error:
        raise blame(error, "planning failed", file=factory.file) from error


def _of_config(hf: Path, architecture: str | None, sequence: int | None, options: dict[str, Any]) -> Fits:
    """Return the answer for a configuration of transformers."""
    from memplan.trace.model_config import model_of_config

    with c.stages(f"Reading {hf}") as tell, contextlib.redirect_stdout(sys.stderr):
        made = model_of_config(hf, architecture=architecture, length=sequence, dtype=options["dtype"])
        tell(f"made {made.name} on the meta device")
    step = f"{made.name}, {made.length} tokens" if made.length else made.name
    # The type is the configuration's already; giving it again would cast what transformers keeps in float32.
    return _answer((made.make,), {**options, "dtype": None, "batch": options["batch"] or 1}, step)


def _answer(given: tuple[Any, ...], options: dict[str, Any], name: str) -> Fits:
    """Return the answer, named, while its progress is shown."""
    from memplan.trace.fits import fits as answer

    with c.stages(f"Planning {name}") as tell:
        return dataclasses.replace(answer(*given, **options, on_progress=tell), model=name)
