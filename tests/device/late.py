"""Builds the simulated device of `late_device.cpp`, and registers it as `torch.late`.

A process can register it once, and then has it as torch's accelerator: tests load it in processes of their own.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import types
from enum import IntEnum
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

SOURCE = Path(__file__).with_name("late_device.cpp")
NAME = "late"


class Policy(IntEnum):
    """The order in which queued work runs, where streams and events leave a choice."""

    EARLY = 0  # at once
    LATE = 1  # when somebody waits for it
    SIDE_FIRST = 2  # side streams at once, the default stream late
    MAIN_FIRST = 3  # the default stream at once, side streams late
    RANDOM = 4  # in a random order, by a seed
    HALF_DONE = 5  # at once, but side streams stop in the middle of a copy until somebody waits for it


def missing_compiler() -> str | None:
    """Return why the device cannot be built here; None if it can."""
    return None if shutil.which("g++") else "there is no g++ to build the simulated device with"


def build(folder: Path) -> Path:
    """Return the library, built in `folder` unless it is there for this source and torch. Takes a minute or two."""
    base = Path(torch.__file__).parent
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    target = folder / f"late_device_{digest}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "late_device.lock"):
        if not target.exists():
            made = target.with_suffix(".tmp")
            command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", str(SOURCE), "-o", str(made)]
            command += [f"-I{base / 'include'}", f"-I{base / 'include/torch/csrc/api/include'}"]
            command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
            command += [f"-L{base / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{base / 'lib'}"]
            subprocess.run(command, check=True, timeout=600)
            made.rename(target)
    return target


class LateDevice:
    """The simulated device, once it is registered in this process."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        counts = ("tasks_run", "ran_at_once", "copies_waited", "pending", "peak")
        for name in counts:
            getattr(self._library, f"late_{name}").restype = ctypes.c_int64
        self._library.late_set_policy.argtypes = (ctypes.c_int, ctypes.c_uint64)
        self._library.late_register()
        rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, self._module())  # type: ignore[no-untyped-call]
        generate_methods_for_privateuse1_backend()

    def run(self, policy: Policy, seed: int = 1) -> None:
        """Run what is queued, and from now on by another policy."""
        self._library.late_set_policy(int(policy), seed)

    def synchronize(self) -> None:
        """Run what is queued."""
        self._library.late_synchronize()

    def allocated_peak(self, index: int) -> int:
        """Return the most bytes that were allocated on a device since this was last asked, and begin anew."""
        found = int(self._library.late_peak(index))
        self._library.late_reset_peak(index)
        return found

    @property
    def tasks_run(self) -> int:
        """The number of kernels and copies that have run."""
        return int(self._library.late_tasks_run())

    @property
    def ran_at_once(self) -> int:
        """The number of ops that waited for their stream, for want of a meta kernel."""
        return int(self._library.late_ran_at_once())

    @property
    def copies_waited(self) -> int:
        """The number of copies to or from memory that is not pinned, which block the host."""
        return int(self._library.late_copies_waited())

    @property
    def pending(self) -> int:
        """The number of tasks that have not run."""
        return int(self._library.late_pending())

    def _module(self) -> types.ModuleType:
        """Return what torch calls for a device: `torch.late`. Random numbers are drawn by the CPU's kernels."""
        module = types.ModuleType(f"torch.{NAME}")
        state = torch.zeros(16, dtype=torch.uint8)
        functions = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_is_in_bad_fork": lambda: False,
            "_lazy_init": lambda: None,
            "device_count": lambda: 2,
            "current_device": self._library.late_device,
            "set_device": lambda device: self._library.late_set_device(torch.device(NAME, device).index),
            "is_current_stream_capturing": lambda: False,
            "synchronize": lambda device=None: self.synchronize(),
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
            "get_rng_state": lambda device=None: state.clone(),
            "set_rng_state": lambda new, device=None: None,
            "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        }
        for name, function in functions.items():
            setattr(module, name, function)
        return module
