"""The Inductor that is here: whether it has a compiler, and its errors in our words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from memplan.errors import MemplanError, UnsupportedDevice, UnsupportedGraph
from memplan.torch_inside.versions import warn_if_newer

_ATEN = 'or pass kernels="aten", which needs none of it'


def require_inductor() -> None:
    """Raise `UnsupportedDevice` if there is no C++ compiler; warn of a torch that is newer than memplan knows."""
    warn_if_newer()
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError) as error:
        raise UnsupportedDevice(
            "Inductor finds no C++ compiler, which its kernels for the CPU need",
            where='kernels="inductor"',
            hint=f"install g++ or clang, or name one in the environment variable CXX, {_ATEN}",
            see="inductor-compiler",
        ) from error


def refused(what: str) -> UnsupportedGraph:
    """Return the error for something in Inductor's code that memplan cannot plan."""
    hint = 'pass kernels="aten", which plans the same model with the kernels of eager'
    return UnsupportedGraph("Inductor's code", f"has {what}", hint, see="inductor-code")


@contextlib.contextmanager
def inductors_errors(model: str) -> Iterator[None]:
    """Raise what Inductor raises inside as an `UnsupportedGraph`, in one sentence; errors of memplan's as they are.

    Only calls of Inductor belong inside: an error of memplan's own code is no refusal.
    """
    try:
        yield
    except Exception as error:  # Inductor may raise anything, and wraps what is raised inside of it
        ours = _ours(error)
        if ours is not None:
            raise ours from None
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        what = f"Inductor cannot compile it: {type(error).__name__}: {lines[0] if lines else 'no message'}"
        raise UnsupportedGraph(model, what, 'pass kernels="aten"', see="inductor-refuses") from error


def _ours(error: BaseException | None) -> MemplanError | None:
    """Return the error of memplan's that made Inductor raise `error`; None if there is none."""
    while error is not None and not isinstance(error, MemplanError):
        error = error.__cause__ or error.__context__
    return error
