"""The GPUs that memplan knows, and `GpuTarget`: what planning has to know of one that need not be there."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from memplan.core.arguments import require_kind
from memplan.core.units import parse_size
from memplan.errors import InvalidSize, UnsupportedDevice

_CAPABILITY = re.compile(r"sm_?([0-9]+)([0-9])(?::(.+))?", re.ASCII | re.IGNORECASE)
_log = logging.getLogger("memplan")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
    """A kind of GPU: what torch, Inductor and Triton ask of it before they choose a kernel.

    Args:
        name: Its name here ("h100").
        full_name: The name that its maker gave it.
        capability: NVIDIA's compute capability, as (9, 0).
        memory: The bytes of its memory that programs can have, as torch reports them.
        multiprocessors: How many it has.
        bandwidth: That of its memory, in bytes per second, by its data sheet.
        cache: Its L2 cache in bytes.
        tf32: Floating-point operations per second of dense matrix products in TF32, by its data sheet.
        bf16: The same in BF16, with sums in 32 bits.
        link: Bytes per second that copies to and from the host reach in practice.
        updates: Bytes per second that an optimizer's update on the host is taken to read and write beside copies.
        costs: The name of its cost model in `memplan.evict.costs.DEVICES`; with a capability alone, that of the GPU
            whose figures it has.

    Example:
        >>> find_gpu("h100").capability
        (9, 0)
    """

    name: str
    full_name: str
    capability: tuple[int, int]
    memory: int
    multiprocessors: int
    bandwidth: float
    cache: int
    tf32: float
    bf16: float
    link: float
    updates: float
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


# GiB as torch shows it (`get_device_properties().total_memory`), the least in public logs, rounded down. H200 139.72
# to 139.81, H100 79.11 (vllm-project/vllm#27508), A100 with 40 GB 42298834944 bytes
# (bottlerocket-os/bottlerocket#3873); for the L4, nvidia-smi's 23034 MiB (modal-labs/modal-client#2797), less what is
# missing of like cards; for the others, torch's out-of-memory errors. The rest is from NVIDIA's data sheets (H200,
# H100 SXM, A100 SXM, L4, L40S, HGX B200) and the white papers of Ada (RTX 4090) and GA102 (RTX 3090): those of
# matrix products are dense (where a sheet has only those "with sparsity", half of it). GB/s: what PCIe 4 and 5 reach.
# (name, full name, capability, GiB, multiprocessors, TB/s, MiB of cache, TFLOP/s in TF32 and in BF16, GB/s to the host)
_SHEETS: tuple[tuple[str, str, tuple[int, int], float, int, float, int, float, float, float], ...] = (
    ("h200", "NVIDIA H200", (9, 0), 139.7, 132, 4.8, 60, 495, 989, 50),
    ("h100", "NVIDIA H100 80GB HBM3", (9, 0), 79.1, 132, 3.35, 50, 495, 989, 50),
    ("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 79.1, 108, 2.04, 40, 156, 312, 25),
    ("a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0), 39.3, 108, 1.56, 40, 156, 312, 25),
    ("l4", "NVIDIA L4", (8, 9), 21.9, 58, 0.3, 48, 60, 121, 25),
    ("l40s", "NVIDIA L40S", (8, 9), 44.3, 142, 0.864, 96, 183, 362, 25),
    ("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 23.6, 128, 1.008, 72, 82.6, 165.2, 25),
    ("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), 23.5, 82, 0.936, 6, 35.6, 71, 25),
    ("b200", "NVIDIA B200", (10, 0), 178.3, 148, 8.0, 126, 1100, 2250, 50),
)
# GB/s of the host's memory that are taken for updates beside copies, by the link: of 90 GB/s in a desktop (two channels
# of DDR5-5600), and of 307 in a server (eight of DDR5-4800). A core of an EPYC updates bf16 at 15 to 23 (torch 2.13).
_UPDATES = {25.0: 40, 50.0: 150}
GPUS: Mapping[str, GpuTarget] = MappingProxyType(
    {
        name: GpuTarget(
            name=name,
            full_name=full_name,
            capability=capability,
            memory=int(gib * 2**30),
            multiprocessors=multiprocessors,
            bandwidth=terabytes * 1e12,
            cache=mib << 20,
            tf32=tf32 * 1e12,
            bf16=bf16 * 1e12,
            link=link * 1e9,
            updates=_UPDATES[link] * 1e9,
            costs=name,
        )
        for name, full_name, capability, gib, multiprocessors, terabytes, mib, tf32, bf16, link in _SHEETS
    }
)
ALIASES = {"h100-80gb": "h100", "a100-80gb": "a100", "4090": "rtx4090", "3090": "rtx3090"}
_OF_CAPABILITY = {(8, 0): "a100", (8, 6): "rtx3090", (8, 9): "rtx4090", (9, 0): "h100", (10, 0): "b200"}


def described(costs: str) -> str:
    """Return the name of costs as people read it: that of a known device says that they are of its data sheet."""
    return f"{costs} (data sheet)" if costs.partition("/")[0] in GPUS else costs


def find_gpu(name: str, where: str = "target", *, quiet: bool = False) -> GpuTarget:
    """Return the GPU of a name ("h100", "a100-40gb"), or of a capability and its memory ("sm90:80GiB").

    Args:
        name: The name; letters may be large or small.
        where: The option that names it, for errors.
        quiet: Say nothing of one that is given by its capability: it was said when the plan was made.

    Returns:
        The GPU. One that is given by its capability is like the known one of that capability, with that memory; the log
        says so.

    Raises:
        UnsupportedDevice: The name or the capability is unknown.

    Example:
        >>> find_gpu("sm90:80GiB").memory
        85899345920
    """
    require_kind(name, str, where, "name a GPU, such as 'h100'")
    asked, where = name.strip().lower(), f"{where}={name!r}"
    if (known := GPUS.get(ALIASES.get(asked, asked))) is not None:
        return known
    if found := _CAPABILITY.fullmatch(name.strip()):
        capability = int(found[1]), int(found[2])
        if capability not in _OF_CAPABILITY:
            what = f"no rules are known for capability {found[1]}.{found[2]}"
            hint = f"name one of {', '.join(f'sm{major}{minor}' for major, minor in _OF_CAPABILITY)}"
            raise UnsupportedDevice(what, where=where, hint=hint, see="target")
        like = GPUS[_OF_CAPABILITY[capability]]
        try:
            memory = parse_size(found[3]) if found[3] else like.memory
        except InvalidSize as error:
            raise UnsupportedDevice(error.what, where=where, hint=error.hint, see="target") from error
        if not quiet:
            _log.warning("%s is planned with the multiprocessors, cache and speed of %s", name.strip(), like.full_name)
        return replace(like, name=name.strip(), memory=memory)
    near = difflib.get_close_matches(asked, (*GPUS, *ALIASES), n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    hint = f"{meant}name one of {', '.join(GPUS)}, or a capability and its memory, as 'sm90:80GiB'"
    raise UnsupportedDevice("is no GPU that memplan knows", where=where, hint=hint, see="target")


def gpu_called(full_name: str) -> GpuTarget | None:
    """Return the known GPU that a driver calls so ("NVIDIA H100 PCIe"); None for no GPU known, and a part of one."""
    words = re.split(r"[^a-z0-9]+", full_name.lower().replace("rtx ", "rtx"))
    if {"laptop", "mig"} & set(words):
        return None
    found = [gpu for gpu in GPUS.values() if set(gpu.name.split("-")) <= set(words)]
    return max(found, key=lambda gpu: len(gpu.name), default=None)
