"""Kernels that are compiled when a program needs them, not while their code is generated.

A plan needs the code alone. Several variants of it can be planned, and only the kernels of the one that is taken are
compiled, those of forward and backward at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch._dynamo.device_interface import get_interface_for_device
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CodeCacheFuture, CppPythonBindingsCodeCache
from torch._inductor.utils import clone_preserve_strides

from memplan.errors import InputMismatch
from memplan.trace.fused.environment import inductors_errors

ALIGNMENT = 16  # bytes: what Inductor has its Triton kernels assume of the addresses of tensors
_WIDEST, _IN_ONE_PIECE = "'r0_': 32768", "'add_persistent_rblock': True, "


class DeferredKernel:
    """A generated C++ kernel that is compiled when it is first asked for.

    Example:
        >>> kernel = DeferredKernel(["float*"], source)
        >>> kernel.start()
        >>> kernel.compiled()(tensor)
    """

    _result: Callable[[], Callable[..., Any]] | None = None
    _compiled: Callable[..., Any] | None = None

    def __init__(self, argument_types: Sequence[str], source: str) -> None:
        self._argument_types, self._source = argument_types, source

    def start(self) -> None:
        """Begin to compile it, beside the caller if Inductor has threads for that; Inductor's cache is used."""
        if self._result is None:
            with inductors_errors("a kernel"):
                self._result = self._begun()

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

    def _begun(self) -> Callable[[], Callable[..., Any]]:
        """Begin, and return what waits for the end."""
        submit = AsyncCompile.submit if get_compile_threads() > 1 else None
        load: Any = CppPythonBindingsCodeCache.load_pybinding_async
        with config.patch(cpp_wrapper=False):
            begun: Callable[[], Callable[..., Any]] = load(self._argument_types, self._source, submit_fn=submit)
        return begun


class DeferredTritonKernel(DeferredKernel):
    """A generated Triton kernel that is compiled when it is first asked for.

    What it returns then runs it on the present stream of its device, as Inductor's own code does. Inductor chooses
    among a few launch configurations by timing them at the first call. One that has rows of 32,768 numbers in registers
    is left out: it takes minutes to compile.

    Example:
        >>> kernel = DeferredTritonKernel("triton_poi_fused_relu_0", source, "cuda")
        >>> kernel.start()
        >>> kernel.compiled()(x, out, 4096)
    """

    def __init__(self, name: str, source: str, device: str) -> None:
        source = source.replace(_IN_ONE_PIECE, "") if _WIDEST in source else source
        self._name, self._source, self._device = name, source, device
        self.is_tuned = False  # set by `TunedKernel`

    @property
    def run(self) -> DeferredTritonKernel:
        """The kernel itself: Inductor's code calls the attribute `run`."""
        return self

    def _begun(self) -> Callable[[], Callable[..., Any]]:
        """Begin, and return what waits for the end."""
        begun: Any = AsyncCompile().triton(self._name, self._source, device_str=self._device)
        ready: Any = begun.result if isinstance(begun, CodeCacheFuture) else lambda: begun
        return lambda: _on_present_stream(ready().run, self._device)


class TunedKernel:
    """A Triton kernel that may write over what it reads, and still runs right where its launch configuration is chosen.

    Inductor times several configurations at the first call, on the tensors that it is given. Where a result lies over
    what the kernel reads, each run would read what the one before wrote. So the bytes are kept on the host meanwhile,
    which takes none of the device's.

    Example:
        >>> TunedKernel(kernel, over=[1], written=[1]).compiled()(x, x, 4096)
    """

    def __init__(self, kernel: DeferredTritonKernel, over: Sequence[int], written: Sequence[int]) -> None:
        """Prepare the kernel. `over`: the arguments that may lie over others. `written`: all that it writes."""
        self._kernel, self._over, self._written = kernel, tuple(over), tuple(written)

    def start(self) -> None:
        """Begin to compile it, as `DeferredTritonKernel.start`."""
        self._kernel.start()

    def compiled(self) -> Callable[..., Any]:
        """Return the function that runs it, when it is compiled."""
        run, kernel = self._kernel.compiled(), self._kernel

        def tuned(*args: Any) -> None:
            """Run the kernel; for the first time twice, with the bytes of before."""
            if not kernel.is_tuned:
                kernel.is_tuned = True
                if not any(_lies_over(args, i) for i in self._over):
                    run(*args)
                    return
                spans = [_span(args[i]) for i in self._written]
                before = [span.to("cpu", copy=True) for span in spans]
                run(*args)
                for span, kept in zip(spans, before, strict=True):
                    span.copy_(kept)
            run(*args)

        return tuned


def _lies_over(args: Sequence[Any], position: int) -> bool:
    """Return whether an argument begins at the address of another one."""
    at = args[position].data_ptr()
    return any(y.data_ptr() == at for i, y in enumerate(args) if i != position and isinstance(y, torch.Tensor))


def _span(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in one row, with what is between them in padded rows: torch copies rows with gaps by
    way of a second tensor on the device, as large as they are.
    """
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((last + 1,), (1,)) if x.numel() else x


class AligningKernel:
    """A Triton kernel that is given copies of those arguments that are not aligned as its code assumes.

    Inductor's kernels assume that all tensors begin at multiples of 16 bytes. That is so in an arena and for tensors
    that own their memory, but not for any view that a caller may pass; Inductor's own code copies such inputs too.

    Example:
        >>> AligningKernel(kernel, positions=[0]).compiled()(x[1:], out, 4096)
    """

    def __init__(
        self, kernel: DeferredTritonKernel | TunedKernel, positions: Sequence[int], written: Collection[int] = ()
    ) -> None:
        """Prepare the kernel. `positions`: the arguments that may be anywhere; of these it writes `written`."""
        self._kernel, self._positions, self._written = kernel, tuple(positions), frozenset(written)

    def start(self) -> None:
        """Begin to compile it, as `DeferredTritonKernel.start`."""
        self._kernel.start()

    def compiled(self) -> Callable[..., Any]:
        """Return the function that runs it, when it is compiled; it raises `InputMismatch` where a copy will not do."""
        run, positions, written = self._kernel.compiled(), self._positions, self._written

        def aligned(*args: Any) -> None:
            if any(args[i].data_ptr() % ALIGNMENT for i in positions):
                args = tuple(_aligned(x, i in written) if i in positions else x for i, x in enumerate(args))
            run(*args)

        return aligned


def _aligned(x: torch.Tensor, written: bool) -> torch.Tensor:
    """Return a tensor at an address that Triton kernels take: itself, or a copy."""
    if x.data_ptr() % ALIGNMENT == 0:
        return x
    if written:
        what = f"begins {x.data_ptr() % ALIGNMENT} bytes behind a multiple of {ALIGNMENT}, and the step changes it"
        raise InputMismatch(what, where="an input", hint='pass a tensor that owns its memory, or kernels="aten"')
    copied: torch.Tensor = clone_preserve_strides(x)
    return copied


def _on_present_stream(run: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return a function that launches a Triton kernel on the stream that is current when it is called."""
    found: Any = get_interface_for_device(device)
    stream_of, present = found.get_raw_stream, found.current_device

    def launch(*args: Any) -> None:
        index = args[0].get_device()
        if index in (-1, present()):  # -1: the CPU
            run(*args, stream=stream_of(index))
        else:
            with found.device(index):
                run(*args, stream=stream_of(index))

    return launch


Deferred = DeferredKernel | TunedKernel | AligningKernel


class DeferringCompile(AsyncCompile):
    """Compiles the kernels in code that is recorded, but leaves those that memplan runs for later."""

    def triton(self, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
        """Return the kernel, which is not compiled yet."""
        return DeferredTritonKernel(kernel_name, source_code, device_str)

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        """Return the kernel, which is not compiled yet."""
        return DeferredKernel(argtypes, source_code)
