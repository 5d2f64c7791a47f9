"""Turns the target that the user named into a plan: loads a saved plan, or imports a model and plans it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import math
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memplan.cli.console import progress
from memplan.cli.modelfile import NamedModel, blame, load_model, names_model
from memplan.core.units import parse_share, parse_size
from memplan.errors import InvalidModel, InvalidSize
from memplan.planning.options import DEFAULTS, PlanOptions

if TYPE_CHECKING:
    from memplan.core.plan import Plan


def is_model(target: str) -> bool:
    """Return whether `target` names a model; an existing file of that name is taken as a saved plan."""
    return names_model(target) and not os.path.isfile(target)


def require_model(target: str, has_options: bool) -> None:
    """Raise `InvalidModel` if there are options for planning, and `target` is no model."""
    if has_options and not is_model(target):
        raise InvalidModel(
            "is a saved plan: options for planning, such as --infer, --ranks, --budget and --costs, are for models",
            where=target,
            hint="leave them out, or name the model as FILE.py:FACTORY",
        )


def obtain(
    target: str,
    *,
    infer: bool = False,
    options: PlanOptions = DEFAULTS,
    ranks: int | None = None,
) -> Plan:
    """Return the plan of `target`, a plan file or a model's name. torch is imported for a model only.

    `ranks`: the model's factory runs as the first of so many ranks, and may divide the model among them.
    """
    if not is_model(target):
        require_model(target, infer or ranks is not None or options != DEFAULTS)
        return _saved(target)
    if ranks is None:
        return _planned(target, infer=infer, options=options)
    from memplan.trace import fake_ranks

    with fake_ranks(ranks):
        return _planned(target, infer=infer, options=options, ranks=ranks)


def _saved(target: str) -> Plan:
    from memplan.planning.planfile import load

    if target.endswith(".py"):
        raise InvalidModel("names a file, and no factory in it", where=target, hint=f"write {target}:FACTORY")
    if not target.endswith(".json") and not os.path.isfile(target):
        raise InvalidModel(
            "is neither a plan file nor the name of a model",
            where=target,
            hint="give plan.json, FILE.py:FACTORY or package.module:FACTORY",
        )
    with progress(f"Loading {target}"):
        return load(target)


@contextlib.contextmanager
def quiet_stages(target: str) -> Iterator[NamedModel]:
    """Yield the named model, and suppress torch's output while it is traced."""
    with contextlib.redirect_stdout(sys.stderr):
        named = load_model(target)
    with progress(f"Tracing {target}"), _quiet():
        yield named


def _planned(target: str, *, infer: bool, options: PlanOptions, ranks: int | None = None) -> Plan:
    with progress(f"Importing {target}"), contextlib.redirect_stdout(sys.stderr):
        named = load_model(target)
    with progress(f"Planning {target}"), _quiet():
        from memplan.trace import plan as plan_model  # the only import here that imports torch

        try:
            plan = plan_model(
                named.model,
                named.args,
                dict(named.kwargs) or None,
                train=False if infer else None,
                options=options,
                ranks=ranks,
            )
        except Exception as error:
            raise blame(error, "planning failed", file=named.file) from error
    return dataclasses.replace(plan, model=target)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back all output: it goes to stderr if planning succeeds, and is dropped if it raises.

    torch logs tracebacks and prints graphs for what it cannot trace, which the raised error says better.
    """
    before, printed = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    finally:
        logging.disable(before)
    sys.stderr.write(printed.getvalue())


def size_option(name: str, text: str | None) -> int | None:
    """Return the bytes that an option's text describes. Raises `InvalidSize`, which names the option."""
    try:
        return None if text is None else parse_size(text)
    except InvalidSize as error:
        error.where = name
        raise


def share_option(name: str, text: str | None) -> float | None:
    """Return the share (0 to 1) that an option's text describes. Raises `InvalidSize`, which names the option."""
    try:
        return None if text is None else parse_share(text)
    except InvalidSize as error:
        error.where = name
        raise


def seconds_option(name: str, seconds: float | None) -> float | None:
    """Return a time limit in seconds. Raises `InvalidSize`, naming the option, unless it is positive and finite."""
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise InvalidSize(f"{seconds} is not a number of seconds above 0", where=name, hint="leave it out for no limit")
    return seconds
