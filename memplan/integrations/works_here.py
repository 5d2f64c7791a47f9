"""Tries, for `memplan doctor`, what memplan can do with the torch that is installed."""

from __future__ import annotations

from typing import Any, Literal

import torch

import memplan
from memplan.devices.kinds import is_available, name_of
from memplan.torch_inside.versions import KNOWN, is_newer


def look_at_torch() -> list[dict[str, Any]]:
    """Return the lines on torch's devices, and on what memplan can do with this torch, which is tried; as values.

    Example:
        >>> look_at_torch()[1]["what"]
        "eager's kernels"
    """
    lines: list[dict[str, Any]] = [{"what": "device", "found": f"cpu, {torch.get_num_threads()} threads", "ok": True}]
    kind = torch.accelerator.current_accelerator()
    if kind is not None and is_available(kind.type):
        for i in range(torch.accelerator.device_count()):
            device = torch.device(kind.type, i)
            total = torch.get_device_module(device).mem_get_info(i)[1]
            lines.append({"what": "device", "found": f"{device}, {name_of(device)} {total}", "ok": True})
    tested = f"torch {KNOWN[0]} to {KNOWN[-1]} are tested" + (", this one is newer and tried" if is_newer() else "")
    ways: dict[str, Literal["aten", "inductor"]] = {"eager's kernels": "aten", "Inductor's kernels": "inductor"}
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)), torch.ones(4, 8)
    for what, kernels in ways.items():
        try:
            memplan.plan(model, (x,), kernels=kernels)  # which compiles no kernel
            found = "works"
        except Exception as error:  # whatever torch raises is what is shown
            found = f"fails: {' '.join(str(error).split()) or type(error).__name__}"[:200]
        ok = found == "works" or (False if kernels == "aten" else None)  # without the others, eager's are there
        lines.append({"what": what, "found": found, "ok": ok, "remark": tested})
    return lines
