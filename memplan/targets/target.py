"""`GpuTarget`: what planning has to know of a GPU that need not be there. Never imports torch."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from memplan.core.units import parse_size
from memplan.errors import InvalidSize, UnsupportedDevice

_CAPABILITY = re.compile(r"sm_?([0-9]+)([0-9])(?::(.+))?", re.ASCII | re.IGNORECASE)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
    """A kind of GPU: what torch, Inductor and Triton ask of it before they choose a kernel.

    Args:
        name: Its name here ("h100").
        full_name: The name that its maker gave it.
        capability: NVIDIA's compute capability, as (9, 0).
        memory: The bytes of its memory that programs can have, as its driver reports them.
        multiprocessors: How many it has.
        bandwidth: That of its memory, in bytes per second, by its data sheet.
        cache: Its L2 cache in bytes.
        costs: The name of the cost model that is nearest to it.

    Example:
        >>> find_target("h100").capability
        (9, 0)
    """

    name: str
    full_name: str
    capability: tuple[int, int]
    memory: int
    multiprocessors: int
    bandwidth: float
    cache: int
    costs: str

    @property
    def workspace(self) -> int:
        """The bytes of workspaces that cuBLAS keeps once a matrix product has run: an allowance.

        On an H200 (torch 2.11, 2026-11-27), 66 to 79 MB were between the totals of four models and their peaks.
        For others it is what torch asks for by default: 8.125 MiB for cuBLAS, and as much for cuBLASLt.
        """
        return 72_000_000 if self.capability[0] == 9 else 17_000_000

    @property
    def shared_memory(self) -> int:
        """The bytes of shared memory that a block of threads may have (CUDA's programming guide, by capability)."""
        return (99 if self.capability in ((8, 6), (8, 9), (12, 0)) else 163 if self.capability == (8, 0) else 227) << 10

    @property
    def threads(self) -> int:
        """The most threads that a multiprocessor holds (CUDA's programming guide, by capability)."""
        return 1536 if self.capability in ((8, 6), (8, 9), (12, 0)) else 2048


# name: (full name, capability, GiB that the driver reports, multiprocessors, TB/s, MiB of cache, costs). The memory of
# h200, h100 and a100 was read from such devices; the others are rounded down from torch's out-of-memory errors.
_KNOWN: dict[str, tuple[str, tuple[int, int], float, int, float, int, str]] = {
    "h200": ("NVIDIA H200", (9, 0), 139.80, 132, 4.8, 60, "h200"),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 79.10, 132, 3.35, 50, "h100"),
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 79.13, 108, 2.04, 40, "a100"),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", (8, 0), 39.3, 108, 1.56, 40, "a100"),
    "l4": ("NVIDIA L4", (8, 9), 22.0, 58, 0.3, 48, "a100"),
    "l40s": ("NVIDIA L40S", (8, 9), 44.3, 142, 0.864, 96, "a100"),
    "rtx4090": ("NVIDIA GeForce RTX 4090", (8, 9), 23.6, 128, 1.008, 72, "a100"),
    "b200": ("NVIDIA B200", (10, 0), 178.3, 148, 8.0, 126, "h200"),
}
_ALIASES = {"h100-80gb": "h100", "a100-80gb": "a100", "4090": "rtx4090"}
_MODEL_OF = {(8, 0): "a100", (8, 6): "rtx4090", (8, 9): "rtx4090", (9, 0): "h100", (10, 0): "b200"}
_HINT = "name one of {names}, or a capability and its memory, as 'sm90:80GiB'"


def find_target(name: str) -> GpuTarget:
    """Return the target of a name ("h100", "a100-40gb"), or of a capability and its memory ("sm90:80GiB").

    Args:
        name: The name; letters may be large or small.

    Returns:
        The target. One that is given by its capability is like the known one of that capability, with that memory.

    Raises:
        UnsupportedDevice: The name or the capability is unknown.

    Example:
        >>> find_target("sm90:80GiB").memory
        85899345920
    """
    asked = name.strip().lower()
    asked = _ALIASES.get(asked, asked)
    if asked in _KNOWN:
        full, capability, gib, multiprocessors, bandwidth, cache, costs = _KNOWN[asked]
        return GpuTarget(
            name=asked,
            full_name=full,
            capability=capability,
            memory=int(gib * _GIB),
            multiprocessors=multiprocessors,
            bandwidth=bandwidth * 1e12,
            cache=cache << 20,
            costs=costs,
        )
    if found := _CAPABILITY.fullmatch(name.strip()):
        capability, memory = (int(found[1]), int(found[2])), found[3]
        if capability not in _MODEL_OF:
            what = f"no rules are known for capability {found[1]}.{found[2]}"
            known = ", ".join(f"sm{major}{minor}" for major, minor in _MODEL_OF)
            raise UnsupportedDevice(what, where=f"target={name!r}", hint=f"name one of {known}", see="target")
        like = find_target(_MODEL_OF[capability])
        return replace(like, name=asked, capability=capability, memory=_memory(name, memory) if memory else like.memory)
    near = difflib.get_close_matches(asked, (*_KNOWN, *_ALIASES), n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    hint = meant + _HINT.format(names=", ".join(_KNOWN))
    raise UnsupportedDevice("is no GPU that memplan knows", where=f"target={name!r}", hint=hint, see="target")


def _memory(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except InvalidSize as error:
        raise UnsupportedDevice(error.what, where=f"target={name!r}", hint=error.hint, see="target") from error
