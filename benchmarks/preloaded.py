"""Python processes that have torch already: forked from one that has imported it, which saves each some four seconds.

The first call starts a server process (multiprocessing's "forkserver") that imports `PRELOADED` and runs nothing; each
process is a fork of it. Forks have one seed of string hashes, and so iterate over sets alike: what must not depend on
that is started in an interpreter of its own (`fresh`).
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType

PRELOADED = ("torch", "torch._dynamo", "torch._functorch.aot_autograd", "memplan.runtime")
ONE_THREAD = MappingProxyType({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"})
_LOCK = threading.Lock()  # the environment belongs to all threads


def start(
    module: str,
    arguments: Sequence[str],
    *,
    log: Path,
    folder: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    fresh: bool = False,
) -> BaseProcess:
    """Start what `python -m module arguments...` would run, and return the process.

    Args:
        module: The module's name.
        arguments: Its command line.
        log: The file for all that it writes, to standard output and to standard error.
        folder: The folder that it runs in.
        environment: Variables beside those of the caller and `ONE_THREAD`. What torch reads when it is imported is as
            it was at the first call.
        fresh: Start a new interpreter, which has torch still to import, instead of a fork.

    Returns:
        The process: `join(seconds)`, `kill()`, `exitcode`.

    Example:
        >>> done = start("benchmarks.program_run", ["vae", "eager"], log=Path("vae.log"), folder=Path())
        >>> done.join()
        >>> done.exitcode
        0
    """
    if fresh:
        context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        _serve(context)
    variables = {**os.environ, **ONE_THREAD, **environment}
    process = context.Process(target=_run, args=(module, list(arguments), str(log), str(folder), variables))
    process.start()
    return process


def _serve(context: ForkServerContext) -> None:
    """Start the server if it does not run yet."""
    with _LOCK:
        context.set_forkserver_preload(list(PRELOADED))
        before = {name: os.environ.get(name) for name in ONE_THREAD}
        os.environ.update(ONE_THREAD)
        forkserver.ensure_running()
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def _run(module: str, arguments: list[str], log: str, folder: str, environment: dict[str, str]) -> None:
    """Be the process."""
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
