"""Kernels: loops over flat arrays, interpreted for small graphs and compiled by numba for large ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

COMPILED = 400  # ops: for fewer, the interpreter finishes before numba is imported


class CompiledKernel:
    """A function of arrays and numbers, interpreted or compiled with equal results. Compiled code is cached on disk."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._jitted: Callable[..., Any] | None = None
        self.__doc__ = function.__doc__

    def __call__(self, ops: int, *args: Any) -> Any:
        """Run the function, compiled if the graph has at least `COMPILED` of its `ops`."""
        if ops < COMPILED:
            return self.function(*args)
        if self._jitted is None:
            from numba import njit

            self._jitted = njit(cache=True)(self.function)
        return self._jitted(*args)
