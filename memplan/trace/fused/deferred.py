"""Kernels that are compiled when a program needs them, not while their code is generated.

A plan needs the code alone. Several variants of it can be planned, and only the kernels of the one that is taken are
compiled, those of forward and backward at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache

from memplan.trace.fused.refusals import inductors_errors


class DeferredKernel:
    """A generated C++ kernel that is compiled when it is first asked for.

    Example:
        >>> kernel = DeferredKernel(["float*"], source)
        >>> kernel.start()
        >>> kernel.compiled()(tensor)
    """

    def __init__(self, argument_types: Sequence[str], source: str) -> None:
        self._argument_types, self._source = argument_types, source
        self._result: Callable[[], Callable[..., Any]] | None = None
        self._compiled: Callable[..., Any] | None = None

    def start(self) -> None:
        """Begin to compile it, beside the caller if Inductor has threads for that; Inductor's cache is used."""
        if self._result is not None:
            return
        submit = AsyncCompile.submit if get_compile_threads() > 1 else None
        with inductors_errors("a kernel"), config.patch(cpp_wrapper=False):
            self._result = CppPythonBindingsCodeCache.load_pybinding_async(
                self._argument_types, self._source, submit_fn=submit
            )

    def compiled(self) -> Callable[..., Any]:
        """Return the function that runs it, when it is compiled.

        Raises `UnsupportedGraph` if the compiler fails.
        """
        if self._compiled is None:
            self.start()
            assert self._result is not None
            with inductors_errors("a kernel"):
                self._compiled = self._result()
        return self._compiled


class DeferringCompile(AsyncCompile):
    """Compiles the kernels in code that is recorded, but leaves those of the CPU for later."""

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        """Return the kernel, which is not compiled yet."""
        return DeferredKernel(argtypes, source_code)
