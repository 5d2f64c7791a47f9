"""`memplan fits`: says whether a training step fits a device, and which plan would."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Annotated, Any

import typer

from memplan.cli import console as c
from memplan.cli.console import Format, opt


def fits(
    target: Annotated[str, typer.Argument(metavar="MODEL", help="FILE.py:FACTORY or package.module:FACTORY.")] = "",
    *,
    hf: Annotated[str, opt("--hf FILE", "In place of MODEL, the config.json of a transformers model.")] = "",
    length: Annotated[int | None, opt("--length N", "With --hf: tokens of a sequence; default: up to 2048.")] = None,
    device: Annotated[str, opt("--target NAME|SIZE", "A GPU (h100, sm90:80GiB), cpu, or 24GiB.")],
    budget: c.Budget = None,
    kernels: c.Kernels = None,
    batch: Annotated[int | None, opt("--batch N", "Samples of a step; default: the example's.", min=1)] = None,
    optimizer: Annotated[str, opt("--optimizer NAME", "A class of torch.optim, or none.")] = "AdamW",
    dtype: Annotated[str | None, opt("--dtype TYPE", "The type of all floating-point tensors: bfloat16.")] = None,
    infer: c.Infer = False,
    allowance: Annotated[str | None, opt("--allowance SIZE", "What context and libraries take; default 1GiB.")] = None,
    slack: Annotated[str, opt("--slack SHARE|SIZE", "What is to stay free: 5% or 2GiB.")] = "5%",
    costs: c.Costs = None,
    search: Annotated[bool, opt("--search/--no-search", "Find the largest batch, and a plan that fits.")] = True,
    ranks: c.Ranks = None,
    form: c.Shown = Format.TABLE,
) -> None:
    """Say whether a training step fits a device, before it runs.

    Parameters, the optimizer's state, gradients, activations and an allowance for the device's context, each to the
    byte; the largest batch; and where it does not fit: the cheapest budget that does, and its price in time.

    Exits 1 when it does not fit.
    """
    from memplan.cli.source import NamedFactory, blame, load_factory
    from memplan.core.arguments import require_torch
    from memplan.errors import InvalidModel
    from memplan.report.forms import fits_form

    require_torch("memplan fits")
    from memplan.trace.fits import fits as answer
    from memplan.trace.step_example import batch_of, language_model

    with contextlib.redirect_stdout(sys.stderr):
        if bool(hf) == bool(target) or (length is not None and not hf):
            what, hint = "takes a model, or --hf with its --length", "name FILE.py:FACTORY, or give --hf config.json"
            raise InvalidModel(what, where="memplan fits", hint=hint)
        if hf:
            target = hf
            factory = NamedFactory(name=hf, file=hf, make=language_model(hf, length), takes_batch=True)
        else:
            factory = load_factory(target)
        named = factory.call(batch if factory.takes_batch else None)
    given: tuple[Any, ...] = (named.model, named.args, dict(named.kwargs) or None)
    if factory.takes_batch:

        def make(batch: int) -> tuple[Any, ...]:
            """Return the factory's model and inputs for a batch."""
            made = factory.call(batch)
            return made.model, made.args, dict(made.kwargs)

        given, batch = (make,), batch or batch_of((named.args, dict(named.kwargs))) or 1
    asked: dict[str, Any] = {"budget": budget, "kernels": kernels}
    try:
        with c.stages(f"Planning {target}") as tell:
            made = answer(
                *given, target=device, batch=batch, optimizer=optimizer, dtype=dtype, train=False if infer else None,
                allowance=allowance, slack=slack, costs=costs, search=search, ranks=ranks, on_progress=tell, **asked,
            )  # fmt: skip
    except Exception as error:
        raise blame(error, "planning failed", file=factory.file) from error
    c.show(fits_form(dataclasses.replace(made, model=target)), form)
    if not made.fits:
        raise typer.Exit(1)
