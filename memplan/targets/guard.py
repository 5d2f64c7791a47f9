"""Builds and loads `guard.cpp`, which stands in for a device where autograd's engine asks for one in C++.

Python alone will not do: the engine asks a guard of the device's kind for the stream of every tensor, and torch takes
guards from Python for its PrivateUse1 kind alone; fake tensors of that kind are no "cuda" to Inductor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

from memplan.errors import LibraryNotInstalled

_SOURCE = Path(__file__).with_name("guard.cpp")
_COMPILERS = ("g++", "clang++", "c++")
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"  # at::detail::getCUDAHooks()


def install_guard() -> None:
    """Register the guard in this process; nothing that runs on a device can run in it from now on.

    Raises `LibraryNotInstalled` if it is not built so far and there is no C++ compiler.
    """
    libraries = Path(torch.__file__).parent / "lib"
    hooks = ctypes.CDLL(str(libraries / "libtorch_cpu.so"))[_HOOKS]
    hooks.restype = ctypes.c_void_p
    ctypes.CDLL(str(built_guard())).stand_in(ctypes.c_void_p(hooks()), torch.version.cuda is None)


def built_guard() -> Path:
    """Return the compiled guard, from the cache of the user, where it is built once for each version of torch.

    Raises `LibraryNotInstalled` if there is no C++ compiler, or it fails.
    """
    source = _SOURCE.read_bytes()
    key = hashlib.sha256(source + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memplan"
    library = folder / f"guard-{key}.so"
    if library.exists():
        return library
    hint = "install a C++ compiler (Debian: apt install g++), or name one: CXX=clang++"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *_COMPILERS))), None)
    if compiler is None:
        raise LibraryNotInstalled("planning for one builds a small C++ file", where="target", hint=hint, see="target")
    folder.mkdir(parents=True, exist_ok=True)
    made = library.with_suffix(f".{os.getpid()}")  # two processes may build it at the same time
    torch_folder = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch_folder / 'include'}"]
    run = subprocess.run(
        [compiler, *flags, "-o", str(made), str(_SOURCE), f"-L{torch_folder / 'lib'}", "-lc10"],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        made.unlink(missing_ok=True)
        lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        what = f"{compiler} could not build {_SOURCE.name}: {next((x for x in lines if 'error' in x), lines[-1])}"
        raise LibraryNotInstalled(what, where="target", hint=hint, see="target")
    made.replace(library)
    return library
