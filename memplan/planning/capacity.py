"""The memory that a device has, and the parts of it that no step may use."""

from __future__ import annotations

import os
from dataclasses import dataclass

from memplan.core.gpus import ALIASES, GpuTarget, find_gpu
from memplan.core.units import format_bytes, parse_percent
from memplan.errors import InvalidSize, UnsupportedDevice
from memplan.planning.options import read_size

HOST = "cpu"
SLACK = 0.05  # share of the device that is left free unless the user says otherwise
ALLOWANCE = 1 << 30  # bytes: a context, its kernels, and the workspaces of cuBLAS and cuDNN


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The memory of a device. All sizes are bytes.

    `allowance` is what the device's context and libraries take (assumed, not measured), `slack` what is left free on
    purpose. `costs` names the cost model of the device; "" where only its size is known (an accelerator's). `gpu`: what
    was named, if it is one.
    """

    device: str
    total: int
    allowance: int
    slack: int
    costs: str = ""
    gpu: GpuTarget | None = None

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
        device: A GPU, as `find_gpu` takes it; "cpu", the memory of this machine; or a size: a number of bytes, or a
            text such as "24GiB".
        allowance: Bytes for the context and libraries; None: `ALLOWANCE` for a device, and none for a size.
        slack: What stays free: bytes, or a share of the device (0.05, "5%"); None: `SLACK`.

    Raises:
        UnsupportedDevice: The device is unknown.
        InvalidSize: A size or a share has no valid value, or nothing is left for the step.
    """
    if not isinstance(device, (str, int)) or isinstance(device, bool):
        hint = f"name a GPU ('h100'), '{HOST}', or its memory ('24GiB')"
        what = f"is a {type(device).__name__}, and names no device"
        raise InvalidSize(what, where="target", hint=hint)
    text, gpu = device.strip().lower() if isinstance(device, str) else "0", None
    if text == HOST:
        total, costs, usual = _physical(), HOST, ALLOWANCE
    elif text in ALIASES or not text[:1].isdigit():
        try:
            gpu = find_gpu(str(device))
        except UnsupportedDevice as error:
            error.hint = f"{error.hint}; {HOST}; or a memory alone, as 24GiB"
            raise
        total, costs, usual = gpu.memory, gpu.costs, ALLOWANCE
    else:
        total, costs, usual = read_size("target", device), "", 0
    taken = usual if allowance is None else read_size("allowance", allowance)
    free = _slack(slack, total)
    if total <= taken + free:
        what = f"of {format_bytes(total)}, {format_bytes(taken)} are the context's and {format_bytes(free)} stay free"
        raise InvalidSize(f"{what}: nothing is left", where="target", hint="give less slack or allowance")
    return Capacity(device=str(device), total=total, allowance=taken, slack=free, costs=costs, gpu=gpu)


def _physical() -> int:
    """Return the bytes of memory of this machine. Raises `UnsupportedDevice` where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError) as error:
        what = "this system does not say how much memory it has"
        raise UnsupportedDevice(what, where="target", hint="give its memory: 24GiB", see="unknown-memory") from error


def _slack(slack: int | float | str | None, total: int) -> int:
    """Return the bytes that stay free. Raises `InvalidSize`."""
    if slack is None or isinstance(slack, float) or (isinstance(slack, str) and slack.strip().endswith("%")):
        try:
            share = SLACK if slack is None else float(parse_percent(slack)) if isinstance(slack, str) else slack
        except InvalidSize as error:
            error.where = "slack"
            raise
        if not 0 <= share < 1:
            raise InvalidSize(f"{slack!r} is not a share from 0 to 1", where="slack", hint="write 5% or 2GiB")
        return int(total * share)
    return read_size("slack", slack)
