"""Carries memplan's errors through dynamo as they are."""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo.exc import ShortenTraceback

from memplan.errors import MemplanError


def through_dynamo(error: MemplanError) -> MemplanError:
    """Return an error of a kind that dynamo raises to the user as it is, instead of a `BackendCompilerFailed`.

    Example:
        >>> raise through_dynamo(BudgetInfeasible("none fits", op="mm", smallest=1024))
    """
    kind: Any = type(error)
    carried = _kind(kind).__new__(_kind(kind), *error.args)
    carried.__dict__.update(error.__dict__)
    return carried


@functools.cache
def _kind(kind: Any) -> type[MemplanError]:
    """Return a kind of error that is one of dynamo's too, with the same name and attributes."""
    attributes = {"first_useful_frame": None, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, ShortenTraceback), attributes)
