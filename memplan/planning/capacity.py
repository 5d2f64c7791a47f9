"""The memory that a device has, and the parts of it that no step may use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from memplan.core.units import format_bytes, parse_share
from memplan.errors import InvalidSize, UnsupportedDevice
from memplan.planning.options import read_size

HOST = "cpu"
SLACK = 0.05  # share of the device that is left free unless the user says otherwise
ALLOWANCE = 1 << 30  # bytes: a context, its kernels, and the workspaces of cuBLAS and cuDNN

# Bytes as torch shows them (`get_device_properties().total_memory`), the least in public logs, rounded down; and the
# cost model of the device. As torch shows them: H100 79.11 GiB (vllm-project/vllm#27508) to 81090 MB; A100 with 40 GB
# 42298834944 bytes (bottlerocket-os/bottlerocket#3873); H200 139.72 to 139.81 GiB, 143156 MB. For the A100 of 80 GB and
# the L4, nvidia-smi's 81920 and 23034 MiB (modal-labs/modal-client#2797), less what torch shows less of like cards.
DEVICE_MEMORY: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "h200": (int(139.5 * 2**30), "h200"),
        "h100": (79 << 30, "h100"),
        "a100": (79 << 30, "a100"),
        "a100-40gb": (39 << 30, "a100"),
        "l4": (int(21.9 * 2**30), "l4"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The memory of a device. All sizes are bytes.

    `allowance` is what the device's context and libraries take (assumed, not measured), `slack` what is left free on
    purpose. `costs` names the cost model of the device; "" where only its size is known (an accelerator's).
    """

    device: str
    total: int
    allowance: int
    slack: int
    costs: str = ""

    @property
    def is_host(self) -> bool:
        """Whether it is the memory of this machine itself, and no accelerator's."""
        return self.costs == HOST

    @property
    def usable(self) -> int:
        """The bytes that the model and its step may use together."""
        return self.total - self.allowance - self.slack


def capacity_of(
    device: str | int, *, allowance: int | str | None = None, slack: int | float | str | None = None
) -> Capacity:
    """Return the memory of a device.

    Args:
        device: A name of `DEVICE_MEMORY`; "cpu", the memory of this machine; or a size: a number of bytes, or a text
            such as "24GiB".
        allowance: Bytes for the context and libraries; None: `ALLOWANCE` for a device, and none for a size.
        slack: What stays free: bytes, or a share of the device (0.05, "5%"); None: `SLACK`.

    Raises:
        UnsupportedDevice: The device is unknown.
        InvalidSize: A size or a share has no valid value, or nothing is left for the step.
    """
    if isinstance(device, str) and not device.strip()[:1].isdigit():
        name = device.strip().lower()
        known = (_physical(), HOST) if name == HOST else DEVICE_MEMORY.get(name)
        if known is None:
            hint = f"choose one of: {', '.join(DEVICE_MEMORY)}, {HOST}, or give its memory: 24GiB"
            what = f"{device!r} is not a device whose memory is known"
            raise UnsupportedDevice(what, where="device", hint=hint, see="unknown-memory")
        total, costs, usual = *known, ALLOWANCE
    else:
        total, costs, usual = read_size("device", device), "", 0
    taken = usual if allowance is None else read_size("allowance", allowance)
    free = _slack(slack, total)
    if total <= taken + free:
        what = f"of {format_bytes(total)}, {format_bytes(taken)} are the context's and {format_bytes(free)} stay free"
        raise InvalidSize(f"{what}: nothing is left", where="device", hint="give less slack or allowance")
    return Capacity(device=str(device), total=total, allowance=taken, slack=free, costs=costs)


def _physical() -> int:
    """Return the bytes of memory of this machine. Raises `UnsupportedDevice` where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError) as error:
        what = "this system does not say how much memory it has"
        raise UnsupportedDevice(what, where="device", hint="give its memory: 24GiB", see="unknown-memory") from error


def _slack(slack: int | float | str | None, total: int) -> int:
    """Return the bytes that stay free. Raises `InvalidSize`."""
    if slack is None or isinstance(slack, float) or (isinstance(slack, str) and slack.strip().endswith("%")):
        try:
            share = SLACK if slack is None else parse_share(slack) if isinstance(slack, str) else slack
        except InvalidSize as error:
            error.where = "slack"
            raise
        if not 0 <= share < 1:
            raise InvalidSize(f"{slack!r} is not a share from 0 to 1", where="slack", hint="write 5% or 2GiB")
        return int(total * share)
    return read_size("slack", slack)
