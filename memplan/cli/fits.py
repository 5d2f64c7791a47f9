"""`memplan fits`: says whether a training step fits a device, and what would make it fit."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memplan.cli.compare import TextFormat, print_sections

if TYPE_CHECKING:
    from memplan.planning.memory_answer import Fits


def fits(
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="FILE.py:FACTORY or package.module:FACTORY; none with --hf.")
    ] = None,
    *,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME|SIZE", help="h100, h200, a100, a100-40gb, l4, cpu, or 24GiB.")
    ],
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, metavar="N", help="Samples of a step; default: the example's.")
    ] = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="NAME", help="A class of torch.optim, or none.")
    ] = "AdamW",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="TYPE", help="The type of all floating-point tensors: bfloat16.")
    ] = None,
    hf: Annotated[
        Path | None,
        typer.Option("--hf", metavar="CONFIG.json", help="A configuration of transformers, or its folder."),
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option("--architecture", metavar="CLASS", help="The class of the model, if the configuration has none."),
    ] = None,
    sequence: Annotated[
        int | None, typer.Option("--sequence", metavar="TOKENS", help="Tokens of a sample, with --hf.")
    ] = None,
    infer: Annotated[bool, typer.Option("--infer", help="The forward alone, without gradients.")] = False,
    allowance: Annotated[
        str | None, typer.Option("--allowance", metavar="SIZE", help="What context and libraries take; default 1GiB.")
    ] = None,
    slack: Annotated[
        str, typer.Option("--slack", metavar="SHARE|SIZE", help="What is to stay free: 5% or 2GiB.")
    ] = "5%",
    costs: Annotated[
        str | None, typer.Option("--costs", metavar="DEVICE|FILE", help="The costs of predicted times.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search/--no-search", help="Find the largest batch, and what would make it fit.")
    ] = True,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", help="One of N ranks that share the parameters.")
    ] = None,
    form: Annotated[TextFormat, typer.Option("--format", help="What to print.")] = TextFormat.TABLE,
) -> None:
    """Say whether a training step fits a device, before it runs.

    Parameters, the optimizer's state, gradients, activations and an allowance for the device's context, each to the
    byte; the largest batch; and where it does not fit: the cheapest budget that does, and its price in time.

    Exits 1 when it does not fit.
    """
    from memplan.core.extras import require_torch
    from memplan.report.fits_form import fits_json, fits_sections, fits_title

    _require_one(target, hf, architecture, sequence)
    require_torch("memplan fits")
    options = {
        "device": device, "batch": batch, "optimizer": optimizer, "dtype": dtype, "train": False if infer else None,
        "allowance": allowance, "slack": slack, "costs": costs, "search": search, "ranks": ranks,
    }  # fmt: skip
    made = _of_config(hf, architecture, sequence, options) if target is None else _of_target(target, options)
    print_sections(form, fits_title(made), fits_sections(made), lambda: fits_json(made))
    if not made.fits:
        raise typer.Exit(1)


def _require_one(target: str | None, hf: Path | None, architecture: str | None, sequence: int | None) -> None:
    """Raise `InvalidModel` unless there is one model, and options for a configuration only with one."""
    from memplan.errors import InvalidModel

    if (target is None) == (hf is None):
        what = "names no model" if target is None else "names two models"
        hint = "give FILE.py:FACTORY, or --hf CONFIG.json of a model of transformers"
        raise InvalidModel(what, where="memplan fits", hint=hint)
    if hf is None and (architecture, sequence) != (None, None):
        what = "--architecture and --sequence are for --hf"
        raise InvalidModel(what, where="memplan fits", hint="leave them out: the factory decides")


def _of_target(target: str, options: dict[str, Any]) -> Fits:
    """Return the answer for the model that a factory makes."""
    from memplan.cli.modelfile import blame, load_factory

    with contextlib.redirect_stdout(sys.stderr):
        factory = load_factory(target)
        named = factory.call(options["batch"] if factory.takes_batch else None)

    def make(batch: int) -> tuple[Any, ...]:
        """Return the factory's model and inputs for a batch."""
        made = factory.call(batch)
        return made.model, made.args, dict(made.kwargs)

    if factory.takes_batch:
        from memplan.trace.meta_model import batch_of

        own = options["batch"] or batch_of((named.args, dict(named.kwargs))) or 1
        given: tuple[Any, ...] = (make,)
        options = {**options, "batch": own}
    else:
        given = (named.model, named.args, dict(named.kwargs) or None)
    try:
        return _answer(given, options, target)
    except Exception as error:
        raise blame(error, "planning failed", file=factory.file) from error


def _of_config(hf: Path | None, architecture: str | None, sequence: int | None, options: dict[str, Any]) -> Fits:
    """Return the answer for a configuration of transformers."""
    from memplan.cli.stages import stages
    from memplan.trace.model_config import model_of_config

    assert hf is not None
    with stages(f"Reading {hf}") as tell, contextlib.redirect_stdout(sys.stderr):
        made = model_of_config(hf, architecture=architecture, length=sequence, dtype=options["dtype"])
        tell(f"made {made.name} on the meta device")
    step = f"{made.name}, {made.length} tokens" if made.length else made.name
    # The type is the configuration's already; giving it again would cast what transformers keeps in float32.
    return _answer((made.make,), {**options, "dtype": None, "batch": options["batch"] or 1}, step)


def _answer(given: tuple[Any, ...], options: dict[str, Any], name: str) -> Fits:
    """Return the answer, named, while its progress is shown."""
    import dataclasses

    from memplan.cli.stages import stages
    from memplan.trace.fits import fits as answer

    with stages(f"Planning {name}") as tell:
        return dataclasses.replace(answer(*given, **options, on_progress=tell), model=name)
