"""Kernels: loops over flat arrays that run as they are on small graphs, and compiled by numba on large ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

COMPILED = 400  # ops: below, the interpreter is done before numba is imported


class CompiledKernel:
    """A function of arrays and numbers; the same result either way. Compiled code is cached on disk."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._jitted: Callable[..., Any] | None = None
        self.__doc__ = function.__doc__

    def __call__(self, ops: int, *args: Any) -> Any:
        """Run on a graph of `ops` ops."""
        if ops < COMPILED:
            return self.function(*args)
        if self._jitted is None:
            from numba import njit

            self._jitted = njit(cache=True)(self.function)
        return self._jitted(*args)
