"""Whether Inductor can generate kernels here that memplan can run."""

from __future__ import annotations

from torch._inductor import config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from memplan.errors import UnsupportedDevice
from memplan.torch_versions import warn_if_newer

_ATEN = 'or leave out kernels="inductor", which needs none of it'


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


def chooses_layouts() -> bool:
    """Return whether Inductor chooses the layouts of convolutions, and its user does not insist on that."""
    return bool(config.layout_optimization) and not config.force_layout_optimization


def partitions_freely() -> bool:
    """Return whether Inductor's user has set no partitioner."""
    return config.custom_partitioner_fn is None
